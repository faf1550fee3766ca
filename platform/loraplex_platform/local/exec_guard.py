"""Become another program that the kernel signals when our parent dies.

Run as a file, by path, with `-I -S`: `python -I -S exec_guard.py PARENT_PID SIGNAL -- COMMAND...`. It
imports next to nothing, because it stands before every child's start. On Linux the request survives
exec; elsewhere there is no such request, and what a killed supervisor leaves is ended by the next start.
"""

from __future__ import annotations

import os
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask for the signal, make sure the parent still lives, and exec."""
    parent_pid, signal_number, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: exec_guard.py PARENT_PID SIGNAL -- COMMAND...")
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    # A parent that died before the request was made sends nothing: look once more.
    if os.getppid() != int(parent_pid):
        raise SystemExit("the supervisor is gone")
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the purpose


if __name__ == "__main__":
    main(sys.argv[1:])
