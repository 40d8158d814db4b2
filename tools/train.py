"""Trains any config of any MM package: python tools/train.py CONFIG [--work-dir DIR] [--resume] ..."""

import argparse
import os
from pathlib import Path

from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS, init_default_scope
from mmengine.runner import Runner


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    parser.add_argument('--work-dir', help='where logs and checkpoints go; work_dirs/NAME_OF_CONFIG if not said')
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate by the real batch size')
    parser.add_argument(
        '--resume', nargs='?', const='auto', help='go on from the latest checkpoint in the work dir, or from this one'
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to change, as in a.b=1 c=[2,3]')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)  # torch.distributed.launch passes it
    args = parser.parse_args()
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


def load_config(args: argparse.Namespace) -> Config:
    cfg = Config.fromfile(args.config)
    cfg.launcher = args.launcher
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    if args.work_dir or not cfg.get('work_dir'):
        cfg.work_dir = args.work_dir or str(Path('work_dirs') / Path(args.config).stem)
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            raise SystemExit(f'{args.config} has no auto_scale_lr.base_batch_size for --auto-scale-lr to scale from.')
        cfg.auto_scale_lr.enable = True
    if args.resume:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    return cfg


def main() -> None:
    cfg = load_config(parse_args())
    init_default_scope(cfg.get('default_scope', 'mmengine'))
    runner = Runner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)
    runner.train()


if __name__ == '__main__':
    main()
