"""However `loraplex up` ends, its Postgres, its Redis and all its other children end too.

The real command on a real terminal or pipe; the engine, gateway and so on are one small process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis

from tests.support.processes import DEAF, POLITE, is_alive, python, wait_until

# `loraplex up` with embedded servers and one process that uses them.
UP = """
import dataclasses, fcntl, json, os, sys, termios
from loraplex_platform.cli import app
from loraplex_platform.local import up
from loraplex_platform.local.services import Fleet
from loraplex_platform.local.supervisor import Service

given = json.loads(sys.argv[1])
if given["is_terminal"]:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

class SmallFleet(Fleet):
    def services(self):
        servers = [
            dataclasses.replace(s, hurry_deadline_s=given["hurry_deadline_s"] or s.hurry_deadline_s)
            for s in super().services() if s.name in ("postgres", "redis")]
        async def is_ready():
            return os.path.exists(given["ready"])
        return [*servers, Service(
            name="serving", command=lambda: given["command"], env=lambda: dict(os.environ),
            is_ready=is_ready, after=("postgres", "redis"), stop_deadline_s=1000.0)]

up.Fleet = SmallFleet
app(["up", *sys.argv[2:]])
"""
END_DEADLINE_S = 60.0  # generous: nothing waits that long in vain


@dataclass
class Up:
    """One `loraplex up` that is ready, its servers in use."""

    process: subprocess.Popen[bytes]
    reading: int  # the other end of its output
    data_dir: Path
    shown: bytes = b""
    children: dict[str, int] = field(default_factory=dict)
    servers: dict[str, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)  # of everything below it

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        folder: Path,
        *,
        is_deaf: bool = False,
        is_terminal: bool = False,
        hurry_deadline_s: float | None = None,
    ) -> Iterator[Up]:
        """Start it; `is_deaf`: what serves does not end when told to."""
        data_dir, ready = folder / "data", folder / "ready"
        ready.unlink(missing_ok=True)
        serving = (
            python(DEAF, ready) if is_deaf else python(POLITE, "serving", folder / "journal", ready)
        )
        given = {
            "command": serving,
            "ready": str(ready),
            "is_terminal": is_terminal,
            "hurry_deadline_s": hurry_deadline_s,
        }
        command = [
            *(sys.executable, "-c", UP, json.dumps(given), "--data-dir", str(data_dir)),
            *("--model", str(folder / "model"), "--no-console"),
            *("--gateway-port", "0", "--control-port", "0"),
        ]
        reading, writing = pty.openpty() if is_terminal else os.pipe()
        process = subprocess.Popen(
            command, stdin=writing, stdout=writing, stderr=writing, start_new_session=True
        )
        os.close(writing)
        up = cls(process, reading, data_dir)
        try:
            wait_until(up._has_started, deadline_s=END_DEADLINE_S)
            with up._in_use():
                yield up
        finally:
            up.hang_up()
            for pid in [process.pid, *up.servers.values(), *up.pids]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def hang_up(self) -> None:
        """Close the terminal, or the pipe."""
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1

    def wait(self) -> int:
        """Its exit code; what it showed is in `shown` then."""

        def has_ended() -> bool:
            self._read()
            return self.process.poll() is not None

        wait_until(has_ended, deadline_s=END_DEADLINE_S)
        self._read()
        assert self.process.returncode is not None
        return self.process.returncode

    def tell(self, number: signal.Signals) -> None:
        """Signal it, and wait until it has heard."""
        self.process.send_signal(number)
        wait_until(lambda: self.has_shown("Stopping"), deadline_s=END_DEADLINE_S)

    def has_shown(self, text: str) -> bool:
        """Whether that is in its output by now."""
        self._read()
        return text in self.shown.decode()

    def living(self) -> set[int]:
        """Those of its processes that are still there."""
        return {pid for pid in self.pids if is_alive(pid)}

    def _read(self) -> None:
        while self.reading >= 0 and select.select([self.reading], [], [], 0)[0]:
            try:
                read = os.read(self.reading, 65536)
            except OSError:  # the terminal's last user has gone
                return
            if not read:
                return
            self.shown += read

    def _has_started(self) -> bool:
        assert self.process.poll() is None, self.shown.decode()
        try:
            state = json.loads((self.data_dir / "state.json").read_text())
        except FileNotFoundError:
            return False
        return state["pid"] == self.process.pid and self.has_shown("Ctrl-C stops")

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """A transaction and a connection are open, as they are when a fleet is killed."""
        run = self.data_dir / "run"
        for name in ("postgres", "redis", "serving"):
            self.children[name] = _content(run / "pids" / f"{name}.json")["pid"]
        for name in ("postgres", "redis"):
            self.servers[name] = _content(run / f"{name}.json")["pid"]
        connection = psycopg.connect(_content(run / "postgres.json")["url"])
        client = redis.Redis.from_url(_content(run / "redis.json")["url"])
        try:
            connection.execute("create temp table t (n int)")
            client.ping()
            self.pids = {p.pid for p in psutil.Process(self.process.pid).children(recursive=True)}
            assert {*self.children.values(), *self.servers.values()} <= self.pids
            assert len(self.pids) > 8  # Postgres's own processes among them
            yield
        finally:
            client.close()
            connection.close()


def _content(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture(scope="module")
def folder(session_folder: Path) -> Path:
    """One data directory for all tests here: making a cluster takes longer than a test."""
    folder = session_folder / "endings"
    (folder / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_in_order(folder: Path, number: signal.Signals) -> None:
    with Up.running(folder) as up:
        up.tell(number)

        assert up.wait() == 0, up.shown.decode()
        assert up.living() == set()
        for name in ("serving", "postgres", "redis"):
            assert f"{name:<9} stopped\n" in up.shown.decode()
        assert "database system is shut down" in (folder / "data/postgres/server.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_everything_at_once(folder: Path, number: signal.Signals) -> None:
    with Up.running(folder, is_deaf=True) as up:
        up.tell(signal.SIGINT)
        assert is_alive(
            up.children["serving"]
        )  # it would hold the stop up for a quarter of an hour
        up.process.send_signal(number)

        assert up.wait() == 0, up.shown.decode()
        assert up.living() == set()
        shown = up.shown.decode()
        assert "serving   stopped (had to be killed)\n" in shown
        assert "postgres  stopped (at once)\n" in shown
        assert "redis     stopped (at once)\n" in shown


def test_servers_end_although_their_keepers_have_to_be_killed(folder: Path) -> None:
    with Up.running(folder, is_deaf=True, hurry_deadline_s=0.5) as up:
        for name in ("postgres", "redis"):
            os.kill(up.children[name], signal.SIGSTOP)  # deaf to all but SIGKILL
        up.tell(signal.SIGINT)
        up.process.send_signal(signal.SIGINT)

        assert up.wait() == 0, up.shown.decode()
        assert up.living() == set()
        shown = up.shown.decode()
        assert "postgres  stopped (had to be killed)\n" in shown
        assert "redis     stopped (had to be killed)\n" in shown


def test_a_closed_terminal_ends_everything(folder: Path) -> None:
    with Up.running(folder, is_terminal=True) as up:
        up.hang_up()

        assert up.wait() == 0
        assert up.living() == set()


def test_a_reader_that_is_gone_is_no_obstacle_to_a_stop(folder: Path) -> None:
    with Up.running(folder) as up:
        up.hang_up()  # as with `| tee`, which a Ctrl-C ends as well
        up.process.send_signal(signal.SIGINT)

        assert up.wait() == 0
        assert up.living() == set()


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
@pytest.mark.parametrize("with_keepers", [False, True])
def test_kill_9_ends_everything(folder: Path, *, with_keepers: bool) -> None:
    with Up.running(folder) as up:
        if with_keepers:
            # Stopped first, so that none can restart or stop anything in between.
            os.kill(up.process.pid, signal.SIGSTOP)
            for name in ("postgres", "redis"):
                os.kill(up.children[name], signal.SIGKILL)
        up.process.kill()

        wait_until(lambda: not up.living(), deadline_s=END_DEADLINE_S)


def test_a_killed_keeper_is_back_with_a_server_of_its_own(folder: Path) -> None:
    with Up.running(folder) as up:
        before = dict(up.servers)
        os.kill(up.children["postgres"], signal.SIGKILL)
        record = up.data_dir / "run" / "postgres.json"

        def is_back() -> bool:
            return record.exists() and _content(record)["pid"] != before["postgres"]

        wait_until(is_back, deadline_s=END_DEADLINE_S)
        up.pids.add(_content(record)["pid"])
        assert not is_alive(before["postgres"])
        with psycopg.connect(_content(record)["url"]) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
        up.tell(signal.SIGTERM)
        assert up.wait() == 0, up.shown.decode()
        assert up.living() == set()


def test_nohup_lets_a_terminal_go(folder: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Up.running(folder) as up:
            up.process.send_signal(signal.SIGHUP)
            with pytest.raises(AssertionError, match="in time"):  # half a second is ample to begin
                wait_until(lambda: up.has_shown("Stopping"), deadline_s=0.5)
            up.tell(signal.SIGTERM)
            assert up.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before)
