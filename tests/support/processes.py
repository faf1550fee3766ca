"""Small children for tests of supervision, and ways to look at processes without guessing."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_ROOT = Path(__file__).resolve().parents[2]

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


def wait_until(
    condition: Callable[[], bool], *, deadline_s: float = 20.0, interval_s: float = 0.01
) -> None:
    """As `until`, for tests without an event loop."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(interval_s)


class Peer:
    """A Python process that a test talks with, in lines of JSON; killed at the end of the block.

    with Peer("-m", "tests.support.quota_race") as peer:
        peer.tell({"num_clients": 3})
        assert peer.hear() == "ready"

    For races and locks between processes. (multiprocessing's "spawn" runs its parent's main module
    again, which in a worker of a test run need not be a file that can be.)
    """

    def __init__(self, *arguments: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that a line that has come is seen by `select`
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.kill()

    def tell(self, value: Any) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    def hear(self, *, deadline_s: float = 60.0) -> Any:
        """The next line; fails at the deadline, and when the process has ended instead."""
        return hear_all([self], deadline_s=deadline_s)[0]

    def kill(self) -> None:
        """End it as a machine's fault would, and wait until it is gone."""
        self._process.kill()
        # Closes the pipes besides.
        self._process.communicate()


def hear_all(peers: Sequence[Peer], *, deadline_s: float = 60.0) -> list[Any]:
    """The next line of each, whoever speaks first."""
    deadline = time.monotonic() + deadline_s
    lines = []
    for peer in peers:
        process = peer._process
        assert process.stdout is not None
        left_s = max(deadline - time.monotonic(), 0.0)
        assert select.select([process.stdout], [], [], left_s)[0], "nothing came in time"
        line = process.stdout.readline()
        assert line, f"it ended with status {process.wait()}"
        lines.append(json.loads(line))
    return lines
