"""Turns errors that users can fix into one-line messages."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

# Messages from mmengine and build_norm about names that are not registered.
UNKNOWN_NAME = re.compile(
    r"Failed to get (\S+)$|(\S+) is not in the .+ registry\.|norm_cfg has type='(\S+)', which is not registered"
)

# Reasons why the operating system cannot write a file.
NO_ROOM = {
    errno.ENOSPC: 'the disk is full',
    errno.EDQUOT: 'your disk quota is used up',
    errno.EFBIG: 'it is larger than `ulimit -f` or the file system allows',
}
INTERRUPTED = 130  # exit code: 128 plus the number of SIGINT


class UserError(Exception):
    """Error that the command-line tools print without a traceback."""


@contextmanager
def readable_errors(debug: bool = False) -> Iterator[None]:
    """Exits with a one-line message if :func:`explain` has one. Other errors keep their traceback.

    After Ctrl-C, the exit code is 130, as shells expect. The KeyboardInterrupt's message tells how to resume.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if debug:
            raise
        print(f'error: {first_line(stop) if stop.args else "stopped."}', file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        message = None if debug else explain(error)
        if message is None:
            raise
        sys.exit(f'error: {message}' if isinstance(error, UserError) else f'error: {message} (traceback: --debug)')


def explain(error: BaseException) -> str | None:
    """Returns a one-line message if the config, the data or the environment caused the error, and otherwise None."""
    if isinstance(error, UserError):
        # A data worker's error contains a traceback that ends with the original message.
        return str(error).strip().rpartition(f'{type(error).__name__}: ')[2]
    if isinstance(error, ModuleNotFoundError):
        return f'{error}: run `python -m mmdtn.doctor` to check the environment'
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        name = 'a file' if error.filename is None else os.fsdecode(error.filename)
        return f'{name} cannot be written because {NO_ROOM[error.errno]}'
    if isinstance(error, OSError) and error.filename is not None:
        return _explain_path(error)
    if isinstance(error, FileNotFoundError):
        return first_line(error)
    if unknown := UNKNOWN_NAME.match(first_line(error)):
        name = unknown[unknown.lastindex or 0]
        from .registry import registered  # imports mmengine, without which the doctor must run

        known = (other for other, _ in registered())
        return f'type={name!r} is not registered: is it misspelt, or not in custom_imports?{nearest(name, known)}'
    modules = (frame.f_globals.get('__name__') for frame, _ in walk_tb(error.__traceback__))
    return first_line(error) if 'mmengine.registry.build_functions' in modules else None  # raised by a constructor


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message, which lists the ``known`` names closest to ``name``."""
    by_lower = {other.lower(): other for other in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.5)
    return f'; nearest: {", ".join(by_lower[other] for other in close)}' if close else ''


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # str(KeyError) adds quotes
    return next(iter(str(text).strip().splitlines()), type(error).__name__)


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
