"""Compares outputs and thresholds with recorded results of the authors' code.

In both cases the weights were drawn from the names of the tensors. Every eighth class is recorded.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from mmdtn import checkpoints
from mmdtn.dvt import DVT

from .published import MODELS, REUSES, images, weights

GOLDEN = np.load(Path(__file__).with_name('golden.npz'))


def golden(*names: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN['/'.join(names)])


CASES = [
    pytest.param(model, reuse, marks=() if (model, reuse) == ('t2t-12', 'both') else pytest.mark.slow)
    for model in MODELS
    for reuse in REUSES
]


@pytest.mark.parametrize(('name', 'reuse'), CASES)
@torch.no_grad()
def test_outputs_are_those_of_the_authors_code(name, reuse):
    features, relations = REUSES[reuse]
    model = DVT(name, reuse_features=features, reuse_relations=relations).eval()
    ours, _ = checkpoints.translate(weights(MODELS[name], features, relations), model)
    model.load_state_dict(ours)
    upstream, handed_on, logits = None, [], []
    for i in range(3):
        scores, upstream = model.run_exit(i, images(), upstream)
        logits.append(scores)
        handed_on.append(upstream)
    want = golden(name, reuse, 'logits')
    for i in range(3):
        error = (logits[i][:, ::8] - want[:, i]).abs().max() / want[:, i].abs().max()
        assert error < 1e-5, f'exit {i + 1}: {error}'
    tokens = torch.stack([torch.stack((u.tokens.mean(), u.tokens.std(correction=0))) for u in handed_on], 1)
    torch.testing.assert_close(tokens[0], golden(name, reuse, 'tokens_mean'), rtol=0, atol=1e-5)
    torch.testing.assert_close(tokens[1], golden(name, reuse, 'tokens_std'), rtol=1e-5, atol=0)
    if relations:
        handed = torch.stack([u.relations.std(correction=0) for u in handed_on[:2]])
        torch.testing.assert_close(handed, golden(name, reuse, 'relation_std')[:2], rtol=1e-5, atol=0)
