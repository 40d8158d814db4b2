"""What Inductor has to know to make few loops of ``graph``, each through memory in its order."""

from typing import Any

from torch import Tensor, compiler

# For regions: the order of loops is that of the dimensions, and what ``computed_once`` does not keep apart is fused.
# Inductor would choose an order by a vote of all that a loop reads, and keep what is read twice: a third slower.
# Its number of threads goes into the code but not into the key of its cache on disk: without the last option, code
# from a process with one thread, as tests and launchers have, keeps later ones on one core.
OPTIONS: dict[str, Any] = {
    'pick_loop_orders': False,
    'realize_reads_threshold': 1000,
    'realize_acc_reads_threshold': 1000,
    'realize_opcount_threshold': 1000,
    'cpp.dynamic_threads': True,
}


def computed_once(t: Tensor) -> Tensor:
    """Inductor may compute an expression anew for each of the many sums that read it, but not behind ``as_strided``."""
    return t.as_strided(t.shape, t.stride()) if compiler.is_compiling() else t
