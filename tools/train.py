"""Trains any config of any MM package: python tools/train.py CONFIG [--work-dir DIR] [--resume] ..."""

import argparse
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import HOOKS, OPTIMIZERS

from mmdtn.engine.data_checks import check_data
from mmdtn.engine.dry_run import dry_run
from mmdtn.engine.hooks import SkipBrokenImagesHook
from mmdtn.engine.launch import (
    add_common_options,
    add_hook,
    add_runtime,
    build_runner,
    check_exists,
    has_accelerator,
    leave_together,
    load_config,
    resume,
)
from mmdtn.errors import UserError, readable_errors
from mmdtn.registry import class_of

RUNTIME = Path(__file__).resolve().parents[1] / 'configs' / '_base_' / 'runtime.py'


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision; on the CPU in bfloat16')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate by the real batch size')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='go on from the newest whole checkpoint in the work dir, or from this one',
    )
    parser.add_argument(
        '--weights',
        metavar='FILE',
        help='start from these weights, all counters at 0; with --resume, if there is nothing to go on from',
    )
    parser.add_argument(
        '--dry-run',
        action='store_true',
        help='build everything, train and validate a few steps, report memory and time, leave nothing behind',
    )
    parser.add_argument(
        '--as-written', action='store_true', help='add nothing of configs/_base_/runtime.py to a config without it'
    )
    add_common_options(parser)
    return parser.parse_args(arguments)


def configure(args: argparse.Namespace) -> Config:
    cfg = load_config(args)
    if args.amp:
        use_mixed_precision(cfg)
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            raise UserError(f'{args.config} has no auto_scale_lr.base_batch_size for --auto-scale-lr to scale from.')
        cfg.auto_scale_lr.enable = True
    if args.weights:
        check_exists(args.weights)
        cfg.load_from, cfg.resume = args.weights, False
    if args.resume:
        resume(cfg, args.resume)
    if args.weights and not cfg.get('resume'):
        add_hook(cfg, type='StartFromWeightsHook')
    if 'optimizer' in cfg.optim_wrapper:
        class_of(cfg.optim_wrapper.optimizer, OPTIMIZERS)  # mmengine would not say which name is wrong
    if not args.as_written:
        for line in add_runtime(cfg, RUNTIME):
            print(f'{RUNTIME.name}: {line}')
    for hook in cfg.get('custom_hooks') or []:
        if args.strict and class_of(hook, HOOKS) is SkipBrokenImagesHook:
            hook['strict'] = True
    return cfg


def use_mixed_precision(cfg: Config) -> None:
    if has_accelerator():
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    else:
        cfg.optim_wrapper.type = 'BFloat16OptimWrapper'
        cfg.optim_wrapper.pop('loss_scale', None)
        cfg.optim_wrapper.pop('dtype', None)


def run(args: argparse.Namespace) -> None:
    cfg = configure(args)
    if args.dry_run:
        dry_run(cfg, args.strict)
        return
    runner = build_runner(cfg)
    check_data(runner, ('train', 'val'), args.strict)
    runner.train()


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        try:
            run(args)
        except KeyboardInterrupt:
            raise KeyboardInterrupt('stopped; --resume goes on from the last checkpoint.') from None
    leave_together()


if __name__ == '__main__':
    main()
