"""Memory for a CPU's tensors: in large pages, and kept by the process instead of given back tensor by tensor."""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1


def ask_for_huge_pages() -> None:
    """Tensors of 2 MiB and more are to lie in pages of that size where Linux gives them on request. Before torch is
    imported; what the environment says already holds.

    A page of 4 KiB costs a fault at its first touch, and the model's own memory alone has some hundred thousand: a
    tenth of a training step that begins with fresh memory. See PyTorch's THP_MEM_ALLOC_ENABLE.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """From now on memory that this process frees stays with it. Does nothing where the C library is not glibc.

    glibc gives a large block back to the system when it is freed, and the next one comes as pages that the kernel has
    to zero at their first touch: a page fault for every 4 KiB of every activation, which costs a seventh of a training
    step. In return a process stays as large as it once was. See mallopt(3).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
