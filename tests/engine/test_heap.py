"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Small blocks lie in the heap, and the last keeps its end where it is.
_SCRIPT = """
import ctypes, pathlib, resource
from loraplex_engine.heap import give_back_freed_memory

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(64 << 10) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[:-1]:
    libc.free(ctypes.c_void_p(block))
before = resident()
give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only glibc gives memory back when told to",
)
def test_what_was_freed_inside_the_heap_is_no_longer_resident() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )

    assert int(done.stdout) > 56 << 20
