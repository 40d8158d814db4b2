import sys
from pathlib import Path

import pytest
from mmengine.registry import DefaultScope

# The tools find the modules beside them as scripts do, by the folder that they are in.
sys.path.insert(0, str(Path(__file__).parents[2] / 'tools' / 'analysis_tools'))


@pytest.fixture(autouse=True)
def scope():
    """A config's scope would otherwise be that of every later test in the process."""
    yield
    DefaultScope._instance_dict.clear()
