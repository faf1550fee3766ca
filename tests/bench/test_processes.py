"""A process tree under measurement: its memory, its failures, its end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.processes import Served, StartError, free_port

_PARENT = """
import subprocess, sys, signal
child = subprocess.Popen([sys.executable, "-c", "import time; held = b'x' * 90_000_000; print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


def test_memory_is_that_of_the_tree_and_the_whole_tree_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Served([sys.executable, "-c", _PARENT], log) as served:
        served.wait_until(lambda: log.read_text().endswith("\n"), 60.0)
        child = psutil.Process(int(log.read_text()))
        served.meter.sample()

    assert served.meter.peak_tree_gib > 0.09
    assert 0.08 < served.meter.peak_process_gib < served.meter.peak_tree_gib + 0.05
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    assert served.process.returncode is not None


def test_what_ends_at_its_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]

    with (
        pytest.raises(StartError, match=r"ended with 1 at its start:\nno such model"),
        Served(command, tmp_path / "log") as served,
    ):
        served.wait_until(lambda: False, 60.0)


def test_what_is_never_ready_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('loading'); time.sleep(600)"]

    with (
        pytest.raises(StartError, match="not ready within 0 s"),
        Served(command, tmp_path / "log") as served,
    ):
        served.wait_until(lambda: False, 0.0)

    assert served.process.returncode is not None


def test_a_free_port_can_be_listened_on() -> None:
    assert 1024 < free_port() < 65536
