"""Records the tokens of every block of a backbone during a forward pass."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmdtn.backbones.layers import Block
from mmdtn.norms import DTN


@dataclass
class BlockTokens:
    """Tokens of one block in a forward pass.

    The tokens have the shape ``B x H x W x C``, or ``B x 1 x (1 + H * W) x C`` with a class token in front. In a
    converted model, a block is a module that contains DTN layers, and only its tokens on the grid are recorded.
    """

    name: str
    block: nn.Module
    grid: tuple[int, int] = (0, 0)  # height and width of the block's input, in tokens
    before: dict[str, Tensor] = field(default_factory=dict)  # input of each norm, with keys such as norm1 and norm2
    after: dict[str, Tensor] = field(default_factory=dict)  # output of each norm
    output: Tensor | None = None

    @property
    def has_class_token(self) -> bool:
        return next(iter(self.before.values())).shape[1:3] != self.grid

    def on_grid(self, tokens: Tensor) -> Tensor:
        """Returns the tokens without the class token, as a ``B x H x W x C`` tensor."""
        return tokens[:, 0, 1:].unflatten(1, self.grid) if self.has_class_token else tokens


class Capture(AbstractContextManager):
    """Context manager that records the tokens of all blocks in a backbone of this project or in a converted model.

    ``blocks`` holds the tokens of the last forward pass, in the order of the model's blocks. The model stays unchanged.

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
        self._norms = {name: ['norm1', 'norm2'] for name in self._blocks}
        if not self._blocks:
            for path in (name for name, module in model.named_modules() if isinstance(module, DTN)):
                parent, _, name = path.rpartition('.')
                self._blocks[parent] = BlockTokens(parent, model.get_submodule(parent))
                self._norms.setdefault(parent, []).append(name)
        if not self._blocks:
            raise ValueError(
                f'{type(model).__name__} has no block of PVTDTN, SwinDTN, ViTDTN, T2TViTDTN or LeViTDTN, and no DTN '
                'layer of convert_norms. To analyse a published model, use one of these backbones with '
                "norm_cfg=dict(type='LN'), or LeViTDTN with norm_cfg=None."
            )

    def __enter__(self) -> 'Capture':
        self._grid = (0, 0)
        self._handles = [
            module.register_forward_hook(self._note_grid)
            for name, module in self._model.named_modules()
            if name.rpartition('.')[2] == 'patch_embed'
            and any(isinstance(t.block, Block) for t in self._blocks.values())
        ]
        for tokens in self._blocks.values():
            converted = not isinstance(tokens.block, Block)
            note = self._note_converted if converted else self._note_norm
            for name in self._norms[tokens.name]:
                norm = tokens.block.get_submodule(name)
                # Run this hook before the one that permutes the output of a converted norm back to channels first.
                self._handles.append(norm.register_forward_hook(partial(note, tokens, name), prepend=converted))
            note_output = self._note_output_of_converted if converted else self._note_output
            self._handles.append(tokens.block.register_forward_hook(partial(note_output, tokens)))
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
        if where:  # tokens of a DTN layer are B x T x C in a model with a class token
            x, output = x[:, None], output[:, None]
        tokens.before[name], tokens.after[name] = x.detach(), output.detach()
        if name == 'norm1':  # blocks of LeViT that shrink the map have a smaller grid at norm2
            height, width = x.shape[1:3]
            # A single row has a class token if it is one token longer than the grid of the last patch embedding.
            tokens.grid = self._grid if (height, width) == (1, 1 + math.prod(self._grid)) else (height, width)

    def _note_converted(self, tokens: BlockTokens, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        x, *where = inputs
        if where:  # the tokens are B x T x C
            grid, prefix = where
            x, output = (flat[:, prefix:].unflatten(1, grid) for flat in (x, output))
        tokens.before[name], tokens.after[name] = x.detach(), output.detach()
        tokens.grid = x.shape[1], x.shape[2]

    def _note_output_of_converted(self, tokens: BlockTokens, module: nn.Module, inputs: Any, output: Any) -> None:
        """Records the output of a block in a converted model.

        If the shape of the output does not fit the grid, the input of the block's last norm is recorded instead.
        """
        *_, tokens.output = tokens.before.values()
        y = output[0] if isinstance(output, tuple) else output
        height, width = tokens.grid
        if y.dim() == 4 and y.shape[1:3] == tokens.grid:
            tokens.output = y.detach()
        elif y.dim() == 4 and y.shape[2:] == tokens.grid:
            tokens.output = y.detach().permute(0, 2, 3, 1)
        elif y.dim() == 3 and y.shape[1] >= height * width:
            tokens.output = y.detach()[:, -height * width :].unflatten(1, tokens.grid)

    def _note_output(self, tokens: BlockTokens, module: nn.Module, inputs: Any, output: Tensor) -> None:
        tokens.output = output.detach()
