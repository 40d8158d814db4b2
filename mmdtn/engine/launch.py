"""Options and functions shared by the command lines for training and testing."""

import argparse
import gc
import os
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.device import is_cuda_available, is_npu_available
from mmengine.dist import barrier, is_distributed
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS, LOOPS, RUNNERS, VISBACKENDS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.distributed import destroy_process_group

from mmdtn.errors import UserError
from mmdtn.files import write_whole_files
from mmdtn.models import read_config
from mmdtn.registry import class_of

from .checkpoint_loaders import register_loaders
from .cpu import keep_freed_memory, run_on_cpu
from .hooks.whole_checkpoint import newest_whole_checkpoint


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--work-dir', help='directory for logs and checkpoints (default: work_dirs/NAME_OF_CONFIG)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to override, as in a.b=1 c=[2,3]')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument(
        '--strict', action='store_true', help='stop at a broken image or annotation instead of skipping it'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)  # passed by torch.distributed.launch


def load_config(args: argparse.Namespace) -> Config:
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    cfg.launcher = args.launcher
    if args.work_dir or not cfg.get('work_dir'):
        cfg.work_dir = args.work_dir or str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    write_whole_files()
    register_loaders()
    if not has_accelerator():
        keep_freed_memory()
        if cfg.launcher != 'none':
            run_on_cpu(cfg)
    return Runner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)


def leave_together() -> None:
    """Lets all processes exit together. gloo aborts if one exits while others still communicate with it."""
    if is_distributed():
        gc.collect()  # frees the runner, whose FSDP model keeps process groups alive
        barrier()
        destroy_process_group()


def has_accelerator() -> bool:
    return is_cuda_available() or is_npu_available()


def add_runtime(cfg: Config, file: Path) -> list[str]:
    """Merges configs/_base_/runtime.py into a config, and returns a line for each change.

    Replaces only mmengine's own loops and checkpoint hook.
    """
    runtime, lines = Config.fromfile(file).runtime, []
    ours = runtime.default_hooks.checkpoint
    loop = class_of(cfg.train_cfg, LOOPS) if 'type' in cfg.train_cfg else None  # None: by_epoch selects the loop
    if loop in (None, EpochBasedTrainLoop, IterBasedTrainLoop):
        cfg.train_cfg.pop('by_epoch', None)  # mmengine accepts a type or by_epoch, but not both
        cfg.train_cfg.update(runtime.train_cfg)
        lines.append(f'train_cfg: {runtime.train_cfg.type} replaces {loop.__name__ if loop else "by_epoch"}')
    hooks = cfg.get('default_hooks') or {}
    checkpoint = hooks.get('checkpoint', dict(type=CheckpointHook, interval=1))  # the default of mmengine
    if checkpoint and class_of(checkpoint, HOOKS) is CheckpointHook:
        cfg.default_hooks = dict(hooks, checkpoint={**checkpoint, **ours})
        lines.append(f'default_hooks.checkpoint: {ours.type} replaces CheckpointHook')
    lines += [f'custom_hooks: {hook.type} added' for hook in runtime.custom_hooks if add_hook(cfg, **hook)]
    visualizer = cfg.get('visualizer') or dict(type='Visualizer')
    backends = visualizer.get('vis_backends') or []
    present = [class_of(backend, VISBACKENDS) for backend in backends]
    added = [backend for backend in runtime.visualizer.vis_backends if class_of(backend, VISBACKENDS) not in present]
    cfg.visualizer = dict(visualizer, vis_backends=[*backends, *added])
    lines += [f'visualizer.vis_backends: {backend.type} added' for backend in added]
    imports = cfg.get('custom_imports') or dict(imports=[])
    if lines and 'mmdtn' not in imports['imports']:
        cfg.custom_imports = dict(imports, imports=[*imports['imports'], *runtime.custom_imports.imports])
        lines.append('custom_imports: mmdtn added')
    return lines


def add_hook(cfg: Config, **hook: Any) -> bool:
    """Adds a hook unless the config already has one of the same class. Returns whether the hook was added."""
    present = cfg.get('custom_hooks') or []
    if any(class_of(other, HOOKS) is class_of(hook, HOOKS) for other in present):
        return False
    cfg.custom_hooks = [*present, hook]
    return True


def check_exists(checkpoint: str) -> None:
    """Raises an error if a local checkpoint does not exist.

    MMEngine would notice the missing file only after building everything else.
    """
    if '://' not in checkpoint:
        os.stat(checkpoint)


def resume(cfg: Config, checkpoint: str) -> None:
    """Sets the checkpoint to resume from. ``'auto'`` selects the newest complete checkpoint of the run."""
    cfg.resume = True
    if checkpoint != 'auto':
        check_exists(checkpoint)
        _go_on_from(cfg, checkpoint)
        return
    out_dir = checkpoint_settings(cfg).get('out_dir')
    folders = [Path(out_dir, Path(cfg.work_dir).name)] if out_dir else []  # the folder that CheckpointHook uses
    found = newest_whole_checkpoint(cfg.work_dir, *folders) or _unchecked_checkpoint(cfg.work_dir)
    if found is not None:
        _go_on_from(cfg, str(found))
        return
    if others := [path for folder in (Path(cfg.work_dir), *folders) for path in folder.glob('*.pth')]:
        raise UserError(
            f'{others[0].parent} has checkpoints, but none that is complete and has the state of the optimizer. Choose '
            'one with --resume FILE, or start a new run with another --work-dir.'
        )
    cfg.resume = False
    print(f'There is no checkpoint in {cfg.work_dir}. Training starts from the beginning.')


def _go_on_from(cfg: Config, checkpoint: str) -> None:
    cfg.load_from = checkpoint
    add_hook(cfg, type='CheckWeightsHook')


def checkpoint_settings(cfg: Config) -> dict[str, Any]:
    """Returns the settings of the hook that saves checkpoints."""
    return (cfg.get('default_hooks') or {}).get('checkpoint') or {}


def _unchecked_checkpoint(work_dir: str) -> str | None:
    """Returns the last checkpoint that mmengine saved if it is a remote file or a DeepSpeed folder.

    Such checkpoints cannot be checked for completeness.
    """
    note = Path(work_dir, 'last_checkpoint')
    named = note.read_text().strip() if note.exists() else ''
    return named if named and ('://' in named or Path(named).is_dir()) else None
