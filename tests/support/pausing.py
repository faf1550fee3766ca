"""Servers that stand still: every process of them stopped, their sockets open, no answer ever."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil


def pause(pid: int) -> list[int]:
    """SIGSTOP to a process and its children; the parent first, so that no child is born meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    for child in pids[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGSTOP)
    return pids


def resume(pids: list[int]) -> None:
    """Undo `pause`."""
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stand still for as long as the block lasts."""
    pids = pause(pid)
    try:
        yield
    finally:
        resume(pids)
