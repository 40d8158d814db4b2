"""Numbers from files that other commands have written."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from mmdtn.errors import UserError


def read_lambdas(path: str) -> dict[str, dict[str, dict[int, Any]]]:
    """What DTNMonitorHook wrote: by kind, layer and iteration, the lambda of each head."""
    pattern = re.compile(r'dtn/(.+)/(lambda_mean|lambda_var)/(\d+)')
    found: dict[str, Any] = {kind: defaultdict(lambda: defaultdict(dict)) for kind in ('lambda_mean', 'lambda_var')}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            raise UserError(f'{path}, line {number} is no JSON: give the scalars.json of a run.') from None
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


def read_benchmark(path: str) -> tuple[dict[str, dict[str, dict[str, float]]], int]:
    """By quantity, case and implementation, NaN where it was not measured; and the threads."""
    try:
        content = json.loads(Path(path).read_text())
        results, threads = content['results'], content['threads']
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(f'{path} is not what benchmark_norm.py or benchmark_backbone.py --json writes.') from None
    if isinstance(results, list):
        quantities = dict(
            forward_ms='forward (ms)',
            forward_backward_ms='forward + backward (ms)',
            saved_over_input='saved for backward / input',
        )
        cases = {'{height}x{width}x{channels}, batch {batch}'.format(**r) + _pool(r): r['layers'] for r in results}
    else:
        quantities = dict(train_s='training step (s)', infer_s='inference (s)', saved_mib='saved (MiB)')
        cases = {f'{f}, {key} px': rows for f, family in results.items() for key, rows in family.items()}
    return {
        title: {case: {name: row.get(key, math.nan) for name, row in rows.items()} for case, rows in cases.items()}
        for key, title in quantities.items()
    }, threads


def _pool(result: dict) -> str:
    return f', pool {result["pool"]}' if result['pool'] > 1 else ''
