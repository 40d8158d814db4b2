"""Compares statistics of tokens with values computed by hand, with numpy, and with the dense form of DTN."""

import numpy as np
import pytest
import torch
from torch import nn

from mmdtn.analysis import magnitudes, means, principal_components, seen_by, variation
from mmdtn.norms import DTN
from tests.norms.reference import reference_dtn


def test_magnitudes_of_two_heads():
    tokens = torch.tensor([[[[3.0, 4, 0, 0], [1, 0, 0, 2]]]])  # 1 x 1 x 2 x 4
    assert magnitudes(tokens, 2).tolist() == [[[[5, 1]], [[0, 2]]]]


def test_variation_leaves_out_zeros():
    tokens, mean = torch.tensor([[1.0, 2, 0], [-2, 4, 8]]), torch.tensor([[3.0], [1.0]])
    # |1 - 3| / 1, |2 - 3| / 2, |-2 - 1| / 2, |4 - 1| / 4, |8 - 1| / 8; no ratio for the 0
    assert variation(tokens, mean).tolist() == [2, 0.5, 1.5, 0.75, 0.875]
    assert variation(tokens[1:], mean[1:]).tolist() == [1.5, 0.75, 0.875]


@pytest.mark.parametrize(
    'options', [dict(), dict(pool_size=2), dict(pool_size=4, prenorm=False), dict(mean_lambda=0.3)]
)
def test_the_mean_of_dtn_is_the_one_that_the_layer_subtracts(options):
    """With the variance of LayerNorm, the dense form computes (x - mu) divided by a known value."""
    torch.manual_seed(0)
    layer = DTN(12, 4, var_lambda=1.0, **options).double()
    nn.init.normal_(layer.position)
    if layer.mean_mix is not None:
        nn.init.normal_(layer.mean_mix)
    x = torch.randn(2, 5, 7, 12).double() + 1
    tokens = seen_by(layer, x)
    found = means(layer, tokens)
    std = (tokens.var(-1, keepdim=True, unbiased=False) + layer.settings.eps).sqrt()
    expected = tokens - reference_dtn(x, layer) * std
    torch.testing.assert_close(found['DTN'], expected.detach(), atol=1e-5, rtol=1e-5)  # P is computed in float32
    torch.testing.assert_close(found['LN'], torch.from_numpy(tokens.numpy().mean(3, keepdims=True)))
    torch.testing.assert_close(found['IN'], torch.from_numpy(tokens.numpy().mean((1, 2), keepdims=True)))


def test_tokens_of_a_layer_norm_are_as_they_are():
    x = torch.randn(1, 3, 3, 8)
    assert seen_by(nn.LayerNorm(8), x) is x
    assert set(means(nn.LayerNorm(8), x)) == {'LN', 'IN'}


def test_principal_components_are_those_of_numpy():
    tokens = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.arange(1.0, 7)) + 5
    found, shares = principal_components(tokens)
    values, vectors = np.linalg.eigh(np.cov(tokens.double().numpy().T))
    order = values.argsort()[::-1][:2]
    expected = (tokens - tokens.mean(0)).double().numpy() @ vectors[:, order]
    for ours, theirs in zip(found.numpy().T, expected.T, strict=True):
        assert np.allclose(ours, theirs, atol=1e-4) or np.allclose(ours, -theirs, atol=1e-4)
    assert shares.numpy() == pytest.approx(values[order] / values.sum(), rel=1e-6)


def test_the_sign_of_a_component_does_not_depend_on_luck():
    tokens = torch.randn(30, 5, dtype=torch.double)
    found, _ = principal_components(tokens)
    again, _ = principal_components(tokens.flip(0))
    torch.testing.assert_close(found, again.flip(0))


def test_tokens_that_are_all_alike():
    found, shares = principal_components(torch.ones(9, 4))
    assert found.abs().max() == 0 and shares.tolist() == [0, 0]
