"""Checkpoints that are whole or absent, whenever the process is killed."""

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
    """``CheckpointHook`` that never leaves half a file, and deletes an old checkpoint only after the new one is there.

    With ``max_keep_ckpts`` or ``save_best``, mmengine deletes first; a process killed then would have nothing left.
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
        """Where a checkpoint does not fit on the disk, the error says from which one the run can go on."""
        try:
            yield
        except NoRoomError as error:
            last = newest_whole_checkpoint(self.out_dir)
            left = f'The last checkpoint, {last}, is whole.' if last else 'There is no checkpoint before it.'
            how = 'go on with --resume' if last else 'start again'
            raise NoRoomError(f'{error} {left} Make room, then {how}.') from None

    def _delete_old(self) -> None:
        best = [getattr(self, 'best_ckpt_path', None), *getattr(self, 'best_ckpt_path_dict', {}).values()]
        # New files may have the names of old ones.
        self.file_backend.delete_all_but(self.last_ckpt, *best)


class _DeletesLater:
    """A file backend that deletes nothing before ``delete_all_but`` is called."""

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
    """The last saved file of a work directory, or of other folders, that a run can go on from.

    mmengine goes by ``last_checkpoint``, which may be half written itself, or name a file that is. What it names is
    tried first: in a copied folder times say nothing.
    """
    files = [path for folder in (work_dir, *folders) for path in Path(folder).glob('*.pth')]
    files.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    note = Path(work_dir, 'last_checkpoint')
    named = Path(note.read_text().strip()).name if note.exists() else ''
    files.sort(key=lambda path: path.name != named)
    return next((path for path in files if can_resume_from(path)), None)


def can_resume_from(path: Path) -> bool:
    """Whether a file is a complete checkpoint of a training run: its archive is intact, and it has the optimizer."""
    try:
        # The end of the archive says where its parts are, and each part has a checksum.
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return False
        content = torch.load(path, map_location='cpu', mmap=True, weights_only=False)
    except Exception:  # whatever a broken file makes torch raise
        return False
    return isinstance(content, dict) and {'meta', 'state_dict', 'optimizer'} <= content.keys()
