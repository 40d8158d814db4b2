import pytest
import torch
from mmengine.registry import DefaultScope

# Test processes run side by side: more threads than cores would spend their time waiting for each other.
torch.set_num_threads(1)

# With the first backward pass autograd starts a thread for each device that it knows. Fake CUDA tensors make it know
# one, and a process with such threads cannot be forked for the tests that need two.
torch.ones(1, requires_grad=True).backward()


@pytest.fixture(autouse=True)
def scope():
    """A config's scope would otherwise be that of every later test in the process."""
    with DefaultScope.overwrite_default_scope('mmengine'):
        yield


@pytest.fixture(autouse=True)
def same_numbers_in_each_run():
    """Of some random inputs float32 keeps fewer digits than of others: a test must not fail by chance."""
    torch.manual_seed(0)
