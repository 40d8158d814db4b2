"""Reads studies from configs/studies. A study is a file that defines the runs to compare."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mmdtn.errors import UserError, nearest

Options = Mapping[str, Any]  # changes to a config, in the form of --cfg-options
# Tools that an evaluation can run. Each entry has the tool's option for the output folder and a pattern for the metrics
# file in this folder.
TOOLS = {
    'tools/test.py': ('--work-dir', '*/[0-9]*_[0-9]*.json'),
    'tools/analysis_tools/test_robustness.py': ('--out', 'summary.json'),
}


@dataclass(frozen=True)
class Study:
    """A set of runs that train one config with different seeds and a few different options.

    Args:
        name: Name of the study, which is the stem of its file.
        file: Path of the study's file.
        title: Heading of the study.
        config: Path of the config that all runs train.
        variants: Options that each variant changes in the config, by the variant's name.
        baseline: Name of the variant that all others are compared with, or a dict with one baseline for each variant.
        metrics: Names of metrics in the logs, by title. The number of seeds is computed for the first metric.
        seeds: Seeds of the runs of each variant. Variants in ``few`` use only the first seed.
        few: Names of the variants that are run with one seed.
        published: Values of the first metric in the paper, by variant.
        evaluations: Further measurements on each trained model, by name.
    """

    name: str
    file: str
    title: str
    config: str
    variants: dict[str, Options]
    metrics: dict[str, str]
    baseline: str | dict[str, str] = 'LN'
    seeds: tuple[int, ...] = (0, 1, 2)
    few: tuple[str, ...] = ()
    published: dict[str, float] = field(default_factory=dict)
    evaluations: dict[str, 'Evaluation'] = field(default_factory=dict)

    def seeds_of(self, variant: str) -> tuple[int, ...]:
        return self.seeds[:1] if variant in self.few else self.seeds

    @property
    def baseline_name(self) -> str:
        return 'baseline' if isinstance(self.baseline, dict) else self.baseline

    def baseline_of(self, variant: str) -> str | None:
        """Returns the baseline of a variant, or None if the variant is not compared with another one."""
        baseline = self.baseline.get(variant) if isinstance(self.baseline, dict) else self.baseline
        return None if baseline == variant else baseline

    def settings(self, variant: str, seed: int) -> dict[str, Any]:
        """Returns the changes that a run makes to the config."""
        return {**self.variants[variant], 'randomness.seed': seed}

    def fingerprint(self, variant: str, seed: int) -> str:
        """Returns a hash of the run's whole config, including inherited files."""
        cfg = Config.fromfile(self.config)
        cfg.merge_from_dict(self.settings(variant, seed))
        return _digest(cfg.to_dict())

    @classmethod
    def read(cls, file: str | Path) -> 'Study':
        """Reads a study from a Python config file of MMEngine."""
        content = {k: v for k, v in Config.fromfile(file).to_dict().items() if not k.startswith('_')}
        known = {f.name for f in fields(cls)} - {'name', 'file'}
        for key in content.keys() - known:
            raise UserError(f'{file}: a study has no field {key!r}{nearest(key, known)}')
        if missing := {'title', 'config', 'variants', 'metrics'} - content.keys():
            raise UserError(f'{file} is not a study. Add the missing fields {", ".join(sorted(missing))}.')
        content['seeds'] = tuple(content.get('seeds', cls.seeds))
        evaluations = content.pop('evaluations', {})
        for name in (*content['variants'], *evaluations):
            if not re.fullmatch(r'[\w.+ -]+', name):
                raise UserError(
                    f'{file}: {name!r} cannot be part of a file name. Use letters, digits, spaces and . + - _ only.'
                )
        study = cls(
            name=Path(file).stem,
            file=os.path.relpath(file),
            evaluations={name: Evaluation(**given) for name, given in evaluations.items()},
            **content,
        )
        for options in (*study.variants.values(), *(each.options for each in study.evaluations.values())):
            for key, value in options.items():
                if isinstance(value, dict) or (isinstance(value, str) and set(value) & set(' ,[](){}')):
                    raise UserError(
                        f'{file}: {key}={value!r} cannot be passed on the command line. Set it in a config instead.'
                    )
        for evaluation in study.evaluations.values():
            if evaluation.tool not in TOOLS:
                raise UserError(
                    f'{file}: {evaluation.tool!r} cannot make an evaluation{nearest(evaluation.tool, TOOLS)}'
                )
        baselines = study.baseline.items() if isinstance(study.baseline, dict) else [(study.baseline,)]
        named = dict(baseline={name for names in baselines for name in names}, few=study.few, published=study.published)
        for key, name in ((key, name) for key, names in named.items() for name in names):
            if name not in study.variants:
                raise UserError(f'{file}: {key}={name!r} is not the name of a variant{nearest(name, study.variants)}')
        return study


@dataclass(frozen=True)
class Evaluation:
    """A tool's evaluation of a trained model, in addition to the metrics that are logged during training.

    Args:
        title: Heading of the evaluation's table.
        options: Changes to the run's config.
        metrics: Names of metrics in the tool's output, by title. By default, these are the metrics of the study.
        tool: The tool to run, one of ``TOOLS``.
        arguments: Further arguments of the tool.
    """

    title: str = ''
    options: Options = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    tool: str = 'tools/test.py'
    arguments: tuple[str, ...] = ()

    def metrics_of(self, study: Study) -> list[str]:
        return list((self.metrics or study.metrics).values())

    @property
    def fingerprint(self) -> str:
        """Returns a hash of all settings that affect the measured values."""
        return _digest([self.tool, self.options, self.arguments])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]
