"""Hook that writes checkpoints completely or not at all, even if the process is killed."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import master_only
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mmdtn.files import PARTIAL, NoRoomError, write_whole_files


@HOOKS.register_module()
class WholeCheckpointHook(CheckpointHook):
    """``CheckpointHook`` that leaves no partial files, and deletes old checkpoints only after the new one is saved.

    With ``max_keep_ckpts`` or ``save_best``, mmengine deletes the old checkpoint first. A process killed at that moment
    would leave no checkpoint.
    """

    file_backend: Any

    def before_train(self, runner: Runner) -> None:
        write_whole_files()
        super().before_train(runner)
        self.file_backend = _DeletesLater(self.file_backend)
        self._remove_partial_files()

    @master_only
    def _remove_partial_files(self) -> None:
        if '://' not in str(self.out_dir):
            for leftover in Path(self.out_dir).glob(f'*.pth.*{PARTIAL}'):
                leftover.unlink()

    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        with self._naming_the_last():
            super().after_train_iter(*args, **kwargs)
        self._delete_old()

    def after_train_epoch(self, *args: Any, **kwargs: Any) -> None:
        with self._naming_the_last():
            super().after_train_epoch(*args, **kwargs)
        self._delete_old()

    def after_val_epoch(self, *args: Any, **kwargs: Any) -> None:
        with self._naming_the_last():
            super().after_val_epoch(*args, **kwargs)
        self._delete_old()

    @contextmanager
    def _naming_the_last(self) -> Iterator[None]:
        """If the disk is full, names the checkpoint to resume from in the error message."""
        try:
            yield
        except NoRoomError as error:
            last = newest_whole_checkpoint(self.out_dir)
            left = f'The last checkpoint, {last}, is complete.' if last else 'There is no checkpoint before it.'
            how = 'use --resume' if last else 'start again'
            raise NoRoomError(f'{error} {left} Free some space, then {how}.') from None

    def _delete_old(self) -> None:
        best = [getattr(self, 'best_ckpt_path', None), *getattr(self, 'best_ckpt_path_dict', {}).values()]
        # A new file may have the same name as an old one.
        self.file_backend.delete_all_but(self.last_ckpt, *best)


class _DeletesLater:
    """File backend that postpones all deletions until ``delete_all_but`` is called."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._deletions: list[tuple[Callable[[str], None], str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self._deletions.append((self._backend.remove, path))

    def rmtree(self, path: str) -> None:
        self._deletions.append((self._backend.rmtree, path))

    def delete_all_but(self, *kept: str | None) -> None:
        for delete, path in self._deletions:
            if path not in kept:
                delete(path)
        self._deletions.clear()


def newest_whole_checkpoint(work_dir: str | Path, *folders: str | Path) -> Path | None:
    """Returns the newest checkpoint that a run can resume from, in its work directory or other folders.

    MMEngine resumes from the checkpoint named in the file ``last_checkpoint``. The file or the checkpoint may be
    incomplete. The named checkpoint is tried first, because copying a folder can change modification times.
    """
    files = [path for folder in (work_dir, *folders) for path in Path(folder).glob('*.pth')]
    files.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    note = Path(work_dir, 'last_checkpoint')
    named = Path(note.read_text().strip()).name if note.exists() else ''
    files.sort(key=lambda path: path.name != named)
    return next((path for path in files if can_resume_from(path)), None)


def can_resume_from(path: Path) -> bool:
    """Returns whether a file is a complete checkpoint that includes the optimizer state."""
    try:
        # A zip archive has its directory at the end, and a checksum for each entry.
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return False
        content = torch.load(path, map_location='cpu', mmap=True, weights_only=False)
    except Exception:  # torch raises various exceptions for broken files
        return False
    return isinstance(content, dict) and {'meta', 'state_dict', 'optimizer'} <= content.keys()
