"""Tells converted norms the size of the image that the model works on, and where their tokens lie on it."""

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .layouts import Layout, Size, by


class ImageSize:
    """Size of the images that a model works on. Its converted norms read it.

    The model notes it, and the first module in it that is given images, so any method may be called. Activation
    checkpointing computes blocks again in the backward pass. By then there may have been other images: the sizes since
    the last backward pass are kept, and the number of tokens tells which it was. Each thread has its own images.
    Compiled code cannot ask for its thread, and needs a model for each.
    """

    def __init__(self, only: Size | None) -> None:
        self.only = only
        self.now: dict[int, Size] = {}  # by thread
        self.pending: set[Size] = set()
        self.computing_again = False

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes the size of the images that the model is given, or a module in it."""
        images = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim() == 4]
        if not images or _in_backward_pass():
            return
        now = images[0].shape[2], images[0].shape[3]
        if self.only is not None and now != self.only:
            raise ValueError(
                f'{type(module).__name__} got images of {by(now)}, but the norms of this model were converted for '
                f'{by(self.only)}, the only size that it took then.'
            )
        self.now[_thread()] = now
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if self.computing_again:  # in the backward pass of what came before, which is over
                self.pending.clear()
                self.computing_again = False
            self.pending.add(now)

    def leave(self, *_: Any) -> None:
        """Forgets the size after a call of the model, so that no norm takes it for that of other tokens."""
        self.now.pop(_thread(), None)

    def grid(self, layout: Layout, tokens: int) -> Size:
        """Of a norm that is given so many tokens."""
        if not _in_backward_pass():
            now = self.now.get(_thread())
            if now is None:
                raise ValueError(
                    f'A norm got {tokens} tokens, but no image before, whose size would tell where they lie. Call the '
                    'model, or a method of it that starts from images, as forward_features.'
                )
            grid = layout.grid(now)
            if layout.prefix + grid[0] * grid[1] == tokens:
                return grid
            raise ValueError(
                f'A norm has {layout.prefix} + {by(grid)} tokens for an image of {by(now)} by what the model '
                f'showed when it was converted, but got {tokens}. Convert it with the example_size={now}.'
            )
        self.computing_again = True
        grids = {grid for size in self.pending if layout.prefix + math.prod(grid := layout.grid(size)) == tokens}
        if len(grids) == 1:
            return grids.pop()
        several = ' or '.join(sorted(map(by, grids))) or 'in no image that was passed'
        raise ValueError(
            f'A norm computes again for the backward pass with {tokens} tokens, which may lie as {several}: images of '
            'such sizes were passed before one backward pass. Call backward() after each, or leave out activation '
            'checkpointing.'
        )


def _in_backward_pass() -> bool:
    # torch.utils.checkpoint asks it so; torch has no public way to tell a block that is computed again for the backward
    # pass from a call of the user's.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


@dataclass
class Placed:
    """What a converted norm is called with: tokens with channels last, and the grid of flat ones if it takes any."""

    layout: Layout
    image: ImageSize | None

    def __call__(self, norm: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = args[0] if args else next(iter(kwargs.values()))  # and no more: MMPretrain's say data_format as well
        if self.layout.form == 'B x C x H x W':
            return (x.permute(0, 2, 3, 1),), {}
        if self.image is None:
            return (x,), {}
        return (x, self.image.grid(self.layout, x.shape[1]), self.layout.prefix), {}


def channels_first_again(norm: nn.Module, args: tuple, y: Tensor) -> Tensor:
    return y.permute(0, 3, 1, 2)
