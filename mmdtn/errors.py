"""What went wrong, in one line for the person who wrote the config."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

# What mmengine, and build_norm, say of a name that no registry has.
UNKNOWN_NAME = re.compile(
    r"Failed to get (\S+)$|(\S+) is not in the .+ registry\.|norm_cfg has type='(\S+)', which nothing registered"
)

# Why the system cannot write a file that does not fit.
NO_ROOM = {
    errno.ENOSPC: 'the disk is full',
    errno.EDQUOT: 'your quota of the disk is used up',
    errno.EFBIG: 'it is larger than `ulimit -f` or the file system allows',
}
INTERRUPTED = 130  # 128 and the number of SIGINT


class UserError(Exception):
    """A message that says all there is to say; the command lines print it without a traceback."""


@contextmanager
def readable_errors(debug: bool = False) -> Iterator[None]:
    """Ends the process with one line where the error is explained; any other error keeps its traceback.

    Ctrl-C ends it with code 130, as shells expect; the message of the KeyboardInterrupt says how to go on.
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
    """One line for an error that the config, the data or the environment caused; None for any other."""
    if isinstance(error, UserError):
        # A data worker's error arrives inside a text that ends with the original one.
        return str(error).strip().rpartition(f'{type(error).__name__}: ')[2]
    if isinstance(error, ModuleNotFoundError):
        return f'{error}: `python -m mmdtn.doctor` tells what the environment lacks'
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        name = 'a file' if error.filename is None else os.fsdecode(error.filename)
        return f'{name} cannot be written, as {NO_ROOM[error.errno]}'
    if isinstance(error, OSError) and error.filename is not None:
        return _explain_path(error)
    if isinstance(error, FileNotFoundError):
        return first_line(error)
    if unknown := UNKNOWN_NAME.match(first_line(error)):
        name = unknown[unknown.lastindex or 0]
        from .registry import registered  # mmengine, without which the doctor has to run

        known = (other for other, _ in registered())
        return f'type={name!r} is not registered: is it misspelt, or not in custom_imports?{nearest(name, known)}'
    modules = (frame.f_globals.get('__name__') for frame, _ in walk_tb(error.__traceback__))
    return first_line(error) if 'mmengine.registry.build_functions' in modules else None  # of a constructor


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: which of the ``known`` names may have been meant."""
    by_lower = {other.lower(): other for other in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.5)
    return f'; nearest: {", ".join(by_lower[other] for other in close)}' if close else ''


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has no message."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # str(KeyError) is in quotes
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
