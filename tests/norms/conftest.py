import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_in_each_run():
    """Of some random inputs float32 keeps fewer digits than of others: a test must not fail by chance."""
    torch.manual_seed(0)
