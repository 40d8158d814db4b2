"""Records of finished runs: one JSON file of a few kilobytes per run."""

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

WATCHED = ('loss', 'grad_norm')  # training values that are recorded in addition to the study's metrics
POINTS = 40  # number of points to which long training curves are reduced


@dataclass
class Record:
    """Record of a finished run.

    Args:
        fingerprint: Hash of the config that was trained.
        core_minutes: CPU time of the training, which hardly depends on the load of the machine. None for an interrupted
            run.
        curves: Values of the study's metrics, by metric and step. Loss and gradient norm are means over windows.
        measured: Fingerprint of each evaluation that was made, by the evaluation's name.
        evaluations: Values that the evaluations measured on the trained model, by name and metric.
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
        """Names the evaluations that are missing, or that the study has redefined since they were made."""
        return [
            name
            for name, evaluation in study.evaluations.items()
            if self.measured.get(name) != evaluation.fingerprint
            or not set(evaluation.metrics_of(study)) <= self.evaluations.get(name, {}).keys()
        ]

    def save(self, path: Path) -> None:
        content = asdict(self)
        # Each curve and each evaluation has its own line, so that diffs are readable.
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
    """Loads the records of a study's finished runs, by variant and seed."""
    there = [Record.load(path) for path in (results / study.name).glob('*.json')]
    order = list(study.variants)
    return {
        (record.variant, record.seed): record
        for record in sorted((r for r in there if r.variant in order), key=lambda r: (order.index(r.variant), r.seed))
    }


def record_path(study: Study, variant: str, seed: int, results: Path) -> Path:
    return results / study.name / f'{variant}-{seed}.json'


def kept_curves(study: Study, work_dir: Path) -> Curves:
    """Reads the curves of a record from the logs in a work directory."""
    run = read_run(work_dir)
    _add_zeros(run)
    for name in study.metrics.values():
        if name not in run:
            raise UserError(f'The logs in {work_dir} have no {name!r}{nearest(name, run)}')
    kept = {name: {step: _short(v) for step, v in run[name].items()} for name in study.metrics.values()}
    kept |= {name: _windows(run[name]) for name in WATCHED if run.get(name)}
    if epochs := run.get('epoch'):
        kept['epoch'] = {max(epochs): int(epochs[max(epochs)])}
    return kept


def _add_zeros(run: Curves) -> None:
    """Sets the APs to 0 in evaluations without any detection, because MMDetection's COCO metric does not log them."""
    coco = [name for name in run if name.startswith('coco/')]
    measured = {step for name in coco for step in run[name]}
    for name in coco:
        run[name] |= {step: 0.0 for step in run.get('evaluations', {}) if step not in measured}


def _windows(curve: Curve) -> Curve:
    """Averages a curve over windows of equal length. Each mean is stored at the last step of its window."""
    steps = sorted(curve)
    parts = np.array_split(np.array(steps), min(POINTS, len(steps)))
    return {int(part[-1]): _short(float(np.mean([curve[int(step)] for step in part]))) for part in parts}


def _short(value: float) -> float:
    return float(f'{value:.5g}')


def machine() -> str:
    """Returns the name of the processor, the number of its cores, and the operating system."""
    info = Path('/proc/cpuinfo')  # exists on Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    name = names[0] if names else platform.processor() or platform.machine()
    return f'{name}, {os.cpu_count()} cores, {platform.system()}'
