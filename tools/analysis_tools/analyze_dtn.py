"""Writes a report on the DTN layers of a trained model: python tools/analysis_tools/analyze_dtn.py CONFIG CHECKPOINT \
--images DIR|ANNOTATIONS|SPLIT --out DIR

The tool writes each figure as a PNG file and its values as a CSV file. The file report.html shows all figures and
explains how to read them. The model is either a backbone of this package, with DTN or LayerNorm, or a
ConvertedBackbone. A classifier or detector with such a backbone is also accepted.
"""

import argparse
from pathlib import Path

from mmdtn.analysis.look import choose_images
from mmdtn.analysis.observe import observe
from mmdtn.errors import UserError, readable_errors
from mmdtn.models import load
from mmdtn.reports import sections
from mmdtn.reports.report import Report


def analyze(args: argparse.Namespace) -> Path:
    subjects = [load(args.config, args.checkpoint)]
    if args.against:
        subjects.append(load(*args.against))
        if subjects[0].label == subjects[1].label:
            for subject in subjects:
                subject.label = f'{subject.label}, {Path(subject.checkpoint).stem}'
        if subjects[0].label == subjects[1].label:
            raise UserError(
                f'--against has the config and checkpoint of the first model, {args.against[1]}. Choose another model.'
            )
    images = choose_images(subjects[0], args.images, args.number)
    runs = [observe(subject, images) for subject in subjects]
    report = Report(args.out, 'What DTN does: ' + ' and '.join(subject.label for subject in subjects))
    facts = {f'model {i}': f'{s.config}, {s.checkpoint}' for i, s in enumerate(subjects, 1)}
    note = '; a single image does not show the spread over images' if len(images) == 1 else ''
    facts['images'] = f'{len(images)} of {args.images}{note}'
    for i, run in enumerate(runs, 1):
        facts[f'DTN layers of model {i}'] = (
            str(len(run.layers)) if run.layers else 'none; the figures show the other norms of the model'
        )
    report.facts(facts)
    sections.draw_looks(report, runs)
    sections.draw_class_attention(report, runs)
    sections.draw_distances(report, runs)
    sections.draw_magnitudes(report, runs)
    sections.draw_variation(report, runs)
    sections.draw_lambdas(report, runs)
    sections.draw_lambda_curves(report, args.log)
    sections.draw_neighbourhoods(report, runs)
    sections.draw_components(report, runs)
    sections.draw_cost(report, runs)
    return report.write()


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--images', required=True, help='folder, COCO annotation file, or one of train, val and test')
    parser.add_argument('--out', required=True, help='output folder for report.html and all figures')
    parser.add_argument('--number', type=int, default=8, help='number of evenly spaced images (default: %(default)s)')
    parser.add_argument('--against', nargs=2, metavar=('CONFIG', 'CHECKPOINT'), help='second model to compare with')
    parser.add_argument('--log', help='scalars.json of a training run with DTNMonitorHook')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    args = parser.parse_args(arguments)
    if args.number < 1:
        parser.error(f'--number is {args.number}, but should be at least 1')
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        print(f'written: {analyze(args)}')


if __name__ == '__main__':
    main()
