"""Learning curves of several runs in one plot and table: python tools/analysis_tools/compare_runs.py RUN... --out DIR

A RUN is a work directory, or a scalars.json or TIMESTAMP.json of MMEngine. Runs of one config, with other seeds, make
one curve: their mean, and a band one standard deviation wide to each side.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from mmdtn.analysis import figures
from mmdtn.analysis.report import DPI, write_csv
from mmdtn.errors import UserError, nearest, readable_errors

METRICS = ('loss', 'coco/bbox_mAP', 'coco/segm_mAP', 'accuracy/top1')
LOWER_IS_BETTER = ('loss',)
Curve = dict[int, float]  # by step
Run = dict[str, Curve]  # by metric


def read_run(source: Path) -> Run:
    """Curves of one run; a work directory may hold several parts, of a run that was resumed."""
    files = sorted(source.glob('*/vis_data/scalars.json')) if source.is_dir() else [source]
    if not files:
        raise UserError(f'{source} holds no */vis_data/scalars.json: give the work directory of a run.')
    run: Run = defaultdict(dict)
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                raise UserError(f'{file}, line {number} is no JSON: it is not a log of MMEngine, or cut off.') from None
            # Training counts iterations. Evaluation counts what the training loop does, epochs or iterations.
            step = entry.get('step', entry.get('iter'))
            for key, value in entry.items():
                if step is not None and isinstance(value, int | float):
                    run[key][int(step)] = value
            if 'loss' in entry and {'epoch', 'iter'} <= entry.keys():
                run['epoch'][int(entry['iter'])] = entry['epoch']
    return run


def config_name(source: Path) -> str:
    """Of the config that MMEngine has put into the work directory; else the directory's name."""
    folder = source.resolve()
    if not folder.is_dir():
        folder = folder.parents[2] if folder.parent.name == 'vis_data' else folder.parent
    configs = list(folder.glob('*.py'))
    return configs[0].stem if len(configs) == 1 else folder.name


def mean_and_spread(curves: list[Curve]) -> dict[int, tuple[float, float]]:
    """Mean and standard deviation over the runs, at the steps that all of them have."""
    steps = set.intersection(*(set(curve) for curve in curves))
    values = {step: [curve[step] for curve in curves] for step in sorted(steps)}
    return {s: (statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for s, v in values.items()}


def unit(metric: str, runs: list[Run]) -> str:
    """Of the steps of a metric: evaluations of epochs are counted by epoch, so their steps are few."""
    steps = max((max(run[metric], default=0) for run in runs), default=0)
    epochs = max((max(run['epoch'].values(), default=0) for run in runs if 'epoch' in run), default=0)
    return 'epoch' if metric != 'loss' and steps <= epochs else 'iteration'


def draw(groups: dict[str, list[Run]], metrics: list[str]) -> Figure:
    columns = min(2, len(metrics))
    figure, axes = figures.panels(-(-len(metrics) // columns), columns, 4.8)
    for ax in axes.flat[len(metrics) :]:
        ax.axis('off')
    lines: dict = {}
    for ax, metric in zip(axes.flat, metrics, strict=False):
        for i, (name, runs) in enumerate(groups.items()):
            there = [run[metric] for run in runs if run.get(metric)]
            if not there:
                continue
            curve = mean_and_spread(there)
            x, y = list(curve), [mean for mean, _ in curve.values()]
            style = dict(color=figures.shades(len(groups))[i], linestyle=figures.DASHES[i % 4])
            marker = dict(marker=figures.MARKERS[i % 8], markevery=max(1, len(x) // 12))
            ax.plot(x, y, label=f'{name} ({len(runs)} runs)' if len(runs) > 1 else name, **style, **marker)
            low, high = zip(*((mean - std, mean + std) for mean, std in curve.values()), strict=True)
            ax.fill_between(x, low, high, color=style['color'], alpha=0.2, linewidth=0)
        kind = unit(metric, [run for runs in groups.values() for run in runs if run.get(metric)])
        steps = {step for line in ax.lines for step in line.get_xdata()}
        if len(steps) == 1:
            ax.set_xlim(min(steps) - 1, max(steps) + 1)
        ax.xaxis.set_major_locator(figures.MaxNLocator(integer=True))
        percent = metric.startswith('accuracy/')
        ax.set(xlabel=kind, ylabel=f'{metric} (%)' if percent else metric)
        lines |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(lines.values(), lines.keys(), loc='outside lower center', ncols=2, handlelength=4)
    return figure


def summary(groups: dict[str, list[Run]], metrics: list[str]) -> list[list[str]]:
    """For each config and metric: how many runs, the last step that all have, and the values there and at best."""
    rows = []
    for name, runs in groups.items():
        for metric in metrics:
            there = [run[metric] for run in runs if run.get(metric)]
            if not there:
                continue
            curve = mean_and_spread(there)
            last = max(curve)
            choose = min if metric in LOWER_IS_BETTER else max
            best = [choose(value for step, value in run.items() if step <= last) for run in there]
            spread = statistics.stdev(best) if len(best) > 1 else 0.0
            values = [_value(*curve[last], len(there)), _value(statistics.fmean(best), spread, len(there))]
            rows.append([name, metric, str(len(there)), f'{unit(metric, runs)} {last}', *values])
    return rows


def _value(mean: float, std: float, count: int) -> str:
    return f'{mean:.4g} +- {std:.2g}' if count > 1 else f'{mean:.4g}'


def compare(args: argparse.Namespace) -> None:
    groups: dict[str, list[Run]] = defaultdict(list)
    for source in args.runs:
        groups[config_name(source)].append(read_run(source))
    everything = {key for runs in groups.values() for run in runs for key in run}
    for metric in args.metrics or ():
        if metric not in everything:
            raise UserError(f'no run has {metric}{nearest(metric, everything)}')
    metrics = list(args.metrics or [m for m in METRICS if m in everything])
    if not metrics:
        raise UserError(
            f'no run has one of {", ".join(METRICS)} yet: choose --metrics of {", ".join(sorted(everything))}.'
        )
    for name, runs in groups.items():
        for metric in metrics:
            there = [run[metric] for run in runs if run.get(metric)]
            if there and not mean_and_spread(there):
                raise UserError(f'the {len(there)} runs of {name} have no step with {metric} in common.')
    args.out.mkdir(parents=True, exist_ok=True)
    draw(groups, metrics).savefig(args.out / 'curves.png', dpi=DPI)
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
        '--metrics', nargs='+', help=f'names in the logs; else those of {", ".join(METRICS)} that occur'
    )
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    with readable_errors(args.debug):
        compare(args)


if __name__ == '__main__':
    main()
