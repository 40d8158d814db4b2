"""Statistics of tokens around a normaliser."""

import torch
from torch import Tensor, nn

from mmdtn.norms import DTN
from mmdtn.ops.reference import by_head, neighbourhood, on_tokens

from .neighbourhood import lambdas, position


def magnitudes(tokens: Tensor, num_heads: int) -> Tensor:
    """Norm of each head's slice of each token: ``B x H x W x C`` to ``B x K x H x W``."""
    return tokens.unflatten(-1, (num_heads, -1)).norm(dim=-1).permute(0, 3, 1, 2)


def variation(tokens: Tensor, mean: Tensor) -> Tensor:
    """``abs((x - mean) / x)`` of every element that is not 0: a flat tensor. Its mean is the variation coefficient."""
    ratio = ((tokens - mean) / tokens).abs()
    return ratio.flatten() if tokens.all() else ratio[tokens != 0]


@torch.no_grad()
def seen_by(norm: nn.Module, tokens: Tensor) -> Tensor:
    """The tokens that a norm takes statistics of: for DTN with ``prenorm`` each head's slice over its RMS."""
    return by_head(tokens, norm.num_heads, norm.settings).flatten(-2) if isinstance(norm, DTN) else tokens


@torch.no_grad()
def means(norm: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The means that LN, IN and, if the norm is one, DTN would subtract from the same ``B x H x W x C`` tokens.

    Each broadcasts to the tokens. They should be as ``seen_by`` gives them.
    """
    found = dict(LN=tokens.mean(-1, keepdim=True), IN=tokens.mean((1, 2), keepdim=True))
    if isinstance(norm, DTN):
        z = tokens.unflatten(-1, (norm.num_heads, -1))
        mean, _ = neighbourhood(z, position(norm).to(tokens), norm.settings)
        share = lambdas(norm)[0].to(tokens)[:, None]
        mixed = share * found['LN'][..., None] + (1 - share) * on_tokens(mean, z, norm.pool_size)
        found['DTN'] = mixed.flatten(-2)
    return found


def principal_components(tokens: Tensor, number: int = 2) -> tuple[Tensor, Tensor]:
    """Coordinates ``N x number`` of ``N x C`` tokens along their first principal components, and the share of the
    variance of each.

    A component's sign is free; its largest weight is made positive, so that two runs give one picture.
    """
    tokens = tokens.double() - tokens.double().mean(0)
    _, values, directions = torch.linalg.svd(tokens, full_matrices=False)
    values, directions = values[:number], directions[:number]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    shares = values.square() / tokens.square().sum().clamp(min=torch.finfo(torch.double).tiny)
    return tokens @ (directions * largest.sign()).mT, shares
