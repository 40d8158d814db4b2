"""Describes a checkpoint format. Each model family has a module that defines its formats."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .files import State

Heads = Callable[[str, State], int | tuple[int, ...] | None]
Eps = Callable[[str, State], float | None]


def as_they_are(state: State) -> State:
    """Returns the state dict of this package without changes."""
    return dict(state)


@dataclass(frozen=True)
class Format:
    """Describes one format of checkpoints.

    Args:
        backbone: Name of the backbone class in this package that loads such files.
        marks: Regular expressions. Each of them matches at least one key of such files.
        convert: Function that translates a state dict to the names and shapes of this package.
        misses: Regular expressions that match no key of such files.
        dropped: Regular expressions for keys that the backbone does not need, each with the reason.
        heads: Function of the name of an attention layer and the translated state dict. Returns the number of heads,
            several possible numbers, or None if the file does not determine it.
        eps: Function of the name of a norm and the translated state dict. Returns the norm's eps, or None if the file
            does not determine it.
        norms: Function of the name of a norm and the translated state dict. Returns each ``norm_cfg`` that the tensors
            allow. If the result is empty, only eps is checked.
        choices: Normalisers that have the same tensors, by the names that ``convert.py --norm`` accepts.
        settings: Function of the original state dict. Returns the arguments that the backbone needs for the file.
        computed: Function of the translated state dict and the backbone. Returns the keys whose values the backbone
            computes itself, each with the reason. Raises ValueError if the backbone computes different values.
        check: Function of a backbone. Returns the reason why the backbone would compute different outputs with the
            weights of such files, or ''.
        note: Function of the translated state dict. Returns a message for the user about settings that the tensors do
            not determine, or ''.
        in_auto: Function of the original state dict. Returns whether to consider the format if the user names none.
        norm_cfg: Normaliser in the file, unless ``settings`` returns a different one.
        out_type: ``out_type`` with which the backbone returns the features of the original model. None means that the
            file contains a whole model.
    """

    backbone: str
    marks: tuple[str, ...]
    convert: Callable[[State], State] = as_they_are
    misses: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    heads: Heads = lambda attention, state: None
    eps: Eps = lambda norm, state: None
    norms: Callable[[str, State], Sequence[Mapping[str, Any]]] = lambda norm, state: ()
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Callable[[State], dict[str, Any]] = lambda state: {}
    computed: Callable[[State, nn.Module], dict[str, str]] = lambda state, backbone: {}
    check: Callable[[nn.Module], str] = lambda backbone: ''
    note: Callable[[State], str] = lambda state: ''
    in_auto: Callable[[State], bool] = lambda state: True
    norm_cfg: Mapping[str, Any] | None = field(default_factory=lambda: dict(type='LN'))
    out_type: str | None = None

    @property
    def is_own(self) -> bool:
        """Returns whether the format is one of this package's own, whose tensors do not determine the config."""
        return self.convert is as_they_are

    def recognises(self, keys: Iterable[str]) -> bool:
        keys = list(keys)
        return all(_any(m, keys) for m in self.marks) and not any(_any(m, keys) for m in self.misses)


def _any(pattern: str, keys: list[str]) -> bool:
    return any(re.match(pattern, key) for key in keys)


def without(state: State, dropped: Iterable[str]) -> State:
    """Returns only the tensors whose keys match none of the patterns."""
    return {key: value for key, value in state.items() if not any(re.match(pattern, key) for pattern in dropped)}
