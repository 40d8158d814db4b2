"""Launches Triton kernels with little work on the host.

``kernel[grid](...)`` checks and hashes every argument at each launch. These checks take longer than the launch itself,
as ``benchmark_norm.py --host`` shows. Therefore only the first launch uses this syntax. The first launch returns the
compiled kernel, and later launches call this kernel directly, as in Triton's tutorial on fused softmax. If a future
Triton does not support direct calls, every launch uses the public syntax.
"""

from typing import Any

from mmengine.logging import print_log


class Launcher:
    """Launches kernels whose arguments always have the same types, constants and alignment.

    In ``launch(kernel, grid, arguments, num_warps, constants)``, ``arguments`` lists all arguments of the kernel in
    order. ``constants`` repeats those compile-time constants that differ between calls.
    """

    direct = True  # whether compiled kernels can be called; all launchers share this value

    def __init__(self) -> None:
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple, num_warps: int, constants: tuple = ()
    ) -> None:
        key = (kernel.__name__, constants)
        compiled = self.compiled.get(key)
        if compiled is None or not self.direct:
            self.compiled[key] = kernel[grid](*arguments, num_warps=num_warps)  # Triton's interpreter returns None
            return
        try:
            compiled[grid](*arguments)
        except (AttributeError, TypeError) as error:  # raised before anything is launched
            Launcher.direct = False
            print_log(
                f'Triton kernels are launched in the slower way, because calling a compiled one failed ({error}).',
                'current',
            )
            kernel[grid](*arguments, num_warps=num_warps)
