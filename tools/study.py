"""Runs studies: the same model and schedule with one thing changed, several seeds: python tools/study.py STUDY...

A STUDY is a file of configs/studies. Its runs go through tools/train.py and tools/test.py, one core each. A run that is
finished has a record in --results, and is not run again; one that was stopped goes on from its last checkpoint. At the
end of each call tables and curves are made of all records, and the section of --page that belongs to the study.
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
    parser.add_argument('--variants', nargs='+', help="of the study's; all, if not said")
    parser.add_argument('--seeds', nargs='+', type=int, help="of all chosen variants; the study's, if not said")
    parser.add_argument('--processes', type=int, default=os.cpu_count(), help='runs side by side (%(default)s)')
    parser.add_argument('--results', type=Path, default=Path('docs/evidence'), help='records and curves (%(default)s)')
    parser.add_argument('--page', type=Path, default=Path('docs/evidence.md'), help='to be renewed (%(default)s)')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/studies'), help='checkpoints (%(default)s)')
    parser.add_argument('--report', action='store_true', help='run nothing, make tables and curves of what there is')
    parser.add_argument('--debug', action='store_true', help='show the traceback of every error')
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    studies = [Study.read(file) for file in args.studies]
    failures = []
    if not args.report:
        todo = [job for study in studies for job in jobs(study, args.variants, args.seeds)]
        todo.sort(key=lambda job: job.seed)  # of all studies the first seeds first
        try:
            failures = run_all(todo, args.results, args.work_dir, ROOT, args.processes)
        except KeyboardInterrupt:
            raise KeyboardInterrupt('stopped; the same command goes on from the last checkpoints.') from None
    for study in studies:
        if records(study, args.results):
            print(write_results(study, args.results, args.page))
        else:
            print(f'{study.name}: no run is finished yet.')
    if failures:
        raise UserError(f'{len(failures)} runs failed; call it again to go on. ' + ' '.join(failures))


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    with readable_errors(args.debug):
        run(args)


if __name__ == '__main__':
    main()
