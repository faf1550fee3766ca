"""What the C library's allocator keeps of freed memory, given back to the system."""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """Return what is free to the system, in some milliseconds; where there is no glibc, do nothing.

    For a moment after which much less is needed: freed pages between those in use count as the process's
    until then.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
