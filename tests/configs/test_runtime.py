"""Every config says what tools/train.py runs: there is nothing left to add."""

import copy
from pathlib import Path

import pytest

from mmdtn.engine.launch import add_runtime
from mmdtn.models import enter_scope
from tools.train import RUNTIME

from .helpers import read

CONFIGS = Path(__file__).parents[2] / 'configs'
STUDIES = [path for path in CONFIGS.glob('studies/*.py') if 'variants' in path.read_text()]
PATHS = [path for path in sorted(CONFIGS.glob('[!_]*/*.py')) if path not in STUDIES]


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_a_config_has_the_runtime(path):
    cfg = copy.deepcopy(read(path))
    enter_scope(cfg)
    assert add_runtime(cfg, RUNTIME) == [] and 'by_epoch' not in cfg.train_cfg
    assert cfg.to_dict() == read(path).to_dict()
