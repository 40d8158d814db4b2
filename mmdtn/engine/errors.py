"""What went wrong, in one line for the person who wrote the config."""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mmengine.config import Config
from mmengine.registry import OPTIMIZERS, Registry, build_from_cfg


class UserError(Exception):
    """A message that says all there is to say; the command lines print it without a traceback."""


@contextmanager
def readable_errors(debug: bool = False) -> Iterator[None]:
    """Ends the process with one line where the error is explained; any other error keeps its traceback."""
    try:
        yield
    except Exception as error:
        message = None if debug else explain(error)
        if message is None:
            raise
        sys.exit(f'error: {message}' if isinstance(error, UserError) else f'error: {message} (traceback: --debug)')


def explain(error: BaseException) -> str | None:
    """One line for an error that the config, the data or the environment caused; None for any other."""
    if isinstance(error, UserError):
        # A data worker's error arrives inside a text that ends with the original one.
        return str(error).strip().rpartition(f'{type(error).__name__}: ')[2]
    frames = list(_frames(error))
    if isinstance(error, ModuleNotFoundError):
        return f'{error}: `python -m mmdtn.doctor` tells what the environment lacks'
    if isinstance(error, OSError) and error.filename is not None:
        return _explain_path(error)
    if isinstance(error, FileNotFoundError):
        return _first_line(error)
    for frame in reversed(frames):
        if frame.f_code is Registry.get.__code__:
            return _explain_name(frame.f_locals['self'], frame.f_locals['key'])
    for frame in reversed(frames):
        if frame.f_code is build_from_cfg.__code__:
            kind = frame.f_locals.get('obj_cls')
            if kind is None:  # the registry has nothing of that name
                return _explain_name(frame.f_locals['registry'], frame.f_locals['obj_type'])
            return _explain_argument(kind, error) or f'{kind.__name__}: {_with_nearest(_first_line(error))}'
    for frame in reversed(frames):
        if 'optimizer_cls' in frame.f_locals and frame.f_locals['optimizer_cls'] is None:
            return _explain_name(OPTIMIZERS, frame.f_locals['optimizer_cfg']['type'])
    if any(frame.f_code is Config.fromfile.__code__ for frame in frames):
        return _explain_config(error, frames)
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: which of the ``known`` names may have been meant."""
    by_lower = {other.lower(): other for other in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.5)
    return f'; nearest: {", ".join(by_lower[other] for other in close)}' if close else ''


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _first_line(error: BaseException) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # str(KeyError) is in quotes
    return next(iter(str(text).strip().splitlines()), type(error).__name__)


def _with_nearest(message: str) -> str:
    """A message that names in quotes what was given, and then what would do."""
    given, *known = re.findall(r"'([\w.-]+)'", message) or ['']
    return message.rstrip('.') + nearest(given, known)


def _explain_name(registry: Registry, name: str) -> str:
    known: set[str] = set()
    place: Registry | None = registry
    while place is not None:
        known |= set(place.module_dict)
        place = place.parent
    return f'type={name!r} is not in the registry {registry.scope}::{registry.name}{nearest(name, known)}'


def _explain_argument(kind: type, error: BaseException) -> str | None:
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found is None:
        return None
    known: set[str] = set()
    for base in inspect.getmro(kind) if inspect.isclass(kind) else (kind,):
        try:
            known |= set(inspect.signature(base).parameters) - {'self', 'args', 'kwargs'}
        except ValueError:  # a class written in C
            continue
    return f'{kind.__name__} has no argument {found[1]!r}{nearest(found[1], known)}'


def _explain_path(error: OSError) -> str:
    path = Path(os.fsdecode(error.filename))
    if not isinstance(error, FileNotFoundError):
        return f'{path}: {error.strerror}'
    if path.exists():
        return f'{path}: {error}'
    missing, parent = path, path.parent
    while not parent.exists():
        missing, parent = parent, parent.parent
    there = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    where = f': there is no {missing.name!r} in {parent.resolve()}' if missing != path else ''
    return f'{path} does not exist{where}{nearest(missing.name, there)}'


def _explain_config(error: BaseException, frames: list[FrameType]) -> str:
    """With the file that was being read, which may be one that the config inherits from."""
    reading = [f for f in frames if f.f_code.co_filename == Config.fromfile.__code__.co_filename]
    file = next(f.f_locals['filename'] for f in reversed(reading) if 'filename' in f.f_locals)
    if isinstance(error, SyntaxError):
        return f'{file}, line {error.lineno}: {error.msg}'
    return f'{file}: {_first_line(error)}'
