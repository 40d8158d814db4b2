"""Reads the values that hooks wrote to the log of a run."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from mmdtn.errors import UserError


def read_lambdas(path: str) -> dict[str, dict[str, dict[int, Any]]]:
    """Reads the lambdas that ``DTNMonitorHook`` logged.

    The result has the lambdas of all heads by kind (``lambda_mean`` or ``lambda_var``), layer and iteration.
    """
    pattern = re.compile(r'dtn/(.+)/(lambda_mean|lambda_var)/(\d+)')
    found: dict[str, Any] = {kind: defaultdict(lambda: defaultdict(dict)) for kind in ('lambda_mean', 'lambda_var')}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            raise UserError(f'{path}, line {number} is not valid JSON. Give the scalars.json of a run.') from None
        for key, value in entry.items():
            if match := pattern.fullmatch(key):
                layer, kind, head = match.groups()
                found[kind][layer][entry['step']][int(head)] = value
    return {
        kind: {
            layer: {step: np.array([v for _, v in sorted(heads.items())]) for step, heads in sorted(steps.items())}
            for layer, steps in layers.items()
        }
        for kind, layers in found.items()
    }
