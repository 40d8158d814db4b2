"""Records the tokens of every block of a backbone during a forward pass."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmdtn.backbones.layers import Block


@dataclass
class BlockTokens:
    """Tokens of one block in a forward pass.

    The tokens are ``B x H x W x C``, or ``B x 1 x (1 + H * W) x C`` if a class token precedes them.
    """

    name: str
    block: Block
    grid: tuple[int, int] = (0, 0)  # height and width of the block's input, in tokens
    before: dict[str, Tensor] = field(default_factory=dict)  # input of each norm, keys norm1 and norm2
    after: dict[str, Tensor] = field(default_factory=dict)  # output of each norm
    output: Tensor | None = None

    @property
    def has_class_token(self) -> bool:
        return self.before['norm1'].shape[1:3] != self.grid

    def on_grid(self, tokens: Tensor) -> Tensor:
        """Returns the tokens as ``B x H x W x C``, without the class token."""
        return tokens[:, 0, 1:].unflatten(1, self.grid) if self.has_class_token else tokens


class Capture(AbstractContextManager):
    """Context manager that records the tokens of the blocks of this project's backbones in a model.

    ``blocks`` holds the tokens of the last forward pass, in the order of the model's blocks. The model itself is not
    changed.

    Example:
        >>> model = PVTDTN('tiny')
        >>> with Capture(model) as seen:
        ...     maps = model(torch.randn(1, 3, 64, 64))
        >>> seen.blocks[0].name, seen.blocks[0].after['norm1'].shape
        ('stages.0.blocks.0', torch.Size([1, 16, 16, 64]))
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks = {n: BlockTokens(n, m) for n, m in model.named_modules() if isinstance(m, Block)}
        if not self._blocks:
            raise ValueError(
                f'{type(model).__name__} has no block of PVTDTN, SwinDTN, ViTDTN, T2TViTDTN or LeViTDTN, and only '
                "these can be analysed. With norm_cfg=dict(type='LN') they are the published models; LeViTDTN needs "
                'norm_cfg=None.'
            )

    def __enter__(self) -> 'Capture':
        self._grid = (0, 0)
        self._handles = [
            module.register_forward_hook(self._note_grid)
            for name, module in self._model.named_modules()
            if name.rpartition('.')[2] == 'patch_embed'
        ]
        for tokens in self._blocks.values():
            for name in ('norm1', 'norm2'):
                norm = tokens.block.get_submodule(name)
                self._handles.append(norm.register_forward_hook(partial(self._note_norm, tokens, name)))
            self._handles.append(tokens.block.register_forward_hook(partial(self._note_output, tokens)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def blocks(self) -> list[BlockTokens]:
        return [tokens for tokens in self._blocks.values() if tokens.output is not None]

    def _note_grid(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        height, width = output.shape[2:4] if isinstance(module, nn.Conv2d) else output.shape[1:3]
        self._grid = height, width

    def _note_norm(self, tokens: BlockTokens, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        x, *where = inputs
        if where:  # a DTN layer in a model with a class token: its tokens are B x T x C
            x, output = x[:, None], output[:, None]
        tokens.before[name], tokens.after[name] = x.detach(), output.detach()
        if name == 'norm1':  # blocks of LeViT that shrink the map have a smaller grid at norm2
            height, width = x.shape[1:3]
            # One row with one token more than the grid of the last patch embedding contains a class token.
            tokens.grid = self._grid if (height, width) == (1, 1 + math.prod(self._grid)) else (height, width)

    def _note_output(self, tokens: BlockTokens, module: nn.Module, inputs: Any, output: Tensor) -> None:
        tokens.output = output.detach()
