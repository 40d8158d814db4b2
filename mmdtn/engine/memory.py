"""Memory of processes that compute on the CPU."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for the next tensor, as PyTorch does on GPUs.

    It would give large blocks back to the system and get them again, page by page and zeroed, many times a step.
    """
    if platform.libc_ver()[0] == 'glibc':
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
