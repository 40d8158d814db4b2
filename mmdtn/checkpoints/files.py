"""Reads checkpoints without executing code in them, and writes checkpoints completely or not at all."""

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
    """Raised when a file is damaged or is not a checkpoint."""


class UnfitFile(UserError, ValueError):
    """Raised when a checkpoint does not fit a model."""


class _Log:
    """Replacement for MMEngine's HistoryBuffer, whose unpickling looks up functions by name."""


# Types other than tensors in MMEngine's checkpoints. Unpickling these types does not run code.
_array: Any = np.zeros(1).__reduce__()[0]
_scalar: Any = np.float64(0).__reduce__()[0]
PLAIN_DATA: list = [np.ndarray, np.dtype, _array, _scalar]
PLAIN_DATA += [type(np.dtype(kind)) for kind in np.typecodes['AllInteger'] + np.typecodes['AllFloat'] + '?SU']
PLAIN_DATA += [(f, f'numpy.core.multiarray.{f.__name__}') for f in (_array, _scalar)]  # names in NumPy 1
PLAIN_DATA.append(argparse.Namespace)  # arguments in checkpoints of timm's training script
PLAIN_DATA += [
    (_Log, 'mmengine.logging.history_buffer.HistoryBuffer'),
    (lambda owner, name: name, 'builtins.getattr'),  # looks up the methods of HistoryBuffer
]


def read(source: str | Path) -> State:
    """Reads a checkpoint and returns its state dict.

    The weights may form the whole file or be stored under a key such as ``state_dict``, ``model``, ``net`` or
    ``model_state_dict``. The prefix ``module.`` from distributed training is removed. If the file contains a moving
    average of the weights, as timm's training checkpoints do, the average is returned. For checkpoints of
    facebookresearch/dino, the teacher is returned.

    Args:
        source: Path, URL, or any other location that MMEngine's file backends support.
    """
    return state_of(load(str(source)), source)


def state_of(checkpoint: Any, source: str | Path) -> State:
    """Extracts the state dict from the result of :func:`load`. Error messages name ``source``.

    The supported layouts are described in :func:`read`.
    """
    for key in ('state_dict_ema', 'model_state_dict', 'state_dict', 'model', 'module', 'net', 'teacher'):
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    if not isinstance(checkpoint, dict) or not any(isinstance(value, Tensor) for value in checkpoint.values()):
        raise ValueError(
            f'{source} contains no model. Expected a dict of tensors, possibly under the key state_dict or model, but '
            f'found {_describe(checkpoint)}.'
        )
    strange = [key for key, value in checkpoint.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if strange:
        raise ValueError(f'{source}: these entries of the state dict are not tensors: {strange[:5]}.')
    broken = [k for k, v in checkpoint.items() if v.is_floating_point() and not v.isfinite().all()]
    if broken:
        raise ValueError(f'{source} has NaN or infinite values in {broken[:5]}. It is damaged, or training diverged.')
    return {key.removeprefix('module.'): value for key, value in checkpoint.items()}


def write(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Saves a checkpoint. At any time, ``path`` contains either the old file or the complete new file."""
    with whole_file(path) as file:
        torch.save(checkpoint, file)


def load(source: str) -> Any:
    """Returns the complete content of a checkpoint. Raises an error for files that would run code on loading."""
    if source.startswith(('http://', 'https://')):
        source = str(fetch(source))
    try:
        data = mmengine.fileio.get(source)
    except FileNotFoundError:
        raise FileNotFoundError(f'There is no checkpoint {source}. Relative paths start at {Path.cwd()}.') from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(f'{source} cannot be read: {error}') from None
    if SAFETENSORS.match(data):
        try:
            return safetensors.torch.load(data)
        except Exception as error:
            raise UnreadableFile(f'{source} is a damaged safetensors file: {error}') from None
    if zipfile.is_zipfile(io.BytesIO(data)):
        # torch does not verify the checksums in its files, so it would silently load a flipped bit.
        try:
            damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()
        except Exception as error:  # zipfile raises many types of errors for damaged files
            raise UnreadableFile(f'{source} is damaged: {error}') from None
        if damaged:
            raise UnreadableFile(
                f'{source} is damaged: the checksum of its part {damaged} is wrong. Download the file again.'
            )
    try:
        with torch.serialization.safe_globals(PLAIN_DATA):
            return torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)
    except Exception as error:  # torch raises many types of errors for damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnreadableFile(
            f'{source} ({len(data)} bytes) is not a checkpoint that can be loaded without running code from it. It may '
            f'be incomplete, be another kind of file, or contain pickled objects. The error is: {_short(reason)}'
        ) from None


def _short(lines: list[str]) -> str:
    useful = [line for line in lines if 'Unsupported' in line or 'GLOBAL' in line] or lines
    return useful[0][:200]


def _describe(checkpoint: Any) -> str:
    if isinstance(checkpoint, dict):
        return f'a dict with the keys {[str(key) for key in checkpoint][:8]}'
    return f'an object of type {type(checkpoint).__name__}'
