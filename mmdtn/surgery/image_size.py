"""Tells converted norms the size of the current image and the positions of their tokens in it."""

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .layouts import Layout, Size, by


class ImageSize:
    """Stores the image size of the current forward pass for the converted norms of a model.

    The model stores the size when it is called. The first submodule that gets the images also stores the size, so every
    method that starts from images works. Each thread has its own size. Compiled code cannot identify its thread, so
    each thread needs its own compiled model.

    Activation checkpointing computes blocks again in the backward pass, when the model may already have seen other
    images. Therefore, all sizes since the last backward pass are stored, and the number of tokens selects the right
    one.
    """

    def __init__(self, only: Size | None) -> None:
        self.only = only
        self.now: dict[int, Size] = {}  # current size by thread
        self.pending: set[Size] = set()
        self.computing_again = False

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Stores the size of the images. Serves as a forward pre-hook of the model and of one submodule."""
        images = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim() == 4]
        if not images or _in_backward_pass():
            return
        now = images[0].shape[2], images[0].shape[3]
        if self.only is not None and now != self.only:
            raise ValueError(
                f'{type(module).__name__} got images of {by(now)}, but its norms were converted for {by(self.only)}, '
                'the only size that the model took at that time.'
            )
        self.now[_thread()] = now
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if self.computing_again:  # the backward pass that set this flag is over
                self.pending.clear()
                self.computing_again = False
            self.pending.add(now)

    def leave(self, *_: Any) -> None:
        """Deletes the size after a call of the model, so that no norm uses the size for tokens of another image."""
        self.now.pop(_thread(), None)

    def grid(self, layout: Layout, tokens: int) -> Size:
        """Returns the token grid of a norm whose input has the given layout and number of tokens."""
        if not _in_backward_pass():
            now = self.now.get(_thread())
            if now is None:
                raise ValueError(
                    f'A norm got {tokens} tokens, but no image came before them, so their grid is unknown. Call the '
                    'model, or one of its methods that start from images, such as forward_features.'
                )
            grid = layout.grid(now)
            if layout.prefix + grid[0] * grid[1] == tokens:
                return grid
            raise ValueError(
                f'A norm expected {layout.prefix} + {by(grid)} tokens for an image of {by(now)}, because of the shapes '
                f'during the conversion, but got {tokens}. Convert the original model with example_size={now}.'
            )
        self.computing_again = True
        grids = {grid for size in self.pending if layout.prefix + math.prod(grid := layout.grid(size)) == tokens}
        if len(grids) == 1:
            return grids.pop()
        several = ' or '.join(sorted(map(by, grids))) or 'a grid of no known image'
        raise ValueError(
            f'A norm that is computed again in the backward pass got {tokens} tokens, which may form {several}. The '
            'model got images of different sizes before one backward pass. Call backward() after each size, or turn '
            'activation checkpointing off.'
        )


def _in_backward_pass() -> bool:
    # torch.utils.checkpoint also uses this private function. No public function of torch tells whether a call comes
    # from the user or from the backward pass, which computes checkpointed blocks again.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


@dataclass
class Placed:
    """Forward pre-hook of a converted norm.

    The hook permutes tokens to channels last. For DTN on flat tokens, it also passes the grid and the number of prefix
    tokens.
    """

    layout: Layout
    image: ImageSize | None

    def __call__(self, norm: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = args[0] if args else next(iter(kwargs.values()))  # drops MMPretrain's further argument data_format
        if self.layout.form == 'B x C x H x W':
            return (x.permute(0, 2, 3, 1),), {}
        if self.image is None:
            return (x,), {}
        return (x, self.image.grid(self.layout, x.shape[1]), self.layout.prefix), {}


def channels_first_again(norm: nn.Module, args: tuple, y: Tensor) -> Tensor:
    """Forward hook that permutes the output of a converted norm back to channels first."""
    return y.permute(0, 3, 1, 2)
