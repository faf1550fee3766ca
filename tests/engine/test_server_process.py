"""The engine as a process: killed, hung, told to stop, orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from loraplex_engine.client import EngineClient, EngineLostError
from loraplex_engine.journal import Journal

from tests.support.fake_replica import HANG_ID
from tests.support.replicas import DEADLINE_S, eventually, make_request, read_all


@asynccontextmanager
async def spawn_replica(folder: Path, *flags: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "tests.support.fake_replica", "--step-s", "0.005", "--"),
        *("--address", f"ipc://{folder}/e.sock", "--journal-dir", f"{folder}/journal"),
        *flags,
    ]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)  # noqa: ASYNC220 - short
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def test_blas_threads_are_bounded_before_numpy_is_loaded() -> None:
    code = (
        "import os, sys, loraplex_engine.server_cli as cli\n"
        "cli.read_options = lambda *a: sys.exit('numpy' in sys.modules)\n"
        "try: cli.main([])\n"
        "finally: print(os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}

    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


async def test_kill_9_in_mid_stream_then_restart(folder: Path) -> None:
    async with EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client:
        async with spawn_replica(folder) as process:
            await client.connect(DEADLINE_S)
            await eventually(lambda: client.is_ready)
            _, done = await read_all(await client.generate(make_request("done", max_tokens=9)))
            stream = await client.generate(make_request("cut", max_tokens=1900))
            await anext(stream)

            process.send_signal(signal.SIGKILL)

            with pytest.raises(EngineLostError):
                await read_all(stream)
        (segment,) = (folder / "journal").glob("*.log")
        with segment.open("ab") as file:
            file.write(b"\x40\x00\x00\x00 torn")

        async with spawn_replica(folder):
            await client.connect(DEADLINE_S)
            await eventually(lambda: client.is_ready)
            reply = await client.query_usage("done", 1)
            lost = await client.query_usage("cut", 1)
            token_ids, _ = await read_all(await client.generate(make_request("cut", attempt=2)))
            page = await client.read_journal(0)

    assert reply.entry is not None
    assert reply.entry.usage == done.usage
    assert lost.state == "unknown"
    assert token_ids == list(range(13, 21))
    assert [entry.seq for entry in page.entries] == [1, 2]


async def test_a_step_that_hangs_for_good_ends_the_process(folder: Path) -> None:
    async with (
        spawn_replica(folder, "--stall-limit-s", "1") as process,
        EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client,
    ):
        await client.connect(DEADLINE_S)
        await eventually(lambda: client.is_ready)
        stream = await client.generate(make_request(prompt=[HANG_ID]))

        await eventually(lambda: not client.is_ready)
        assert client.welcome is not None  # it says so itself, before its end
        _, last = await read_all(stream)

        assert (last.finish_reason, last.error_code) == ("error", "internal_error")
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 70
    journal = Journal(folder / "journal")
    assert journal.find("r1", 1) is not None
    journal.close()


async def test_sigterm_drains_and_exits_0(folder: Path) -> None:
    async with (
        spawn_replica(folder, "--drain-grace-s", "20") as process,
        EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client,
    ):
        await client.connect(DEADLINE_S)
        await eventually(lambda: client.is_ready)
        stream = await client.generate(make_request(max_tokens=30))

        process.send_signal(signal.SIGTERM)
        _, last = await read_all(stream)

        assert last.finish_reason == "length"
        assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
    assert '"event": "engine_stopped"' in (folder / "log").read_text()


async def test_kill_9_of_the_supervisor_leaves_no_engine(folder: Path) -> None:
    launcher = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()\n"
    )
    command = [
        *(sys.executable, "-c", launcher, sys.executable, "-m", "tests.support.fake_replica"),
        *("--step-s", "0.005", "--", "--address", f"ipc://{folder}/e.sock"),
        *("--journal-dir", f"{folder}/journal", "--die-with-parent", "--drain-grace-s", "60"),
    ]
    with (folder / "log").open("wb") as log:
        supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: ASYNC220 - short
    assert supervisor.stdout is not None
    pid = int(await asyncio.to_thread(supervisor.stdout.readline))
    async with EngineClient(f"ipc://{folder}/e.sock", gateway_id="g") as client:
        await client.connect(DEADLINE_S)
        await eventually(lambda: client.is_ready)
        await client.generate(make_request(max_tokens=1900))

        supervisor.kill()
        await asyncio.to_thread(supervisor.wait)
        supervisor.stdout.close()

        await eventually(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid))
    journal = Journal(folder / "journal")  # its lock is free and its usage is there
    entry = journal.find("r1", 1)
    journal.close()
    assert entry is not None
    assert entry.finish_reason == "error"


def is_zombie(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True
