"""What the command lines for training and testing share: options, and a runner from a config of any MM package."""

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
    parser.add_argument('--work-dir', help='where logs and checkpoints go; work_dirs/NAME_OF_CONFIG if not said')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to change, as in a.b=1 c=[2,3]')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--strict', action='store_true', help='stop at a broken image or annotation; else leave it out')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)  # torch.distributed.launch passes it


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
    """Ends the processes at one time: gloo aborts one that leaves while others still talk to it."""
    if is_distributed():
        gc.collect()  # a runner is a cycle, and an FSDP model in it keeps process groups
        barrier()
        destroy_process_group()


def has_accelerator() -> bool:
    return is_cuda_available() or is_npu_available()


def add_runtime(cfg: Config, file: Path) -> list[str]:
    """Merges configs/_base_/runtime.py into a config; returns a line for each thing that it adds or changes.

    Loops and hooks of other classes than mmengine's own stay as they are.
    """
    runtime, lines = Config.fromfile(file).runtime, []
    ours = runtime.default_hooks.checkpoint
    loop = class_of(cfg.train_cfg, LOOPS) if 'type' in cfg.train_cfg else None  # by_epoch decides then
    if loop in (None, EpochBasedTrainLoop, IterBasedTrainLoop):
        cfg.train_cfg.pop('by_epoch', None)  # mmengine refuses it next to a type
        cfg.train_cfg.update(runtime.train_cfg)
        lines.append(f'train_cfg: {runtime.train_cfg.type} in the place of {loop.__name__ if loop else "by_epoch"}')
    hooks = cfg.get('default_hooks') or {}
    checkpoint = hooks.get('checkpoint', dict(type=CheckpointHook, interval=1))  # mmengine's own default
    if checkpoint and class_of(checkpoint, HOOKS) is CheckpointHook:
        cfg.default_hooks = dict(hooks, checkpoint={**checkpoint, **ours})
        lines.append(f'default_hooks.checkpoint: {ours.type} in the place of CheckpointHook')
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
    """Adds a hook, unless the config has one of its class; returns whether it did."""
    present = cfg.get('custom_hooks') or []
    if any(class_of(other, HOOKS) is class_of(hook, HOOKS) for other in present):
        return False
    cfg.custom_hooks = [*present, hook]
    return True


def check_exists(checkpoint: str) -> None:
    """mmengine looks for a checkpoint only when everything else is built."""
    if '://' not in checkpoint:
        os.stat(checkpoint)


def resume(cfg: Config, checkpoint: str) -> None:
    """Sets what to go on from: a file, or for ``auto`` the newest whole one that the run has saved."""
    cfg.resume = True
    if checkpoint != 'auto':
        check_exists(checkpoint)
        _go_on_from(cfg, checkpoint)
        return
    out_dir = checkpoint_settings(cfg).get('out_dir')
    folders = [Path(out_dir, Path(cfg.work_dir).name)] if out_dir else []  # as CheckpointHook does
    found = newest_whole_checkpoint(cfg.work_dir, *folders) or _unchecked_checkpoint(cfg.work_dir)
    if found is not None:
        _go_on_from(cfg, str(found))
        return
    if others := [path for folder in (Path(cfg.work_dir), *folders) for path in folder.glob('*.pth')]:
        raise UserError(
            f'{others[0].parent} has checkpoints, but none that is whole and has the state of the optimizer. Name one '
            'with --resume FILE, or start anew with another --work-dir.'
        )
    cfg.resume = False
    print(f'No checkpoint in {cfg.work_dir}: training starts from the beginning.')


def _go_on_from(cfg: Config, checkpoint: str) -> None:
    cfg.load_from = checkpoint
    add_hook(cfg, type='CheckWeightsHook')


def checkpoint_settings(cfg: Config) -> dict[str, Any]:
    """Of the hook that saves."""
    return (cfg.get('default_hooks') or {}).get('checkpoint') or {}


def _unchecked_checkpoint(work_dir: str) -> str | None:
    """What mmengine saved last, if that is no file that can be looked into: one elsewhere, or a folder of DeepSpeed."""
    note = Path(work_dir, 'last_checkpoint')
    named = note.read_text().strip() if note.exists() else ''
    return named if named and ('://' in named or Path(named).is_dir()) else None
