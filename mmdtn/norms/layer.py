"""LayerNorm with the arguments that all norms of this package accept."""

from torch import Tensor, nn

from .lengths import Lengths, RealTokens


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm with the argument ``lengths`` for padded sequences, as in :class:`mmdtn.norms.TokenNorm`.

    Example:
        >>> LayerNorm(64)(torch.randn(2, 25, 64), lengths=[25, 7]).shape
        torch.Size([2, 25, 64])
    """

    FROM_PLACE = ('eps',)

    def forward(self, x: Tensor, lengths: Lengths | None = None) -> Tensor:
        if lengths is None:
            return super().forward(x)
        real = RealTokens(x, lengths)
        return real.put_back(super().forward(real.tokens))
