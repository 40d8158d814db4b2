"""Runs studies, which change one setting of a model and train each variant with several seeds.

A STUDY is a file in configs/studies. Each run uses one core for tools/train.py and tools/test.py. A finished run has a
record in --results and is not repeated. An interrupted run resumes from its last checkpoint. At the end, the tool
creates tables and curves from all records, and replaces the study's section in --page.

Example:
    python tools/study.py STUDY
"""

import argparse
import os
from pathlib import Path

from mmdtn.errors import UserError, readable_errors
from mmdtn.studies import Study, jobs, records, run_all, write_results

ROOT = Path(__file__).resolve().parents[1]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('studies', nargs='+', metavar='STUDY')
    parser.add_argument('--variants', nargs='+', help='names of variants to run (default: all)')
    parser.add_argument(
        '--seeds', nargs='+', type=int, help='seeds of all chosen variants (default: those of the study)'
    )
    parser.add_argument(
        '--processes', type=int, default=os.cpu_count(), help='number of runs at the same time (default: %(default)s)'
    )
    parser.add_argument(
        '--results',
        type=Path,
        default=Path('docs/evidence'),
        help='directory for records and curves (default: %(default)s)',
    )
    parser.add_argument(
        '--page', type=Path, default=Path('docs/evidence.md'), help='page to update (default: %(default)s)'
    )
    parser.add_argument(
        '--work-dir',
        type=Path,
        default=Path('work_dirs/studies'),
        help='directory for checkpoints (default: %(default)s)',
    )
    parser.add_argument('--report', action='store_true', help='only make tables and curves from existing records')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    studies = [Study.read(file) for file in args.studies]
    failures = []
    if not args.report:
        todo = [job for study in studies for job in jobs(study, args.variants, args.seeds)]
        todo.sort(key=lambda job: job.seed)  # starts with the first seed of every study
        try:
            failures = run_all(todo, args.results, args.work_dir, ROOT, args.processes)
        except KeyboardInterrupt:
            raise KeyboardInterrupt('stopped; run the same command to continue from the last checkpoints.') from None
    for study in studies:
        if records(study, args.results):
            print(write_results(study, args.results, args.page))
        else:
            print(f'{study.name}: no run has finished yet.')
    if failures:
        raise UserError(f'{len(failures)} runs failed. Run the same command to continue. ' + ' '.join(failures))


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
