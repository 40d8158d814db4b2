"""What is kept of a finished run: a JSON file of a few kilobytes."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from mmdtn.analysis.curves import Curve, Curves, read_run
from mmdtn.errors import UserError, nearest
from mmdtn.files import write_whole

from .study import Study

WATCHED = ('loss', 'grad_norm')  # of training, beside the study's metrics
POINTS = 40  # of a curve that has a value for many iterations


@dataclass
class Record:
    """A finished run.

    ``curves`` has by metric and step the study's metrics, and the loss and the gradient norm as means over windows.
    ``evaluations`` has by name and metric what was measured on the trained model, and ``measured`` by name the
    fingerprint of how. ``core_minutes`` is the processor's
    time, which other work on the machine does not change much; None for a run that was interrupted.
    """

    study: str
    variant: str
    seed: int
    fingerprint: str
    version: str
    core_minutes: float | None = None
    machine: str = ''
    torch: str = torch.__version__
    curves: Curves = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)

    def missing(self, study: Study) -> list[str]:
        """Evaluations that were not made, or not as the study has them now."""
        return [
            name
            for name, evaluation in study.evaluations.items()
            if self.measured.get(name) != evaluation.fingerprint
            or not set(evaluation.metrics_of(study)) <= self.evaluations.get(name, {}).keys()
        ]

    def save(self, path: Path) -> None:
        content = asdict(self)
        # A line for each curve and each evaluation, so that a change can be read.
        parts = {name: content.pop(name) for name in ('curves', 'evaluations')}
        lines = [f'{json.dumps(key)}: {json.dumps(value)}' for key, value in content.items()]
        for name, values in parts.items():
            inside = ',\n'.join(f'  {json.dumps(key)}: {json.dumps(value)}' for key, value in values.items())
            lines.append(f'{json.dumps(name)}: {{\n{inside}\n }}' if inside else f'{json.dumps(name)}: {{}}')
        write_whole(path, '{\n ' + ',\n '.join(lines) + '\n}\n')

    @classmethod
    def load(cls, path: Path) -> 'Record':
        content = json.loads(path.read_text())
        curves = content.pop('curves')
        return cls(curves={name: {int(s): v for s, v in curve.items()} for name, curve in curves.items()}, **content)


def records(study: Study, results: Path) -> dict[tuple[str, int], Record]:
    """By variant and seed, those of a study's runs that are finished."""
    there = [Record.load(path) for path in (results / study.name).glob('*.json')]
    order = list(study.variants)
    return {
        (record.variant, record.seed): record
        for record in sorted((r for r in there if r.variant in order), key=lambda r: (order.index(r.variant), r.seed))
    }


def record_path(study: Study, variant: str, seed: int, results: Path) -> Path:
    return results / study.name / f'{variant}-{seed}.json'


def kept_curves(study: Study, work_dir: Path) -> Curves:
    """Of a work directory's logs, what a record keeps."""
    run = read_run(work_dir)
    _add_zeros(run)
    for name in study.metrics.values():
        if name not in run:
            raise UserError(f'the logs in {work_dir} have no {name!r}{nearest(name, run)}')
    kept = {name: {step: _short(v) for step, v in run[name].items()} for name in study.metrics.values()}
    kept |= {name: _windows(run[name]) for name in WATCHED if run.get(name)}
    if epochs := run.get('epoch'):
        kept['epoch'] = {max(epochs): int(epochs[max(epochs)])}
    return kept


def _add_zeros(run: Curves) -> None:
    """MMDetection's COCO metric says nothing of an evaluation in which nothing was found: then its APs are 0."""
    coco = [name for name in run if name.startswith('coco/')]
    measured = {step for name in coco for step in run[name]}
    for name in coco:
        run[name] |= {step: 0.0 for step in run.get('evaluations', {}) if step not in measured}


def _windows(curve: Curve) -> Curve:
    """Means over equal parts, each under its last step."""
    steps = sorted(curve)
    parts = np.array_split(np.array(steps), min(POINTS, len(steps)))
    return {int(part[-1]): _short(float(np.mean([curve[int(step)] for step in part]))) for part in parts}


def _short(value: float) -> float:
    return float(f'{value:.5g}')


def machine() -> str:
    """The processor's name, its cores, and the system."""
    info = Path('/proc/cpuinfo')  # Linux has it
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    name = names[0] if names else platform.processor() or platform.machine()
    return f'{name}, {os.cpu_count()} cores, {platform.system()}'
