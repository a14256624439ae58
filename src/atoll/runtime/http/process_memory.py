"""Memory of a process after use: large pieces go back to the machine at once."""

from __future__ import annotations

import contextlib
import ctypes

_MMAP_THRESHOLD = -3
"""Number of M_MMAP_THRESHOLD in glibc's malloc.h."""
_TRIM_THRESHOLD = -1
"""Number of M_TRIM_THRESHOLD in glibc's malloc.h."""
_LARGE_BYTES = 2**20
"""Pieces of memory from this size on go back at once."""


def return_unused_memory() -> None:
    """Have the allocator give back what is free in the midst of its memory; takes a millisecond or few."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_large_memory() -> None:
    """Have the allocator give back what large bodies took when they are gone.

    glibc learns from the first large piece that is freed, and from then on keeps pieces of up to 32 MiB
    between others that live longer. With thresholds that are set it does not learn. Elsewhere than on
    glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)
