"""Trains the model in a config of any MM package.

Example:
    python tools/train.py CONFIG --work-dir DIR --resume
"""

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
    parser.add_argument('--amp', action='store_true', help='use automatic mixed precision, in bfloat16 on the CPU')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the total batch size'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='resume from this checkpoint, or from the newest complete one in the work directory',
    )
    parser.add_argument(
        '--weights',
        metavar='FILE',
        help='start a new training from these weights; with --resume, only if there is nothing to resume',
    )
    parser.add_argument(
        '--dry-run',
        action='store_true',
        help='only train and validate a few steps, and print the memory and time that the whole run needs',
    )
    parser.add_argument(
        '--as-written', action='store_true', help='do not add configs/_base_/runtime.py to a config without it'
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
        class_of(cfg.optim_wrapper.optimizer, OPTIMIZERS)  # an unknown optimizer fails early with its name
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
            raise KeyboardInterrupt('stopped; use --resume to continue from the last checkpoint.') from None
    leave_together()


if __name__ == '__main__':
    main()
