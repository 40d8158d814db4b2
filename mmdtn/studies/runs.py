"""Runs the trainings and evaluations of studies in parallel with the command line tools."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmdtn
from mmdtn.engine.hooks.whole_checkpoint import newest_whole_checkpoint
from mmdtn.errors import UserError, nearest

from .records import Record, kept_curves, machine, record_path
from .study import TOOLS, Evaluation, Options, Study

NICE = 10  # niceness of the runs, which makes them yield to other processes
STARTED, FINISHED = 'started', 'finished'  # marker files in a work directory; STARTED has the run's fingerprint


@dataclass(frozen=True)
class Job:
    """One run of a study: a training and the evaluations of its model."""

    study: Study
    variant: str
    seed: int

    def __str__(self) -> str:
        return f'{self.study.name}, {self.variant}, seed {self.seed}'

    @property
    def fingerprint(self) -> str:
        return self.study.fingerprint(self.variant, self.seed)


def jobs(study: Study, variants: Sequence[str] | None = None, seeds: Sequence[int] | None = None) -> list[Job]:
    """Lists the runs of a study, or only those of the given variants and seeds.

    The runs are sorted by seed, so that variants can be compared before all seeds are finished.
    """
    for name in variants or ():
        if name not in study.variants:
            raise UserError(f'{study.name} has no variant {name!r}{nearest(name, study.variants)}')
    chosen = variants or list(study.variants)
    return [
        Job(study, variant, seed)
        for seed in sorted(set(seeds or study.seeds))
        for variant in chosen
        if seeds or seed in study.seeds_of(variant)
    ]


def run_all(todo: Iterable[Job], results: Path, work: Path, root: Path, processes: int) -> list[str]:
    """Runs all unfinished jobs and returns one line for each job that failed.

    If some jobs remain unfinished, another call resumes them. ``root`` is the folder that contains ``tools``.
    """
    failures = []
    runner = _Runner(results, work, root)
    with ThreadPoolExecutor(processes) as pool, _stopped_with_us(runner):
        waiting = {pool.submit(runner.run, job): job for job in todo}
        try:
            for future in as_completed(waiting):
                if error := future.exception():
                    failures.append(f'{waiting[future]}: {error}')
                    print(f'FAILED {failures[-1]}', flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


class _Runner:
    def __init__(self, results: Path, work: Path, root: Path) -> None:
        self.results, self.work, self.root = results, work, root
        self.running: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.stopped = False

    def run(self, job: Job) -> None:
        study = job.study
        path = record_path(study, job.variant, job.seed, self.results)
        work = self.work / study.name / f'{job.variant}-{job.seed}'
        record = Record.load(path) if path.exists() else None
        if record is not None and not record.missing(study):
            same = record.fingerprint == job.fingerprint
            version = '' if same else f' with another version of the config ({path})'
            print(f'skipping finished run{version}: {job}', flush=True)
            return
        if record is None or not (work / FINISHED).exists():
            record = self.train(job, work)  # even if the record exists, because evaluations need the model
            record.save(path)
        for name in record.missing(study):
            print(f'evaluating {name}: {job}', flush=True)
            evaluation = study.evaluations[name]
            folder = work / f'{name.replace(" ", "-")}-{evaluation.fingerprint}'
            record.evaluations[name] = self.evaluate(job, evaluation, work, folder)
            record.measured[name] = evaluation.fingerprint
            record.save(path)
        print(f'finished: {job}', flush=True)

    def train(self, job: Job, work: Path) -> Record:
        fresh = newest_whole_checkpoint(work) is None
        started = work / STARTED
        if fresh:
            work.mkdir(parents=True, exist_ok=True)
            started.write_text(job.fingerprint)
        elif not started.exists() or started.read_text() != job.fingerprint:
            raise UserError(f'{work} has a run with another version of the config. Delete the folder to start again.')
        print(f'{"training" if fresh else "resuming training"}: {job}', flush=True)
        options = job.study.settings(job.variant, job.seed)
        command = ['tools/train.py', job.study.config, '--work-dir', str(work), '--resume', *_as_words(options)]
        seconds = self.call(command, work / 'train.log')
        record = Record(
            study=job.study.name,
            variant=job.variant,
            seed=job.seed,
            fingerprint=job.fingerprint,
            version=mmdtn.__version__,
            core_minutes=round(seconds / 60, 2) if fresh else None,
            machine=machine(),
            curves=kept_curves(job.study, work),
        )
        (work / FINISHED).touch()
        return record

    def evaluate(self, job: Job, evaluation: Evaluation, work: Path, folder: Path) -> dict[str, float]:
        checkpoint = newest_whole_checkpoint(work)
        option, pattern = TOOLS[evaluation.tool]
        options = {**job.study.settings(job.variant, job.seed), **evaluation.options}
        command = [evaluation.tool, job.study.config, str(checkpoint), option, str(folder), *evaluation.arguments]
        self.call([*command, *_as_words(options)], folder.with_name(f'{folder.name}.log'))
        newest = max(folder.glob(pattern), key=lambda file: file.stat().st_mtime_ns)
        measured = json.loads(newest.read_text())
        measured = measured.get(Path(job.study.config).stem, measured)  # some tools name their results after the config
        wanted = evaluation.metrics_of(job.study)
        if not any(name.startswith('coco/') for name in measured):  # the model detected nothing in any image
            measured |= {name: 0.0 for name in wanted if name.startswith('coco/')}
        for name in wanted:
            if name not in measured:
                raise UserError(f'{evaluation.tool} did not measure {name!r}{nearest(name, measured)}')
        return {name: measured[name] for name in wanted}

    def call(self, command: list[str], log: Path) -> float:
        """Runs a command, appends its output to ``log``, and returns its CPU time in seconds."""
        log.parent.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ, OMP_NUM_THREADS='1')
        tool = [sys.executable, str(self.root / command[0]), *command[1:]]
        with log.open('a') as output:
            with self.lock:
                if self.stopped:
                    raise InterruptedError('stopped')
                process = subprocess.Popen(tool, stdout=output, stderr=subprocess.STDOUT, env=env)
                self.running.add(process)
            os.setpriority(os.PRIO_PROCESS, process.pid, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        with self.lock:
            self.running.discard(process)
        if process.returncode != 0:
            lines = log.read_text().strip().splitlines() or ['']
            raise RuntimeError(f'{command[0]} failed with exit code {process.returncode}: {lines[-1]} (log: {log})')
        return usage.ru_utime + usage.ru_stime

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.terminate()


@contextmanager
def _stopped_with_us(runner: _Runner) -> Iterator[None]:
    """Stops the running trainings if the study is stopped. The trainings can be resumed from their checkpoints."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, interrupt) if main else None
    try:
        yield
    except BaseException:
        runner.stop()
        raise
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _as_words(options: Options) -> list[str]:
    """Formats options as arguments of the command line."""
    return ['--cfg-options', *(f'{key}={_word(value)}' for key, value in options.items())]


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f'({",".join(map(_word, value))})'
    return f'[{",".join(map(_word, value))}]' if isinstance(value, list) else str(value)
