"""Compares the learning curves of several runs in a plot and a table.

A RUN is a work directory, or one of MMEngine's files scalars.json and TIMESTAMP.json. Runs of the same config with
different seeds form one curve, which shows their mean with a band of one standard deviation on each side.

Example:
    python tools/analysis_tools/compare_runs.py RUN RUN --out DIR
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from mmdtn.analysis.curves import Curves, mean_and_spread, read_run, unit
from mmdtn.errors import UserError, nearest, readable_errors
from mmdtn.reports import figures
from mmdtn.reports.report import DPI, write_csv

METRICS = ('loss', 'coco/bbox_mAP', 'coco/segm_mAP', 'accuracy/top1')
LOWER_IS_BETTER = ('loss', 'error')  # metrics with these words in their names


def config_name(source: Path) -> str:
    """Returns the name of the config saved by MMEngine in the work directory, or else the directory's name."""
    folder = source.resolve()
    if not folder.is_dir():
        folder = folder.parents[2] if folder.parent.name == 'vis_data' else folder.parent
    configs = list(folder.glob('*.py'))
    return configs[0].stem if len(configs) == 1 else folder.name


def summary(groups: dict[str, list[Curves]], metrics: list[str]) -> list[list[str]]:
    """Returns a table row for each config and metric.

    Each row contains the number of runs, the last step that all runs have reached, and the values at the last and the
    best step.
    """
    rows = []
    for name, runs in groups.items():
        for metric in metrics:
            there = [run[metric] for run in runs if run.get(metric)]
            if not there:
                continue
            curve = mean_and_spread(there)
            last = max(curve)
            choose = min if any(word in metric for word in LOWER_IS_BETTER) else max
            best = [choose(value for step, value in run.items() if step <= last) for run in there]
            spread = statistics.stdev(best) if len(best) > 1 else 0.0
            values = [_value(*curve[last], len(there)), _value(statistics.fmean(best), spread, len(there))]
            rows.append([name, metric, str(len(there)), f'{unit(metric, runs)} {last}', *values])
    return rows


def _value(mean: float, std: float, count: int) -> str:
    return f'{mean:.4g} +- {std:.2g}' if count > 1 else f'{mean:.4g}'


def compare(args: argparse.Namespace) -> None:
    groups: dict[str, list[Curves]] = defaultdict(list)
    for source in args.runs:
        groups[config_name(source)].append(read_run(source))
    everything = {key for runs in groups.values() for run in runs for key in run}
    for metric in args.metrics or ():
        if metric not in everything:
            raise UserError(f'no run has {metric}{nearest(metric, everything)}')
    metrics = list(args.metrics or [m for m in METRICS if m in everything])
    if not metrics:
        raise UserError(
            f'no run has one of {", ".join(METRICS)} yet. Choose --metrics from {", ".join(sorted(everything))}.'
        )
    for name, runs in groups.items():
        for metric in metrics:
            there = [run[metric] for run in runs if run.get(metric)]
            if there and not mean_and_spread(there):
                raise UserError(f'the {len(there)} runs of {name} have no step with {metric} in common.')
    args.out.mkdir(parents=True, exist_ok=True)
    figures.learning_curves(groups, metrics).savefig(args.out / 'curves.png', dpi=DPI)
    rows = [
        [name, number, metric, unit(metric, runs), step, float(value)]
        for name, runs in groups.items()
        for number, run in enumerate(runs)
        for metric in metrics
        for step, value in run.get(metric, {}).items()
    ]
    write_csv(args.out / 'curves.csv', ('config', 'run', 'metric', 'unit', 'step', 'value'), rows)
    header = ['config', 'metric', 'runs', 'at', 'last', 'best']
    table = summary(groups, metrics)
    write_csv(args.out / 'table.csv', header, table)
    widths = [max(len(row[i]) for row in [header, *table]) for i in range(len(header))]
    for row in (header, ['-' * width for width in widths], *table):
        print('| ' + ' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + ' |')
    print(f'\nwritten: curves.png, curves.csv and table.csv in {args.out}')


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN')
    parser.add_argument('--out', type=Path, required=True, help='directory for curves.png, curves.csv and table.csv')
    parser.add_argument(
        '--metrics', nargs='+', help=f'names in the logs (default: those of {", ".join(METRICS)} that occur)'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    with readable_errors(args.debug):
        compare(args)


if __name__ == '__main__':
    main()
