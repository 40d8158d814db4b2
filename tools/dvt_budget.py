"""Computes the accuracy of a cascade as a function of its mean cost.

--mode 0  prints the results that are stored in a published checkpoint
--mode 1  applies the thresholds that are stored in the checkpoint to the validation set
--mode 2  finds thresholds on training images, and applies them to the validation set

Modes 1 and 2 write figures and the file budget.json. A config reads this file with thresholds=dict(file=...,
gflops=...).

Example:
    python tools/dvt_budget.py CONFIG CHECKPOINT --mode 2
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, DictAction
from mmengine.runner import set_random_seed
from torch.utils.data import DataLoader

from mmdtn import checkpoints
from mmdtn.analysis import exit_flops
from mmdtn.checkpoints import to_dvt
from mmdtn.dvt import DVT, budget
from mmdtn.dvt.answers import Answers, answers, build_loader, load_cascade, race
from mmdtn.dvt.results import BudgetCurve, published_file
from mmdtn.engine.launch import check_exists
from mmdtn.errors import UserError, readable_errors
from mmdtn.models import read_config
from mmdtn.reports.exits import budget_curves, exit_shares


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--mode', type=int, choices=[0, 1, 2], default=2)
    parser.add_argument('--out', type=Path, help='directory for the results (default: work_dirs/NAME_OF_CONFIG/budget)')
    parser.add_argument(
        '--images', type=int, default=50_000, help='number of random training images to find thresholds on'
    )
    parser.add_argument('--seed', type=int, default=0, help='seed of the choice of images, and of their random crops')
    parser.add_argument(
        '--leave-early',
        nargs='*',
        type=float,
        metavar='GFLOPS',
        help='also time early exit with the thresholds of so many mean GFLOPs (default: three points of the curve)',
    )
    parser.add_argument('--publish', type=Path, help="write weights and results to this file in the authors' format")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='settings to override, as in a.b=1 c=[2,3]')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args(arguments)


def cost(model: DVT, checkpoint: dict[str, Any], loader: DataLoader) -> list[float]:
    """Returns the GFLOPs up to each exit, taken from the checkpoint or counted for one validation image."""
    if 'flops' in checkpoint:
        return [float(value) for value in checkpoint['flops']]
    image = model.data_preprocessor(next(iter(loader)), training=False)['inputs'][:1]
    return [flops / 1e9 for flops in exit_flops(model, image)]


def curve_of(found: Answers, gflops: list[float], thresholds: torch.Tensor) -> BudgetCurve:
    outcome = budget.outcome(*found, thresholds, torch.tensor(gflops))
    return BudgetCurve.of(gflops, (100 * found.hit.double().mean(1)).tolist(), thresholds, outcome)


def measure(args: argparse.Namespace, cfg: Config, model: DVT, file: dict[str, Any]) -> tuple[dict, DataLoader]:
    """Measures accuracy and cost on the validation set for the thresholds of each search."""
    loader = build_loader(cfg, 'val_dataloader')
    gflops = cost(model, file, loader)
    if args.mode == 1:
        thresholds = dict(sweep=BudgetCurve.stored(file, args.checkpoint).thresholds)
    else:
        set_random_seed(args.seed)
        calibration = answers(model, build_loader(cfg, 'calibration_dataloader', args.images, args.seed))
        print(f'{calibration.conf.shape[1]} training images used to find thresholds')
        sweep = budget.find_thresholds(calibration.conf, budget.shares(len(gflops)))
        spent = budget.outcome(*calibration, sweep, torch.tensor(gflops)).gflops
        thresholds = dict(sweep=sweep)
        if len(gflops) in (2, 3):
            thresholds['exact'] = budget.search(*calibration, torch.tensor(gflops), spent, sweep)
        else:
            print(f'The exact search needs two or three exits, but there are {len(gflops)}. Only the sweep is run.')
    validation = answers(model, loader)
    print(f'{validation.conf.shape[1]} validation images')
    return {name: curve_of(validation, gflops, rows) for name, rows in thresholds.items()}, loader


def leave_early(args: argparse.Namespace, model: DVT, loader: DataLoader, sweep: BudgetCurve) -> list[dict[str, Any]]:
    low, high = min(sweep.mean_gflops), max(sweep.mean_gflops)
    wanted = args.leave_early or [low + share * (high - low) for share in (0.15, 0.4, 0.7)]
    if too_low := [g for g in wanted if g < low]:
        raise UserError(f'--leave-early {too_low[0]}: the cheapest thresholds need {low:.4g} GFLOPs on average.')
    rows = [max((g, i) for i, g in enumerate(sweep.mean_gflops) if g <= limit)[1] for limit in wanted]
    out = []
    print('\nGFLOPs   top-1 leaving early, chosen afterwards   images/s leaving early, all exits')
    for i, result in zip(rows, race(model, loader, sweep.thresholds[rows]), strict=True):
        gflops, chosen, speed = sweep.mean_gflops[i], sweep.accuracy[i], result.leaving_early
        line = f'{gflops:<7.4g} {result.accuracy:9.2f} {chosen:19.2f} {speed:26.1f} {result.all_exits:15.1f}'
        print(f'{line}   {speed / result.all_exits:.2f} times as fast')
        if result.differing:
            print(f'        {result.differing} images took another exit, due to rounding near a threshold')
        out.append(dict(gflops=sweep.mean_gflops[i], thresholds=sweep.thresholds[i].tolist(), **result._asdict()))
    return out


def show(curve: BudgetCurve) -> None:
    exits = zip(curve.gflops, curve.anytime, strict=True)
    print('all images leave at one exit: ' + ', '.join(f'{top1:.2f} at {gflops:.4g} GFLOPs' for gflops, top1 in exits))
    print(curve.table())


def draw(curves: dict[str, BudgetCurve], out: Path) -> None:
    sweep = curves['sweep']
    lines = {f'thresholds by {name}': (c.mean_gflops, c.accuracy) for name, c in curves.items()}
    budget_curves(lines, (sweep.gflops, sweep.anytime)).savefig(out / 'curve.png')
    if sweep.left is not None:
        exit_shares(sweep.mean_gflops, (sweep.left / sweep.left.sum(1, keepdim=True)).numpy()).savefig(
            out / 'shares.png'
        )


def run(args: argparse.Namespace) -> None:
    check_exists(args.checkpoint)
    file = checkpoints.load(args.checkpoint)
    file = file if isinstance(file, dict) else {}
    if args.mode == 0:
        show(stored(file, args.checkpoint))
        return
    if args.mode == 1:
        stored(file, args.checkpoint)  # raises an error early
    cfg = read_config(args.config, args.cfg_options)
    model = load_cascade(cfg, args.checkpoint)
    if args.publish:
        check_publishable(model)  # raises an error early
    curves, loader = measure(args, cfg, model, file)
    for name, curve in curves.items():
        print(f'\nthresholds by {name}')
        show(curve)
    result: dict[str, Any] = dict(config=args.config, mode=args.mode, seed=args.seed)
    result |= dict(gflops=curves['sweep'].gflops, anytime=curves['sweep'].anytime)
    result |= {name: curve.points() for name, curve in curves.items()}
    if args.leave_early is not None:
        result['leave_early'] = leave_early(args, model, loader, curves['sweep'])
    out = args.out or Path('work_dirs') / Path(args.config).stem / 'budget'
    out.mkdir(parents=True, exist_ok=True)
    (out / 'budget.json').write_text(json.dumps(result, indent=1))
    draw(curves, out)
    print(f'\nwritten: {out / "budget.json"}, curve.png, shares.png')
    if args.publish:
        checkpoints.write(args.publish, published_file(model, curves['sweep']))
        print(f'written: {args.publish}')


def check_publishable(model: DVT) -> None:
    try:
        to_dvt(model)
    except ValueError as error:
        raise UserError(f'--publish: {error}') from None


def stored(file: dict[str, Any], name: str) -> BudgetCurve:
    try:
        return BudgetCurve.stored(file, name)
    except ValueError as error:
        raise UserError(str(error)) from None


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
