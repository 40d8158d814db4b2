"""Learning curves: what a run's log says of each metric, and the mean over runs."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

from mmdtn.errors import UserError

Curve = dict[int, float]  # by step
Curves = dict[str, Curve]  # by metric


def read_run(source: Path) -> Curves:
    """Curves of one run; a work directory may hold several parts, of a run that was resumed."""
    files = sorted(source.glob('*/vis_data/scalars.json')) if source.is_dir() else [source]
    if not files:
        raise UserError(f'{source} holds no */vis_data/scalars.json: give the work directory of a run.')
    run: Curves = defaultdict(dict)
    for file in files:
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                if 1 < number == len(lines):
                    break  # cut off when the run was killed
                raise UserError(f'{file}, line {number} is no JSON: it is not a log of MMEngine.') from None
            # Training counts iterations. Evaluation counts what the training loop does, epochs or iterations.
            step = entry.get('step', entry.get('iter'))
            for key, value in entry.items():
                if step is not None and isinstance(value, int | float):
                    run[key][int(step)] = value
            if 'loss' not in entry and step is not None:
                run['evaluations'][int(step)] = 1
            if 'loss' in entry and {'epoch', 'iter'} <= entry.keys():
                run['epoch'][int(entry['iter'])] = entry['epoch']
    return run


def mean_and_spread(curves: list[Curve]) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation over the runs, at the steps that all of them have."""
    steps = set.intersection(*(set(curve) for curve in curves))
    values = {step: [curve[step] for curve in curves] for step in sorted(steps)}
    return {s: (statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for s, v in values.items()}


def unit(metric: str, runs: list[Curves]) -> str:
    """Of the steps of a metric: evaluations of epochs are counted by epoch, so their steps are few."""
    steps = max((max(run[metric], default=0) for run in runs), default=0)
    epochs = max((max(run['epoch'].values(), default=0) for run in runs if 'epoch' in run), default=0)
    return 'epoch' if metric != 'loss' and steps <= epochs else 'iteration'
