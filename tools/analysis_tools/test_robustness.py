"""Tests a classifier or a detector on corrupted images.

Each combination of a corruption and a severity is called a cell. The tool updates cells.json in --out after each cell,
and measures only the missing cells when run again. At the end, it writes robustness.csv, summary.json, robustness.png,
and examples.png with some corrupted images. Use --stored DIR to test on the images of ImageNet-C.

Example:
    python tools/analysis_tools/test_robustness.py CONFIG CHECKPOINT --out DIR
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.dist import is_main_process
from PIL import Image

from mmdtn.datasets.corruption import SEVERITIES, Corruption, chosen
from mmdtn.engine.launch import add_common_options, check_exists, leave_together, load_config
from mmdtn.errors import UserError, readable_errors
from mmdtn.evaluation.cells import (
    CLEAN,
    CellFile,
    Cells,
    CellTester,
    cell_name,
    digest,
    settings_digest,
    stored_cells,
)
from mmdtn.evaluation.robustness import (
    corruption_error,
    is_whole_benchmark,
    mean_corruption_error,
    mean_error,
    performance,
)
from mmdtn.reports import figures
from mmdtn.reports.report import DPI, write_csv

ACCURACY, APS = 'accuracy/top1', ('coco/bbox_mAP', 'coco/segm_mAP')


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument(
        '--against', nargs=2, metavar=('CONFIG', 'CHECKPOINT'), help='a second model to test on the same cells'
    )
    parser.add_argument(
        '--corruptions', nargs='+', default=['benchmark'], help='names, groups, benchmark or all (default: %(default)s)'
    )
    parser.add_argument('--severities', nargs='+', type=int, default=list(SEVERITIES), choices=SEVERITIES)
    parser.add_argument(
        '--pictures', type=int, help='number of test images, spread evenly over the test set (default: all)'
    )
    parser.add_argument(
        '--stored', type=Path, help='folders of ImageNet-C, to be used instead of corrupting the test set'
    )
    parser.add_argument('--renditions', type=Path, help='class folders of ImageNet-R, to be tested on as well')
    parser.add_argument('--out', type=Path, required=True, help='directory for all results')
    add_common_options(parser)
    return parser.parse_args(arguments)


def labels(models: list[tuple[str, str]]) -> list[str]:
    ways: list[Callable[[Path, Path], str]] = [
        lambda config, checkpoint: config.stem,
        lambda config, checkpoint: f'{config.stem}, {checkpoint.stem}',
        lambda config, checkpoint: f'{config.stem}, {checkpoint.parent.name}/{checkpoint.stem}',
        lambda config, checkpoint: f'{config}, {checkpoint}',
    ]
    for name in ways:
        names = [name(Path(config), Path(checkpoint)) for config, checkpoint in models]
        if len(set(names)) == len(names):
            return names
    raise UserError(f'--against names the same config and checkpoint again: {models[1][1]}.')


def renditions_cell(args: argparse.Namespace) -> str:
    return f'renditions {args.renditions}'


def missing(args: argparse.Namespace, cells: Cells) -> Iterator[tuple[str, Any]]:
    """Yields the name of each missing cell and a function that measures the cell with a CellTester."""
    if CLEAN not in cells:
        yield CLEAN, lambda subject: subject.clean()
    if args.renditions and renditions_cell(args) not in cells:
        yield renditions_cell(args), lambda subject: subject.renditions(args.renditions)
    names = chosen(args.corruptions)
    for name in names:
        for severity in args.severities:
            if cell_name(name, severity) in cells:
                continue
            if args.stored:
                ((_, _, folder),) = stored_cells(args.stored, [name], [severity])
                yield cell_name(name, severity), lambda subject, folder=folder: subject.stored(folder)
            else:
                yield cell_name(name, severity), lambda subject, n=name, s=severity: subject.corrupted(n, s)


def measure(args: argparse.Namespace, file: CellFile, label: str, config: str, checkpoint: str) -> Cells:
    check_exists(checkpoint)
    cfg: Config = load_config(argparse.Namespace(**{**vars(args), 'config': config}))
    made_with = dict(config=f'{config} ({settings_digest(cfg)})', checkpoint=digest(checkpoint), pictures=args.pictures)
    made_with['corruptions'] = str(args.stored) if args.stored else 'made while loading'
    cells = file.cells_of(label, made_with)
    todo = list(missing(args, cells))
    if not todo:
        return cells
    cfg.work_dir = args.work_dir or str(args.out / 'logs' / re.sub(r'[^\w.-]+', '-', label))
    subject = CellTester(cfg, checkpoint, args.strict, args.pictures)
    for number, (name, run) in enumerate(todo, 1):
        cells[name] = run(subject)
        file.save()
        shown = '  '.join(f'{key} {value:.4g}' for key, value in cells[name].items() if key in (ACCURACY, *APS))
        if is_main_process():
            print(f'{label}: {name} ({number} of {len(todo)})  {shown}', flush=True)
    subject.close()
    return cells


def by_corruption(cells: Cells, names: tuple[str, ...], severities: list[int], metric: str) -> dict[str, list[float]]:
    return {name: [cells[cell_name(name, s)][metric] for s in severities] for name in names}


def errors_of(accuracies: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [1 - value / 100 for value in values] for name, values in accuracies.items()}


def summarize(
    args: argparse.Namespace, cells: Cells, names: tuple[str, ...], severities: list[int]
) -> dict[str, float]:
    """Returns a classifier's errors in percent, or a detector's P, mPC and rPC for boxes and masks."""
    if ACCURACY in cells[CLEAN]:
        errors = errors_of(by_corruption(cells, names, severities, ACCURACY))
        found = dict(clean_error=100 - cells[CLEAN][ACCURACY], mean_error=100 * mean_error(errors))
        if is_whole_benchmark(errors):
            found['mCE'] = mean_corruption_error(errors)
        return found | cells.get(renditions_cell(args), {})
    found = {}
    for metric in (ap for ap in APS if ap in cells[CLEAN]):
        numbers = performance(cells[CLEAN][metric], by_corruption(cells, names, severities, metric))
        found |= {f'{metric.split("/")[1]}_{name}': value for name, value in numbers.items()}
    if not found:
        raise UserError(f'the config measures {", ".join(cells[CLEAN])}, but none of {", ".join((ACCURACY, *APS))}.')
    return found


def table(
    models: dict[str, Cells], names: tuple[str, ...], severities: list[int]
) -> tuple[list[str], list[list[str | float]]]:
    rows: list[list[str | float]] = []
    for label, cells in models.items():
        for metric in (m for m in (ACCURACY, *APS) if m in cells[CLEAN]):
            for name, values in by_corruption(cells, names, severities, metric).items():
                shown = [100 - value for value in values] if metric == ACCURACY else values
                whole = metric == ACCURACY and len(values) == len(SEVERITIES)
                ce: str | float = corruption_error(name, [value / 100 for value in shown]) if whole else ''
                title = 'top-1 error' if metric == ACCURACY else metric
                rows.append([label, title, name, *map(float, shown), float(np.mean(shown)), ce])
    return ['model', 'measure', 'corruption', *(f'severity {s}' for s in severities), 'mean', 'CE'], rows


def draw(args: argparse.Namespace, models: dict[str, Cells], names: tuple[str, ...], severities: list[int]) -> None:
    first = next(iter(models.values()))[CLEAN]
    metric = next(m for m in (ACCURACY, *APS) if m in first)
    curves = {
        label: {name: [cells[CLEAN][metric], *values] for name, values in by.items()}
        for label, cells in models.items()
        for by in [by_corruption(cells, names, severities, metric)]
    }
    figures.robustness(curves, [0, *severities], metric).savefig(args.out / 'robustness.png', dpi=DPI)


def draw_examples(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    path = example(args)
    if path is None:
        return
    rgb = np.asarray(Image.open(path).convert('RGB'))
    pictures = {name: {s: Corruption(name, s).corrupt(rgb, Path(path).name) for s in args.severities} for name in names}
    figures.corruptions(rgb, pictures).savefig(args.out / 'examples.png', dpi=DPI)


def example(args: argparse.Namespace) -> str | None:
    """Returns the path to the first image of the test set."""
    from mmengine.registry import DATASETS

    dataset = DATASETS.build(dict(load_config(args).test_dataloader.dataset, pipeline=[]))
    return dataset.get_data_info(0).get('img_path')


def run(args: argparse.Namespace) -> None:
    models = [(args.config, args.checkpoint), *([tuple(args.against)] if args.against else [])]
    names = chosen(args.corruptions)
    severities = sorted(set(args.severities))
    file = CellFile.open(args.out / 'cells.json')
    measured = {label: measure(args, file, label, *model) for label, model in zip(labels(models), models, strict=True)}
    if is_main_process():
        write(args, measured, names, severities)
    leave_together()


def write(args: argparse.Namespace, measured: dict[str, Cells], names: tuple[str, ...], severities: list[int]) -> None:
    summary = {label: summarize(args, cells, names, severities) for label, cells in measured.items()}
    written = {label: {k: None if isnan(v) else v for k, v in numbers.items()} for label, numbers in summary.items()}
    (args.out / 'summary.json').write_text(json.dumps(written, indent=1) + '\n')
    header, rows = table(measured, names, severities)
    write_csv(args.out / 'robustness.csv', header, rows)
    draw(args, measured, names, severities)
    if not args.stored:
        draw_examples(args, names)
    for label, numbers in summary.items():
        print(f'{label}: ' + ', '.join(f'{name} {value:.4g}' for name, value in numbers.items()))
    print(f'written: cells.json, summary.json, robustness.csv and robustness.png in {args.out}')


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
