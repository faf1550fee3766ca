"""Small children for tests of supervision, and ways to look at processes without guessing."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

# Writes its name and pid to a journal when it starts and when it is told to end.
POLITE = """
import os, signal, sys, time
name, journal, ready = sys.argv[1:4]
def note(what):
    with open(journal, "a") as file:
        file.write(f"{what} {name} {os.getpid()}\\n")
def end(*_):
    note("end")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
note("start")
open(ready, "w").close()
while True:
    signal.pause()
"""

DEAF = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""


def python(code: str, *arguments: str | Path) -> list[str]:
    """A command that runs `code`."""
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool], *, deadline_s: float = 20.0) -> None:
    """Poll until `condition` holds; fails at the deadline."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - other processes set no event of ours
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], bool], *, deadline_s: float = 20.0) -> None:
    """As `until`, for tests without an event loop."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)
