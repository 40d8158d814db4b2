"""Where results of eager and of compiled code go."""

from collections.abc import Callable

import torch
from torch import Tensor


def into(memory: Tensor, operation: Callable, *operands: Tensor, **options: float) -> Tensor:
    """The result of an operation, in memory that is at hand: most of the time of eager code goes into fresh memory."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # graphs know no out=, nor does autograd in a trace
        return memory.copy_(operation(*operands, **options))
    return operation(*operands, **options, out=memory)


def computed_once(t: Tensor) -> Tensor:
    """Inductor may compute an expression anew for each of the many sums that read it, but not behind ``as_strided``."""
    return t.as_strided(t.shape, t.stride()) if torch.compiler.is_compiling() else t
