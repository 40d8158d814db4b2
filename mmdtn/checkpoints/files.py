"""Checkpoints on disk: read without executing anything, written whole or not at all."""

import argparse
import io
import zipfile
from pathlib import Path
from typing import Any

import mmengine.fileio
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from mmdtn.errors import UserError
from mmdtn.files import whole_file

from .fetch import SAFETENSORS, fetch

State = dict[str, Tensor]


class UnreadableFile(UserError, ValueError):
    """A checkpoint that is damaged, or something else."""


class UnfitFile(UserError, ValueError):
    """A checkpoint that a model cannot be started from."""


class _Log:
    """Takes the place of mmengine's HistoryBuffer, which would look up functions by name; nobody reads it here."""


# What mmengine's own checkpoints hold beside tensors: plain data, none of which runs code when it is unpickled.
_array: Any = np.zeros(1).__reduce__()[0]
_scalar: Any = np.float64(0).__reduce__()[0]
PLAIN_DATA: list = [np.ndarray, np.dtype, _array, _scalar]
PLAIN_DATA += [type(np.dtype(kind)) for kind in np.typecodes['AllInteger'] + np.typecodes['AllFloat'] + '?SU']
PLAIN_DATA += [(f, f'numpy.core.multiarray.{f.__name__}') for f in (_array, _scalar)]  # as numpy 1 called them
PLAIN_DATA.append(argparse.Namespace)  # of the arguments, in timm's training files
PLAIN_DATA += [
    (_Log, 'mmengine.logging.history_buffer.HistoryBuffer'),
    (lambda owner, name: name, 'builtins.getattr'),  # a HistoryBuffer's methods
]


def read(source: str | Path) -> State:
    """The tensors by name of a checkpoint: a path, a URL, or whatever else mmengine's file backends know.

    Takes what classifiers', detectors' and bare models' files hold under ``state_dict``, ``model``, ``net`` or
    ``model_state_dict``, without the ``module.`` that distributed training puts in front; of timm's training files the
    moving average, and of those of facebookresearch/dino the teacher.
    """
    return state_of(load(str(source)), source)


def state_of(checkpoint: Any, source: str | Path) -> State:
    """The tensors of what :func:`load` gives, as :func:`read` gives them."""
    for key in ('state_dict_ema', 'model_state_dict', 'state_dict', 'model', 'module', 'net', 'teacher'):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    if not isinstance(checkpoint, dict) or not any(isinstance(value, Tensor) for value in checkpoint.values()):
        raise ValueError(
            f'{source} holds no model: expected tensors by name, perhaps under the key state_dict or model, '
            f'but found {_describe(checkpoint)}.'
        )
    strange = [key for key, value in checkpoint.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if strange:
        raise ValueError(f'{source}: these entries among the weights are no tensors: {strange[:5]}.')
    broken = [k for k, v in checkpoint.items() if v.is_floating_point() and not v.isfinite().all()]
    if broken:
        raise ValueError(f'{source}: NaN or infinite values in {broken[:5]}; the file is damaged or training diverged.')
    return {key.removeprefix('module.'): value for key, value in checkpoint.items()}


def write(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Saves a checkpoint: whoever reads ``path`` finds the old file or the whole new one."""
    with whole_file(path) as file:
        torch.save(checkpoint, file)


def load(source: str) -> Any:
    """All that a checkpoint holds; whatever would run code on loading is refused."""
    if source.startswith(('http://', 'https://')):
        source = str(fetch(source))
    try:
        data = mmengine.fileio.get(source)
    except FileNotFoundError:
        raise FileNotFoundError(f'There is no checkpoint {source}; paths are relative to {Path.cwd()}.') from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f'{source} cannot be read: {error}') from None
    if SAFETENSORS.match(data):
        try:
            return safetensors.torch.load(data)
        except Exception as error:
            raise UnreadableFile(f'{source} is a damaged safetensors file: {error}') from None
    if zipfile.is_zipfile(io.BytesIO(data)):
        # torch does not look at the checksums that it writes: a flipped bit would be loaded as it is.
        try:
            damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()
        except Exception as error:  # zipfile, zlib and struct each have errors of their own for this
            raise UnreadableFile(f'{source} is damaged: {error}') from None
        if damaged:
            raise UnreadableFile(f'{source} is damaged: the checksum of its part {damaged} is wrong. Fetch it again.')
    try:
        with torch.serialization.safe_globals(PLAIN_DATA):
            return torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)
    except Exception as error:  # pickle, zip reader and torch raise anything from EOFError to RuntimeError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnreadableFile(
            f'{source} ({len(data)} bytes) is not a checkpoint that can be loaded without running code from it; it may '
            f'be cut short, another kind of file, or hold pickled objects: {_short(reason)}'
        ) from None


def _short(lines: list[str]) -> str:
    useful = [line for line in lines if 'Unsupported' in line or 'GLOBAL' in line] or lines
    return useful[0][:200]


def _describe(checkpoint: Any) -> str:
    if isinstance(checkpoint, dict):
        return f'a dict with the keys {[str(key) for key in checkpoint][:8]}'
    return f'an object of type {type(checkpoint).__name__}'
