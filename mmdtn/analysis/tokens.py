"""Statistics of tokens before and after a normaliser."""

import torch
from torch import Tensor, nn

from mmdtn.norms import DTN
from mmdtn.ops.reference import by_head, neighbourhood, on_tokens

from .neighbourhood import lambdas, position


def magnitudes(tokens: Tensor, num_heads: int) -> Tensor:
    """Computes the norm of ``B x H x W x C`` tokens over the channels of each head, as ``B x K x H x W``."""
    return tokens.unflatten(-1, (num_heads, -1)).norm(dim=-1).permute(0, 3, 1, 2)


def variation(tokens: Tensor, mean: Tensor) -> Tensor:
    """Returns ``abs((x - mean) / x)`` of all nonzero elements as a flat tensor.

    The mean of the result is the variation coefficient.
    """
    ratio = ((tokens - mean) / tokens).abs()
    return ratio.flatten() if tokens.all() else ratio[tokens != 0]


@torch.no_grad()
def seen_by(norm: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the tokens from which a norm computes its statistics.

    DTN with ``prenorm`` first divides the channels of each head by their RMS. Other norms use the tokens unchanged.
    """
    return by_head(tokens, norm.num_heads, norm.settings).flatten(-2) if isinstance(norm, DTN) else tokens


@torch.no_grad()
def means(norm: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Computes the means that LayerNorm, InstanceNorm and DTN subtract from ``B x H x W x C`` tokens.

    The result has DTN's mean only if ``norm`` is a DTN layer. Pass tokens that ``seen_by`` returned. Each mean
    broadcasts to the shape of the tokens.
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
    """Computes the first principal components of ``N x C`` tokens.

    Returns the ``N x number`` coordinates of the tokens and each component's share of the variance. The sign of a
    component is arbitrary, so the function makes its largest weight positive. Two runs then draw the same picture.
    """
    tokens = tokens.double() - tokens.double().mean(0)
    _, values, directions = torch.linalg.svd(tokens, full_matrices=False)
    values, directions = values[:number], directions[:number]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    shares = values.square() / tokens.square().sum().clamp(min=torch.finfo(torch.double).tiny)
    return tokens @ (directions * largest.sign()).mT, shares
