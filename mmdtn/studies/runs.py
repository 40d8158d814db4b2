"""Runs the trainings and evaluations of studies by the usual tools, side by side, each once."""

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

NICE = 10  # other work on the machine goes first
STARTED, FINISHED = 'started', 'finished'  # files in a run's work directory; the first has its fingerprint


@dataclass(frozen=True)
class Job:
    """One run: a training, and what is measured on its model."""

    study: Study
    variant: str
    seed: int

    def __str__(self) -> str:
        return f'{self.study.name}, {self.variant}, seed {self.seed}'

    @property
    def fingerprint(self) -> str:
        return self.study.fingerprint(self.variant, self.seed)


def jobs(study: Study, variants: Sequence[str] | None = None, seeds: Sequence[int] | None = None) -> list[Job]:
    """Of a study, or only of these variants and seeds. A seed's runs come together: soon there are pairs to compare."""
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
    """Runs what is not finished; returns what failed, a line each. A second call goes on where the first stopped.

    ``root`` is the folder that has the folder ``tools``.
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
            print(f'done before{"" if same else f", with another version of the config ({path})"}: {job}', flush=True)
            return
        if record is None or not (work / FINISHED).exists():
            record = self.train(job, work)  # also where only the record is here: what is missing needs the model
            record.save(path)
        for name in record.missing(study):
            print(f'{name}: {job}', flush=True)
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
            raise UserError(f'{work} has a run with another version of the config: delete it to start anew.')
        print(f'{"training" if fresh else "training goes on"}: {job}', flush=True)
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
        measured = measured.get(Path(job.study.config).stem, measured)  # some tools say whose numbers they are
        wanted = evaluation.metrics_of(job.study)
        if not any(name.startswith('coco/') for name in measured):  # where nothing was found, in no picture
            measured |= {name: 0.0 for name in wanted if name.startswith('coco/')}
        for name in wanted:
            if name not in measured:
                raise UserError(f'{evaluation.tool} has measured no {name!r}{nearest(name, measured)}')
        return {name: measured[name] for name in wanted}

    def call(self, command: list[str], log: Path) -> float:
        """Seconds of the processor that the command took; what it says goes to a file."""
        log.parent.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ, OMP_NUM_THREADS='1')
        tool = [sys.executable, str(self.root / command[0]), *command[1:]]
        with log.open('a') as said:
            with self.lock:
                if self.stopped:
                    raise InterruptedError('stopped')
                process = subprocess.Popen(tool, stdout=said, stderr=subprocess.STDOUT, env=env)
                self.running.add(process)
            os.setpriority(os.PRIO_PROCESS, process.pid, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        with self.lock:
            self.running.discard(process)
        if process.returncode != 0:
            lines = log.read_text().strip().splitlines() or ['']
            raise RuntimeError(f'{command[0]} ended with {process.returncode}: {lines[-1]} (all of it: {log})')
        return usage.ru_utime + usage.ru_stime

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.terminate()


@contextmanager
def _stopped_with_us(runner: _Runner) -> Iterator[None]:
    """A study that is killed takes its trainings along; they have their checkpoints."""

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
    """As the command line takes them."""
    return ['--cfg-options', *(f'{key}={_word(value)}' for key, value in options.items())]


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f'({",".join(map(_word, value))})'
    return f'[{",".join(map(_word, value))}]' if isinstance(value, list) else str(value)
