"""Writes the tables and learning curves of a study from the records of its runs."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from mmdtn.analysis.curves import Curve
from mmdtn.reports import figures
from mmdtn.reports.report import write_csv

from .records import Record, records
from .statistics import Comparison, compare, seeds_needed, std_interval
from .study import Evaluation, Study

DPI = 60  # figures are 12 inches wide, so images are 720 pixels wide
POINT = 1.0  # the number of seeds is computed for this difference, in percentage points

Records = dict[tuple[str, int], Record]
Values = dict[str, dict[int, float]]  # by variant and seed


def write_results(study: Study, results: Path, page: Path | None = None) -> str:
    """Writes ``curves.png`` and ``runs.csv`` into the folder of a study's records and returns a section for a page.

    If ``page`` exists and has a section for the study, the section is replaced.
    """
    found = records(study, results)
    if not found:
        raise ValueError(
            f'{results / study.name} has no finished run of {study.name}. Run the study first: tools/study.py.'
        )
    folder = results / study.name
    groups = {variant: [r.curves for (v, _), r in found.items() if v == variant] for variant in study.variants}
    drawn = {variant: runs for variant, runs in groups.items() if runs}
    figures.learning_curves(drawn, [*study.metrics.values(), 'loss']).savefig(folder / 'curves.png', dpi=DPI)
    rows = [
        (variant, seed, metric, step, value)
        for (variant, seed), record in found.items()
        for metric in study.metrics.values()
        for step, value in record.curves.get(metric, {}).items()
    ]
    write_csv(folder / 'runs.csv', ('variant', 'seed', 'metric', 'step', 'value'), rows)
    section = '\n\n'.join(_section(study, found)) + '\n'
    if page is not None and page.exists():
        text = page.read_text()
        start, end = (f'<!-- {which} of study {study.name} -->\n' for which in ('start', 'end'))
        if start in text and end in text:
            before, rest = text.split(start, 1)
            page.write_text(before + start + '\n' + section + '\n' + end + rest.split(end, 1)[1])
    return section


def _section(study: Study, found: Records) -> list[str]:
    parts = [f'    python tools/study.py {study.file}']
    for title, metric in study.metrics.items():
        parts.append(_table(*_training(study, found, title, metric)))
    parts.append(_seeds(study, found))
    shared: dict[str, dict[str, Evaluation]] = {}
    for name, evaluation in study.evaluations.items():
        shared.setdefault(evaluation.title or name, {})[name] = evaluation
    for title, evaluations in shared.items():
        rows = _evaluated(study, found, evaluations)
        if len(rows) > 1:
            parts += [f'{title}:', _table(rows[0], rows[1:])]
    parts += [f'![Learning curves: mean and standard deviation over the seeds](evidence/{study.name}/curves.png)']
    return [*parts, _facts(study, found)]


def _training(study: Study, found: Records, title: str, metric: str) -> tuple[list[str], list[list[str]]]:
    curves = _curves(found, metric)
    final = _by_variant({key: curve[max(curve)] for key, curve in curves.items()})
    early = _by_variant({key: after_a_third(curve) for key, curve in curves.items()})
    area = _by_variant({key: statistics.fmean(curve.values()) for key, curve in curves.items()})
    unit = '%' if metric.startswith('accuracy/') else 'x 100' if metric.startswith('coco/') else ''
    less = f'less {study.baseline_name}'
    header = [f'{title} {unit}'.strip(), 'seeds', 'at the end', less, 'bootstrap', "Student's"]
    header += ['after a third', less, 'mean of all evaluations', less]
    published = study.published if metric == next(iter(study.metrics.values())) else {}
    if published:
        header.append('the paper')
    rows = []
    for variant in final:
        pair, pair_early, pair_area = (_pair(study, values, variant) for values in (final, early, area))
        rows.append(
            [
                variant,
                str(len(final[variant])),
                _mean(final[variant]),
                _difference(pair),
                _interval(pair and pair.bootstrap),
                _interval(pair and pair.student),
                _mean(early[variant]),
                _difference(pair_early),
                _mean(area[variant]),
                _difference(pair_area),
                *([str(published.get(variant, ''))] if published else []),
            ]
        )
    return header, rows


def _evaluated(study: Study, found: Records, evaluations: dict[str, Evaluation]) -> list[list[str]]:
    """Returns a header, and a row per variant with the mean of each metric and its difference from the baseline."""
    columns = {}
    for name, evaluation in evaluations.items():
        for title, metric in (evaluation.metrics or study.metrics).items():
            single = {
                key: _in_points({0: record.evaluations[name][metric]}, metric)[0]
                for key, record in found.items()
                if name not in record.missing(study) and record.evaluations[name][metric] is not None
            }
            columns[title if len(evaluations) == 1 else f'{name}: {title}'] = _by_variant(single)
    variants = [variant for variant in study.variants if any(variant in values for values in columns.values())]
    rows = [['', *columns]]
    for variant in variants:
        cells = []
        for values in columns.values():
            pair = _pair(study, values, variant)
            cells.append(_mean(values.get(variant, {})) + (f' ({_difference(pair)})' if pair else ''))
        rows.append([variant, *cells])
    return rows


def _seeds(study: Study, found: Records) -> str:
    title, metric = next(iter(study.metrics.items()))
    curves = _curves(found, metric)
    final = _by_variant({key: curve[max(curve)] for key, curve in curves.items()})
    compared = {variant: pair for variant in final if (pair := _pair(study, final, variant))}
    if not compared:
        return f'No finished run can be compared with {study.baseline_name} yet.'
    pairs = {variant: pair for variant, pair in compared.items() if pair.seeds > 1}
    if not pairs:
        return f'One seed is not enough to estimate how much differences in {title} vary.'
    variant = max(pairs, key=lambda name: pairs[name].std)
    std, n = pairs[variant].std, pairs[variant].seeds
    low, high = std_interval(std, n)
    counts = [seeds_needed(each, POINT) or 'more than 10,000' for each in (std, low, high)]
    return (
        f'Over {n} seeds, the difference in {title} between {variant} and {study.baseline_of(variant)} has a standard '
        f'deviation of {std:.2f} points, with a 95% confidence interval of {low:.2f} to {high:.2f}. Detecting a '
        f'difference of one point with a power of 80% takes {counts[0]} seeds per variant. At the two ends of the '
        f'interval, it takes {counts[1]} and {counts[2]} seeds.'
    )


def _facts(study: Study, found: Records) -> str:
    todo = [(v, s) for v in study.variants for s in study.seeds_of(v) if (v, s) not in found]
    minutes = sorted(record.core_minutes for record in found.values() if record.core_minutes)
    machines = sorted({f'{record.machine}, torch {record.torch}' for record in found.values()})
    took = sorted({f'{minutes[0]:.0f}', f'{minutes[-1]:.0f}'}, key=int) if minutes else []
    time = f' took {" to ".join(took)} minutes of one core each' if took else ''
    facts = [f'{len(found)} run{"s" * (len(found) > 1)}{time} ({"; ".join(machines)}).']
    if todo:
        few = len(todo) <= 10
        facts.append(
            f'Runs that are not finished yet: {_runs(todo)}.' if few else f'{len(todo)} runs are not finished yet.'
        )
    for title, metric in study.metrics.items():
        if missing := [key for key, record in found.items() if not record.curves.get(metric)]:
            facts.append(f'Runs without {title} in their logs: {_runs(missing)}.')
    lacking: dict[str, list[str]] = {}
    for name in study.evaluations:
        if runs := [key for key, record in found.items() if name in record.missing(study)]:
            lacking.setdefault(_runs(runs), []).append(name)
    facts += [f'Missing evaluations ({", ".join(names)}): {runs}.' for runs, names in lacking.items()]
    others = [(v, s) for (v, s), record in found.items() if record.fingerprint != study.fingerprint(v, s)]
    if others:
        facts.append(f'Runs with another version of the config: {_runs(others)}.')
    return ' '.join(facts)


def _runs(runs: list[tuple[str, int]]) -> str:
    seeds: dict[str, list[str]] = {}
    for variant, seed in runs:
        seeds.setdefault(variant, []).append(str(seed))
    return '; '.join(f'{variant} seed{"s" * (len(each) > 1)} {", ".join(each)}' for variant, each in seeds.items())


def after_a_third(curve: Curve) -> float:
    """Returns the value of the first evaluation after a third of the schedule."""
    return curve[min(step for step in curve if step >= max(curve) / 3)]


def _curves(found: Records, metric: str) -> dict[tuple[str, int], Curve]:
    """Returns a metric's curves for the runs that logged it, because metrics may be added to a study later."""
    there = {key: record.curves.get(metric) for key, record in found.items()}
    return {key: _in_points(curve, metric) for key, curve in there.items() if curve}


def _in_points(curve: Curve, metric: str) -> Curve:
    """Converts a curve to percentage points.

    COCO's APs are between 0 and 1, and so are P and mPC, because they are computed from APs. All other metrics are
    already in percent.
    """
    share = metric.startswith('coco/') or metric.endswith(('mAP_P', 'mAP_mPC'))
    return {step: value * (100 if share else 1) for step, value in curve.items()}


def _by_variant(values: dict[tuple[str, int], float]) -> Values:
    sorted_values: Values = {}
    for (variant, seed), value in values.items():
        sorted_values.setdefault(variant, {})[seed] = value
    return sorted_values


def _pair(study: Study, values: Values, variant: str) -> Comparison | None:
    """Compares a variant with its baseline over the seeds that both have."""
    baseline = study.baseline_of(variant)
    if baseline is None:
        return None
    both = sorted(values.get(variant, {}).keys() & values.get(baseline, {}).keys())
    return compare([values[variant][s] for s in both], [values[baseline][s] for s in both]) if both else None


def _mean(values: dict[int, float]) -> str:
    if not values:
        return ''
    mean = f'{statistics.fmean(values.values()):.1f}'
    return f'{mean} ± {statistics.stdev(values.values()):.1f}' if len(values) > 1 else mean


def _difference(pair: Comparison | None) -> str:
    if pair is None:
        return ''
    return f'{pair.mean:+.1f}' if math.isnan(pair.std) else f'{pair.mean:+.1f} ± {pair.std:.1f}'


def _interval(ends: tuple[float, float] | None) -> str:
    return '' if ends is None or math.isnan(ends[0]) else f'{ends[0]:+.1f} to {ends[1]:+.1f}'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ['---'] * len(header), *rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
