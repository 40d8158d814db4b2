"""Launches Triton kernels with little work on the host.

``kernel[grid](...)`` types, checks and hashes every argument at each launch, which costs more than the launch itself
(``benchmark_norm.py --host``). Here this happens at the first launch alone. It returns the compiled kernel, and later
launches call that kernel, as Triton's tutorial on fused softmax does. Should a future Triton not allow this, every
launch is an ordinary one.
"""

from typing import Any

from mmengine.logging import print_log


class Launcher:
    """Launches kernels whose arguments always have the same types, constants and alignment.

    ``launch(kernel, grid, arguments, num_warps, constants)``: ``arguments`` are all of the kernel's, in order.
    ``constants`` are those of them which differ between calls, and for which the kernel is compiled.
    """

    direct = True  # for all launchers of the process: whether compiled kernels can be called

    def __init__(self) -> None:
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple, num_warps: int, constants: tuple = ()
    ) -> None:
        key = (kernel.__name__, constants)
        compiled = self.compiled.get(key)
        if compiled is None or not self.direct:
            self.compiled[key] = kernel[grid](*arguments, num_warps=num_warps)  # None from Triton's interpreter
            return
        try:
            compiled[grid](*arguments)
        except (AttributeError, TypeError) as error:  # raised before anything is launched
            Launcher.direct = False
            print_log(f'Triton kernels are launched the slow way: calling a compiled one failed ({error}).', 'current')
            kernel[grid](*arguments, num_warps=num_warps)
