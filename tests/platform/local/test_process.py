"""No child outlives a killed supervisor, and the next start ends what did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loraplex_platform.local.process import (
    Child,
    Stale,
    end_stale,
    kill_group,
    last_lines,
    process_identity,
)

from tests.support.processes import DEAF, is_alive, python, wait_until

# A supervisor that starts one child, tells its pid, and waits to be killed.
SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from loraplex_platform.local.process import Child
from tests.support.processes import POLITE, python

async def main():
    folder = Path(sys.argv[1])
    child = await Child.spawn(
        "engine",
        python(POLITE, "engine", folder / "journal", folder / "ready"),
        env=dict(os.environ),
        log_file=folder / "engine.log",
        pids=folder,
    )
    (folder / "pid").write_text(f"{child.pid}\\n")
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_killed_supervisor_takes_its_children_with_it(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], cwd=root)
    wait_until(lambda: (tmp_path / "ready").exists() and (tmp_path / "pid").exists())
    wait_until(lambda: (tmp_path / "pid").read_text().endswith("\n"))
    child = int((tmp_path / "pid").read_text())
    assert is_alive(child)

    supervisor.kill()
    supervisor.wait()

    wait_until(lambda: not is_alive(child))
    assert "end engine" in (tmp_path / "journal").read_text()


def test_stale_processes_are_ended_and_their_records_dropped(tmp_path: Path) -> None:
    polite = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    ready = tmp_path / "ready"
    deaf = subprocess.Popen(python(DEAF, ready), start_new_session=True)
    wait_until(ready.exists)
    pids = tmp_path / "pids"
    pids.mkdir()
    for name, process in (("engine", polite), ("gateway", deaf)):
        record = {"name": name, "pid": process.pid, "identity": process_identity(process.pid)}
        (pids / f"{name}.json").write_text(json.dumps(record))

    found = end_stale(pids, deadline_s=1.0)

    assert found == [Stale("engine", polite.pid), Stale("gateway", deaf.pid)]
    assert not is_alive(polite.pid)
    assert not is_alive(deaf.pid)
    polite.wait()
    deaf.wait()
    assert list(pids.iterdir()) == []


def test_a_process_that_took_over_a_pid_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    identity = process_identity(stranger.pid)
    assert identity is not None
    record = {"name": "engine", "pid": stranger.pid, "identity": identity + "1"}
    (tmp_path / "engine.json").write_text(json.dumps(record))

    found = end_stale(tmp_path)

    try:
        assert found == []
        assert is_alive(stranger.pid)
        assert list(tmp_path.iterdir()) == []
    finally:
        kill_group(stranger.pid)
        stranger.wait()


async def test_a_child_writes_to_its_log_and_its_record_names_it(tmp_path: Path) -> None:
    log_file = tmp_path / "engine.log"
    child = await Child.spawn(
        "engine",
        python("import os; print(os.getpid(), flush=True); os.read(0, 1); print('eof')"),
        env=dict(os.environ),
        log_file=log_file,
        pids=tmp_path,
    )

    code = await child.wait()

    assert code == 0
    assert last_lines(log_file) == [str(child.pid), "eof"]
    assert log_file.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "engine.json").exists()


def test_last_lines_are_the_last_ones_and_skip_blanks(tmp_path: Path) -> None:
    log_file = tmp_path / "x.log"
    log_file.write_text("".join(f"line {number}\n\n" for number in range(40)))

    assert last_lines(log_file, 3) == ["line 37", "line 38", "line 39"]
    assert last_lines(tmp_path / "absent.log") == []
