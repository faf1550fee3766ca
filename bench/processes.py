"""A server under measurement: a process tree of its own, its memory, its log, and its end.

Memory is that of the whole tree: proportional set size where the kernel tells it (pages that several
processes share count once), sampled, and the largest resident peak of any one process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_SAMPLE_S = 0.5
_POLL_S = 0.1
_TERM_S = 30.0
_GIB = 2**30
_TAIL_LINES = 6


class StartError(Exception):
    """A server did not come up; says what its log says."""


def free_port() -> int:
    """A port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _pss_bytes(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    except OSError:
        with contextlib.suppress(psutil.Error):
            return int(process.memory_info().rss)
    return 0


def _peak_rss_bytes(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class MemoryMeter:
    """Samples a process tree until it is stopped. All figures in GiB."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self.peak_tree_gib = 0.0
        self.peak_process_gib = 0.0
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Look once."""
        tree = _tree(self._pid)
        total = sum(map(_pss_bytes, tree)) / _GIB
        self.peak_tree_gib = max(self.peak_tree_gib, total)
        largest = max(map(_peak_rss_bytes, tree), default=0) / _GIB
        self.peak_process_gib = max(self.peak_process_gib, largest)

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join()


class Served:
    """A running command; as a context it ends the whole tree. Output goes to `log`."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._log_path = log
        self._log = log.open("wb")
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        self.meter = MemoryMeter(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.meter.sample()
        self.meter.stop()
        end_tree(self.process)
        self._log.close()

    def tail(self) -> str:
        """The last lines of its output."""
        text = self._log_path.read_text(errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-_TAIL_LINES:])

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Until it is ready.

        Raises:
            StartError: it ended before, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            code = self.process.poll()
            if code is not None:
                raise StartError(f"it ended with {code} at its start:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise StartError(f"not ready within {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(_POLL_S)


def end_tree(process: subprocess.Popen[bytes], term_s: float = _TERM_S) -> None:
    """SIGTERM to the process, which should end its children; SIGKILL to what is left after `term_s`."""
    tree = _tree(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(term_s)
    # Those that a process has left behind, and those it began meanwhile.
    for left in {*tree, *_tree(process.pid)}:
        with contextlib.suppress(psutil.Error):
            left.kill()
    process.wait()
