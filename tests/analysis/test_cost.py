import torch
from torch import nn

from mmdtn.analysis import SavedBytes


def test_counts_each_storage_once_and_no_parameter():
    x = torch.randn(16, 8, requires_grad=True)
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Sigmoid())
    with SavedBytes(model) as saved:
        y = model(x)
    assert saved.total == (16 * 8 + 16 * 32) * 4  # the linear layer keeps x but not its weight, the sigmoid its output
    with SavedBytes(model) as twice:
        z = y * y  # one storage, saved for both factors
    assert twice.total == 16 * 32 * 4 and z.shape == y.shape
    with SavedBytes(model) as nothing, torch.no_grad():
        model(x)
    assert nothing.total == 0
