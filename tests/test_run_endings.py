"""However a run of these tests ends, its Postgres, its Redis and its folders do not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support.folders import delete_leftovers
from tests.support.processes import is_alive, wait_until

ROOT = Path(__file__).resolve().parents[1]
# Two tests that never end, one of them in an event loop, with the servers that a run has (unmigrated).
HANGING = """
import asyncio, time
from pathlib import Path
import pytest
from loraplex_platform.local.embedded import start_postgres

@pytest.fixture(scope="session")
def postgres(session_folder):
    server = start_postgres(session_folder / "postgres", is_durable=False)
    yield server
    server.stop()

def test_thread(postgres, redis_url, short_tmp_path):
    Path({ready!r}).touch()
    time.sleep(1000)

async def test_loop(postgres, redis_url, short_tmp_path):
    Path({ready!r}).touch()
    await asyncio.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
@pytest.mark.parametrize(
    ("test", "number", "flags"),
    [
        ("test_thread", signal.SIGTERM, []),
        ("test_loop", signal.SIGTERM, []),
        # execnet waits ten seconds before it interrupts a worker.
        pytest.param("test_thread", signal.SIGTERM, ["-n", "1"], marks=pytest.mark.slow),
        ("test_thread", signal.SIGKILL, []),
    ],
    ids=["term", "term-loop", "term-xdist", "kill"],
)
def test_a_run_that_is_told_to_end_leaves_nothing(
    test: str,
    number: signal.Signals,
    flags: list[str],
    short_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready, temporary = short_tmp_path / "ready", short_tmp_path / "t"
    temporary.mkdir()
    (short_tmp_path / "test_hanging.py").write_text(HANGING.format(ready=str(ready)))
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(short_tmp_path), *flags),
        f"{short_tmp_path / 'test_hanging.py'}::{test}",
    ]
    output_file = short_tmp_path / "output"
    with output_file.open("wb") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temporary)},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: ready.exists() or run.poll() is not None, deadline_s=120)
        assert run.poll() is None, output_file.read_text()
        pids = [process.pid for process in psutil.Process(run.pid).children(recursive=True)]
        assert len(pids) > 6  # Postgres's own processes among them
        assert list(temporary.glob("lpx-*"))

        run.send_signal(number)
        run.wait(60)

        wait_until(lambda: not any(map(is_alive, pids)), deadline_s=60)
        if number == signal.SIGKILL:
            monkeypatch.setattr(tempfile, "tempdir", str(temporary))
            delete_leftovers(min_age_s=0.0)  # as the next run does
        assert list(temporary.glob("lpx-*")) == [], output_file.read_text()
    finally:
        run.kill()
        run.wait()
