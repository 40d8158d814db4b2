"""The tokens of every block of a backbone, watched while the model runs."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmdtn.backbones.layers import Block


@dataclass
class BlockTokens:
    """What went through one block: ``B x H x W x C``, or ``B x 1 x (1 + H * W) x C`` with a class token in front."""

    name: str
    block: Block
    grid: tuple[int, int] = (0, 0)  # of what comes in
    before: dict[str, Tensor] = field(default_factory=dict)  # by norm, norm1 and norm2
    after: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None

    @property
    def has_class_token(self) -> bool:
        return self.before['norm1'].shape[1:3] != self.grid

    def on_grid(self, tokens: Tensor) -> Tensor:
        """``B x H x W x C``, without the class token, which has no place there."""
        return tokens[:, 0, 1:].unflatten(1, self.grid) if self.has_class_token else tokens


class Capture(AbstractContextManager):
    """Watches the blocks of every backbone of this project within a model; changes nothing in it.

    ``blocks`` are in the order of the model, those of the last forward pass.

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
                f'{type(model).__name__} has no block of PVTDTN, SwinDTN, ViTDTN, T2TViTDTN or LeViTDTN. Only these '
                "can be looked into; with norm_cfg=dict(type='LN') they are the published models, LeViTDTN with None."
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
        if where:  # DTN's, beside a class token: it takes the row flat
            x, output = x[:, None], output[:, None]
        tokens.before[name], tokens.after[name] = x.detach(), output.detach()
        if name == 'norm1':  # LeViT's blocks that shrink the map have another grid at norm2
            height, width = x.shape[1:3]
            # As one row, with one token more than the grid of the last patch embedding: the class token has joined.
            tokens.grid = self._grid if (height, width) == (1, 1 + math.prod(self._grid)) else (height, width)

    def _note_output(self, tokens: BlockTokens, module: nn.Module, inputs: Any, output: Tensor) -> None:
        tokens.output = output.detach()
