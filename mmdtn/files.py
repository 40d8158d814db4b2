"""Writes files completely or not at all, even if the process is killed."""

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
    """Raised if a file does not fit on the disk."""


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a temporary file next to ``path``, and renames it to ``path`` after writing it completely.

    Even while several processes write, a reader of ``path`` finds either the old file or a complete new one.
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
    """Writes a file completely or not at all.

    If the file does not fit on the disk, the error tells how much space is needed and how much is free.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        free = shutil.disk_usage(Path(path).parent).free
        raise NoRoomError(
            f'{path} cannot be written because {NO_ROOM[error.errno]}. It needs {_size(len(content))}, and the disk '
            f'has {_size(free)} left. Files written earlier are complete.'
        ) from None


def _size(number: int) -> str:
    return f'{number / 2**20:.1f} MB'


class WholeFileBackend(LocalBackend):
    """Variant of mmengine's backend for local files that writes each file with :func:`write_whole`."""

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        write_whole(filepath, obj.encode(encoding))

    def put(self, obj: bytes, filepath: str | Path) -> None:
        write_whole(filepath, obj)


def write_whole_files() -> None:
    """Registers the backend with mmengine, whose runners, strategies and hooks save all files through backends."""
    register_backend('local', WholeFileBackend, force=True, prefixes='')
