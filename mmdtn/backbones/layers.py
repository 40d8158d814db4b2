"""Layers for maps ``B x H x W x C`` that several backbones share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmdtn.norms import DTN, BatchStatisticsNorm, Place, build_norm
from mmdtn.norms.base import TORCHS_BATCH_AND_INSTANCE_NORMS
from mmdtn.norms.dtn import start_position

from .folding import FusesNorms, Neighbour, border_in_front, fold_behind, fold_into, pad


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Returns the stochastic depth rates of the blocks, which increase linearly from 0 to ``last``."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


def light_checkpoint(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Computes ``run(x)``, and saves only ``x`` for the backward pass.

    ``run`` should be cheap and end in a linear layer, like an MLP's activation and second linear layer. The backward
    pass recomputes the activation, which is the largest tensor of a block, but not the linear layer.
    """
    if not x.requires_grad:
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def pad_to_multiple(x: Tensor, height: int, width: int) -> Tensor:
    """Pads ``B x C x H x W`` with zeros below and to the right, up to multiples of ``height`` and ``width``."""
    below, right = -x.shape[2] % height, -x.shape[3] % width
    return F.pad(x, (0, right, 0, below)) if below or right else x


def run_block(block: nn.Module, x: Tensor, *more: Any, again: bool) -> Tensor:
    """Computes ``block(x, *more)``. With ``again``, the backward pass recomputes the block to save memory."""
    if not (again and x.requires_grad):
        return block(x, *more)
    if torch.compiler.is_compiling():  # torch.compile traces the block once and does not support context_fn
        return checkpoint(block, x, *more, use_reentrant=False)
    return checkpoint(block, x, *more, use_reentrant=False, context_fn=lambda: (nullcontext(), statistics_kept(block)))


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Restores the running statistics of batch norms at the end, so that checkpointing counts each batch only once."""
    kinds = (TORCHS_BATCH_AND_INSTANCE_NORMS, BatchStatisticsNorm)
    norms = [m for m in block.modules() if m.training and isinstance(m, kinds)]
    kept = [(norm, name, value) for norm in norms for name, value in norm.named_buffers(recurse=False)]
    for norm, name, value in kept:
        setattr(norm, name, value.clone())  # a new tensor, because autograd may have saved the original one
    try:
        yield
    finally:
        for norm, name, value in kept:
            setattr(norm, name, value)


class Block(FusesNorms):
    attn: Any
    mlp: Any

    def __init__(
        self,
        channels: int,
        attn: nn.Module,
        mlp: nn.Module,
        drop_path: float,
        norm_cfg: dict[str, Any] | None,
        place: Place,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_cfg, channels, place)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, channels, place)
        self.mlp = mlp
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Applies the block to a map. If a grid is given, applies it to tokens that follow ``p`` class tokens.

        With a grid ``(h, w)``, ``x`` has the shape ``B x 1 x (p + h w) x C``.
        """
        x = add_branch(x, self.attn(normalise(self.norm1, x, grid)), self.drop_path)
        return add_branch(x, self.mlp(normalise(self.norm2, x, grid)), self.drop_path)

    def neighbours(self) -> dict[str, Neighbour]:
        return dict(
            norm1=Neighbour('attn', self.attn.take_in),
            norm2=Neighbour('mlp', self.mlp.take_in),
        )


def normalise(norm: nn.Module, x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """Computes ``norm(x)`` as the input of a linear layer or a convolution.

    If ``x`` has class tokens, DTN receives the size of the grid and the number of these tokens.
    """
    if not isinstance(norm, DTN):
        return norm(x)
    if grid is None:
        return norm(x, feeds_autocast=True)
    return norm(x[:, 0], grid, x.shape[2] - grid[0] * grid[1], feeds_autocast=True)[:, None]


def add_branch(x: Tensor, branch: Tensor, drop_path: nn.Module) -> Tensor:
    """Computes ``x + drop_path(branch)`` in one pass over memory."""
    if not (drop_path.training and isinstance(drop_path, DropPath)):
        return x + branch
    return torch.addcmul(x, branch, drop_path(branch.new_ones(len(branch), *[1] * (branch.dim() - 1))))


class Attention(FusesNorms):
    """Multi-head attention with the optional spatial reduction of PVT.

    With ``sr_ratio > 1``, a convolution divides the sides of the map by ``sr_ratio`` before keys and values are
    computed. ``rpe`` adds :class:`RelativePosition` to the scores, and does not support class tokens. Maps smaller than
    the convolution's kernel are padded with zeros, or with ``border`` after the fusion of a norm in front.
    """

    border: Tensor | None

    def __init__(
        self,
        channels: int,
        num_heads: int,
        sr_ratio: int = 1,
        sr_norm: nn.Module | None = None,
        qkv_bias: bool = True,
        rpe: bool | str = False,
    ) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f'{num_heads} attention heads do not divide {channels} channels.')
        self.num_heads, self.sr_ratio = num_heads, sr_ratio
        self.q = nn.Linear(channels, channels, bias=qkv_bias)
        self.kv = nn.Linear(channels, 2 * channels, bias=qkv_bias)
        self.proj = nn.Linear(channels, channels)
        if sr_ratio > 1:
            assert sr_norm is not None
            self.sr = nn.Conv2d(channels, channels, sr_ratio, sr_ratio)
            self.norm = sr_norm
        self.rpe = RelativePosition(num_heads, sr_ratio, rpe) if rpe else None
        self.register_buffer('border', None)

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        q = self.q(x).view(B, H * W, self.num_heads, -1).transpose(1, 2)
        if self.sr_ratio > 1:
            if min(H, W) < self.sr_ratio:  # the convolution needs at least one full window
                x = pad(x, max(0, self.sr_ratio - H), max(0, self.sr_ratio - W), self.border)
            x = self.norm(self.sr(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous())
        kv = self.kv(x).view(B, x.shape[1] * x.shape[2], 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        bias = None if self.rpe is None else self.rpe((H, W), x.shape[1:3])[None].to(q.dtype)
        out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=bias)
        return self.proj(out.transpose(1, 2).reshape(B, H, W, C))

    def neighbours(self) -> dict[str, Neighbour]:
        return dict(norm=Neighbour('sr', partial(fold_behind, self.sr))) if self.sr_ratio > 1 else {}

    def take_in(self, a: Tensor, b: Tensor) -> None:
        """Fuses the norm in front of the attention."""
        if self.sr_ratio > 1:
            self.border = border_in_front(self.sr, self.border, a, b)
        fold_into(self.q, a, b)
        fold_into(self.sr if self.sr_ratio > 1 else self.kv, a, b)


class RelativePosition(nn.Module):
    """Relative position bias of attention that uses the scores of DTN's P (Eq. 6 of the paper).

    The bias of each head is ``a_1 (dx^2 + dy^2) + a_2 dx + a_3 dy``. ``(dx, dy)`` is the offset from a query to a key.
    The unit of offsets is the distance between neighbouring keys, which is ``sr_ratio`` tokens.

    The bias takes as much memory as the scores. With three more channels, q and k could represent the same scores in
    less memory, but squared coordinates are too inaccurate in half precision.

    Args:
        start: Initial values of the coefficients: True for a truncated normal distribution, or ``'local'`` (Eq. 7).
    """

    def __init__(self, num_heads: int, sr_ratio: int = 1, start: bool | str = True) -> None:
        super().__init__()
        if start not in (True, 'local'):
            raise ValueError(f"rpe={start!r} does not exist. Choose True, 'local' (Eq. 7 of the paper) or False.")
        self.sr_ratio = sr_ratio
        self.position = nn.Parameter(torch.empty(num_heads, 3))
        start_position(self.position, 'trunc_normal' if start is True else 'local')

    def forward(self, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
        """Computes the float32 bias ``K x (H W) x (H' W')`` from the heights and widths of both grids."""
        square, x, y = self.position.float()[..., None, None].unbind(1)
        dy, dx = (self.shifts(*sides) for sides in zip(queries, keys, strict=True))
        along_y, along_x = square * dy * dy + y * dy, square * dx * dx + x * dx
        return (along_y[:, :, None, :, None] + along_x[:, None, :, None, :]).flatten(3).flatten(1, 2)

    def shifts(self, queries: int, keys: int) -> Tensor:
        """Computes the offsets from queries to keys along one axis, from centres of tokens to centres of cells."""
        place = (torch.arange(queries, device=self.position.device) + 0.5) / self.sr_ratio - 0.5
        return torch.arange(keys, device=self.position.device) - place[:, None]


class ConvMlp(nn.Module):
    """MLP of two linear layers, with an optional 3 x 3 depthwise convolution between them as in PVTv2."""

    def __init__(self, channels: int, hidden: int, conv: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden) if conv else None
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.dwconv is not None:
            x = self.dwconv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return light_checkpoint(lambda hidden: self.fc2(F.gelu(hidden)), x)

    def take_in(self, a: Tensor, b: Tensor) -> None:
        """Fuses the norm in front of the MLP."""
        fold_into(self.fc1, a, b)
