"""What a study is: a file in configs/studies that says which runs are compared."""

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

Options = Mapping[str, Any]  # settings to change in a config, as --cfg-options takes them
# What an evaluation can call: by tool, the option for a folder, and the file in it that has the metrics.
TOOLS = {
    'tools/test.py': ('--work-dir', '*/[0-9]*_[0-9]*.json'),
    'tools/analysis_tools/test_robustness.py': ('--out', 'summary.json'),
}


@dataclass(frozen=True)
class Study:
    """Runs of one config that differ in a few options and in the seed.

    Args:
        name: Of the study's file.
        file: Where it is.
        title: A heading.
        config: What all runs train.
        variants: By name, the options in which a variant differs.
        baseline: The variant that the others are compared with. A dict has one for each variant that is compared.
        metrics: By title, the name in the logs; the first is the one that the seeds are counted for.
        seeds: Of the runs of each variant, for those in ``few`` only the first.
        few: Variants that are run with one seed.
        published: By variant, what a paper reports for the first metric.
        evaluations: By name, what is measured on each trained model beside: the arguments of a tool.
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
        """None for a variant that is compared with no other."""
        baseline = self.baseline.get(variant) if isinstance(self.baseline, dict) else self.baseline
        return None if baseline == variant else baseline

    def settings(self, variant: str, seed: int) -> dict[str, Any]:
        """What a run changes in the config."""
        return {**self.variants[variant], 'randomness.seed': seed}

    def fingerprint(self, variant: str, seed: int) -> str:
        """Of all that the run's config says, inherited files included: equal for runs that may share a table."""
        cfg = Config.fromfile(self.config)
        cfg.merge_from_dict(self.settings(variant, seed))
        return _digest(cfg.to_dict())

    @classmethod
    def read(cls, file: str | Path) -> 'Study':
        """From a Python file of ``name = value``, in MM's way of configs."""
        content = {k: v for k, v in Config.fromfile(file).to_dict().items() if not k.startswith('_')}
        known = {f.name for f in fields(cls)} - {'name', 'file'}
        for key in content.keys() - known:
            raise UserError(f'{file}: a study has no {key!r}{nearest(key, known)}')
        if missing := {'title', 'config', 'variants', 'metrics'} - content.keys():
            raise UserError(f'{file} is no study: it lacks {", ".join(sorted(missing))}.')
        content['seeds'] = tuple(content.get('seeds', cls.seeds))
        evaluations = content.pop('evaluations', {})
        for name in (*content['variants'], *evaluations):
            if not re.fullmatch(r'[\w.+ -]+', name):
                raise UserError(f'{file}: {name!r} names files: letters, digits, spaces and . + - _ only.')
        study = cls(
            name=Path(file).stem,
            file=os.path.relpath(file),
            evaluations={name: Evaluation(**given) for name, given in evaluations.items()},
            **content,
        )
        for options in (*study.variants.values(), *(each.options for each in study.evaluations.values())):
            for key, value in options.items():
                if isinstance(value, dict) or (isinstance(value, str) and set(value) & set(' ,[](){}')):
                    raise UserError(f'{file}: {key}={value!r} is no option for a command line: put it into a config.')
        for evaluation in study.evaluations.values():
            if evaluation.tool not in TOOLS:
                raise UserError(
                    f'{file}: no evaluation is made by {evaluation.tool!r}{nearest(evaluation.tool, TOOLS)}'
                )
        baselines = study.baseline.items() if isinstance(study.baseline, dict) else [(study.baseline,)]
        named = dict(baseline={name for names in baselines for name in names}, few=study.few, published=study.published)
        for key, name in ((key, name) for key, names in named.items() for name in names):
            if name not in study.variants:
                raise UserError(
                    f'{file}: {key}={name!r}, where there is no variant {name!r}{nearest(name, study.variants)}'
                )
        return study


@dataclass(frozen=True)
class Evaluation:
    """One more measurement of a trained model.

    Args:
        title: Of its part of the page.
        options: Settings to change in the config of the run.
        metrics: By title, the name in what the tool writes; those of the study, if not said.
        tool: What runs, one of ``TOOLS``.
        arguments: More of the tool's.
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
        """Of what decides the numbers."""
        return _digest([self.tool, self.options, self.arguments])


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:16]
