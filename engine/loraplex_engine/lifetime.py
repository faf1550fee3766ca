"""Ties this process's life to its parent's: a supervisor killed with -9 leaves no engine behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies; elsewhere than Linux, watch for it.

    Linux sends the signal when the *thread* that started us ends, so a supervisor must start
    engines from a thread that lives as long as it does.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call, so no signal will come
            os.kill(os.getpid(), signal.SIGTERM)
        return
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
