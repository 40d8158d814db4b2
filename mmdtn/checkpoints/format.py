"""What a published format is, for those that describe one: a file for each family of models."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .files import State

Heads = Callable[[str, State], int | tuple[int, ...] | None]
Eps = Callable[[str, State], float | None]


def as_they_are(state: State) -> State:
    """Translates files of this package."""
    return dict(state)


@dataclass(frozen=True)
class Format:
    """One kind of file.

    Args:
        backbone: Name of the class of this package that such a file is for.
        marks: Patterns. Each of them matches a key of such a file.
        convert: Translates a state dict.
        misses: Patterns that match no key of such a file.
        dropped: Patterns of keys that the backbone has no use for, each with the reason.
        heads: Number of heads of an attention, or all that it may have, by its name and the translated state, or None
            where files do not tell.
        eps: What a norm adds to the variance, by its name and the translated state, or None where files do not tell.
        norms: What a norm may be, by its name and the translated state: each ``norm_cfg`` that the tensors allow. None:
            LayerNorm with the eps of ``eps``, or what a training makes of it.
        choices: The normalisers among which tensors do not tell, by the names that ``convert.py --norm`` takes.
        settings: Arguments, other than defaults, that the backbone needs for a file, by the tensors of the file.
        computed: Keys of the translated state that the backbone computes itself, each with the reason. Raises
            ValueError if the backbone computes something else.
        check: Says why a backbone would compute something else with the weights of such files; '' where it does not.
        note: What the user has to know about a file whose tensors do not tell all, by the translated state.
        in_auto: Whether a file with such keys has this format unless the user names another, by its tensors.
        norm_cfg: Normaliser with which the backbone computes what the model of the file does, unless ``settings`` gives
            another one.
        out_type: Output with which it gives what that model gives; None: the file holds a whole model.
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
        """Whether files of this package are meant, whose tensors do not tell how their model was configured."""
        return self.convert is as_they_are

    def recognises(self, keys: Iterable[str]) -> bool:
        keys = list(keys)
        return all(_any(m, keys) for m in self.marks) and not any(_any(m, keys) for m in self.misses)


def _any(pattern: str, keys: list[str]) -> bool:
    return any(re.match(pattern, key) for key in keys)


def without(state: State, dropped: Iterable[str]) -> State:
    """The tensors whose keys match none of the patterns."""
    return {key: value for key, value in state.items() if not any(re.match(pattern, key) for pattern in dropped)}
