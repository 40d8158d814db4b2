"""Files that are whole or absent, whenever the process that writes them is killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mmengine.fileio import LocalBackend, register_backend

from mmdtn.errors import NO_ROOM, UserError

PARTIAL = '.partial'


class NoRoomError(UserError, OSError):
    """A file does not fit on its disk."""


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a new file next to ``path``, and moves it to ``path`` once it is complete.

    A reader of ``path`` finds the old file or the whole new one, also where several processes write it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{os.getpid()}{PARTIAL}')
    try:
        with open(partial, 'wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes a file; where it does not fit, the error says how much room it needs and how much there is."""
    content = content.encode() if isinstance(content, str) else content
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free = shutil.disk_usage(Path(path).parent).free
        raise NoRoomError(
            f'{path} cannot be written, as {NO_ROOM[error.errno]}: it needs {_size(len(content))}, and its disk has '
            f'{_size(free)} left. Files that were written before are whole.'
        ) from None


def _size(number: int) -> str:
    return f'{number / 2**20:.1f} MB'


class WholeFileBackend(LocalBackend):
    """mmengine's local files, each written by :func:`whole_file`."""

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        write_whole(filepath, obj.encode(encoding))

    def put(self, obj: bytes, filepath: str | Path) -> None:
        write_whole(filepath, obj)


def write_whole_files() -> None:
    """Registers the backend with mmengine, whose runners, strategies and hooks all save files through it."""
    register_backend('local', WholeFileBackend, force=True, prefixes='')
