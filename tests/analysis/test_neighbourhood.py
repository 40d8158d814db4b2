"""Compares P of one query with the dense softmax."""

import pytest
import torch
from torch import nn

from mmdtn.analysis import at_start, attended
from mmdtn.norms import DTN
from tests.norms.reference import dense_p


@pytest.mark.parametrize('grid', [(3, 3), (5, 8), (1, 6)])
@pytest.mark.parametrize('pool_size', [1, 2])
def test_p_is_the_dense_softmax(grid, pool_size):
    layer = DTN(20, num_heads=5, pool_size=pool_size)
    nn.init.normal_(layer.position)
    h, w = (-(-side // pool_size) for side in grid)
    dense = dense_p(layer.position, h, w).detach().view(5, h, w, h, w)
    for query in {(0, 0), (h // 2, w // 2), (h - 1, w - 1)}:
        torch.testing.assert_close(attended(layer, *grid, query), dense[:, query[0], query[1]])


def test_uniform_and_identity():
    assert attended(DTN(4, 2, position='uniform'), 2, 4, (0, 0)).unique().tolist() == [1 / 8]
    looked = attended(DTN(4, 2, position='identity'), 3, 3, (1, 2))
    assert looked[:, 1, 2].tolist() == [1, 1] and looked.sum() == 2


def test_the_start_is_that_of_a_new_layer_and_leaves_the_trained_one_alone():
    layer = DTN(16, num_heads=4)
    trained = nn.init.normal_(layer.position).clone()
    assert at_start(layer).position.equal(DTN(16, num_heads=4).position)
    assert layer.position.equal(trained)
