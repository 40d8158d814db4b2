import pytest
from mmengine.registry import DefaultScope


@pytest.fixture(autouse=True)
def scope():
    """A config's scope would otherwise be that of every later test in the process."""
    yield
    DefaultScope._instance_dict.clear()
