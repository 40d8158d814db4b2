"""Files that are whole or absent, whenever the process that writes them is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mmengine.fileio import LocalBackend, register_backend

PARTIAL = '.partial'


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
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class WholeFileBackend(LocalBackend):
    """mmengine's local files, each written by :func:`whole_file`."""

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        write_whole(filepath, obj.encode(encoding))

    def put(self, obj: bytes, filepath: str | Path) -> None:
        write_whole(filepath, obj)


def write_whole_files() -> None:
    """Registers the backend with mmengine, whose runners, strategies and hooks all save files through it."""
    register_backend('local', WholeFileBackend, force=True, prefixes='')
