"""Reads learning curves from the logs of runs and averages them."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

from mmdtn.errors import UserError

Curve = dict[int, float]  # by step
Curves = dict[str, Curve]  # by metric


def read_run(source: Path) -> Curves:
    """Reads the curves of one run from its work directory or from one log file.

    If a run was resumed, the function reads all logs in its work directory.
    """
    files = sorted(source.glob('*/vis_data/scalars.json')) if source.is_dir() else [source]
    if not files:
        raise UserError(f'{source} has no */vis_data/scalars.json. Give the work directory of a run.')
    run: Curves = defaultdict(dict)
    for file in files:
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                if 1 < number == len(lines):
                    break  # the last line is incomplete if the run was killed
                raise UserError(
                    f'{file}, line {number} is not valid JSON. Give a scalars.json that MMEngine wrote.'
                ) from None
            # Training steps are iterations. In an epoch-based loop, the steps of evaluations are epochs.
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
    """Computes the mean and standard deviation over runs, at the steps that all runs have in common."""
    steps = set.intersection(*(set(curve) for curve in curves))
    values = {step: [curve[step] for curve in curves] for step in sorted(steps)}
    return {s: (statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for s, v in values.items()}


def unit(metric: str, runs: list[Curves]) -> str:
    """Returns the unit of a metric's steps, ``'epoch'`` or ``'iteration'``.

    The unit is epochs if no step of the metric exceeds the number of epochs.
    """
    steps = max((max(run[metric], default=0) for run in runs), default=0)
    epochs = max((max(run['epoch'].values(), default=0) for run in runs if 'epoch' in run), default=0)
    return 'epoch' if metric != 'loss' and steps <= epochs else 'iteration'
