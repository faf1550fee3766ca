"""Become another program that the kernel signals when our parent dies.

Run as a file, by path, with `-I -S`: `python -I -S exec_guard.py PARENT_PID SIGNAL -- COMMAND...`. It
imports next to nothing, because it stands before every child's start. On Linux the request survives
exec; elsewhere there is no such request, and what a killed supervisor leaves is ended by the next start.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask for the signal, make sure the parent still lives, and exec."""
    parent_pid, signal_number, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: exec_guard.py PARENT_PID SIGNAL -- COMMAND...")
    death_request(int(parent_pid), int(signal_number))()
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the purpose


def death_request(parent_pid: int, signal_number: int) -> Callable[[], None]:
    """What a child calls before it execs, to be signalled when `parent_pid` dies.

    A change of user forgets the request, so it comes after that. Everything that needs a lock is done
    here, for the call may stand between a fork and an exec. The kernel looks at the *thread* that forked:
    it must be one that lives as long as its process.
    """

    def look() -> None:
        # A parent that died before the request was made sends nothing: look once more.
        if os.getppid() != parent_pid:
            raise SystemExit("the supervisor is gone")

    if sys.platform != "linux":
        return look
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        if prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
        look()

    return ask


if __name__ == "__main__":
    main(sys.argv[1:])
