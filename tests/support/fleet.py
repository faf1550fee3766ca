"""A real fleet: `loraplex up` as a process of its own, on free ports and a data directory of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from loraplex_platform.admin_client import AdminClient
from loraplex_platform.local.process import GUARD

from tests.support.processes import is_alive, wait_until

# Generous: several fleets may start side by side on a busy machine. Nothing waits that long in vain.
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 60.0
QUIET_DEADLINE_S = 60.0


class Fleet:
    """One `loraplex up`."""

    def __init__(
        self, data_dir: Path, *flags: str, environment: dict[str, str] | None = None
    ) -> None:
        self.data_dir = data_dir
        self._flags = flags
        self._environment = environment or {}
        self.process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self.state: dict[str, Any] = {}

    @property
    def command(self) -> list[str]:
        """What starts it."""
        return [
            *(sys.executable, "-m", "loraplex_platform.cli", "up"),
            *("--data-dir", str(self.data_dir), "--no-console"),
            *("--gateway-port", "0", "--control-port", "0", *self._flags),
        ]

    @property
    def output_file(self) -> Path:
        """What it has printed, all starts together."""
        return self.data_dir.with_name(f"{self.data_dir.name}.out")

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.output_file.read_text()

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        assert self.process is not None
        return self.process.pid

    @property
    def demo(self) -> dict[str, Any]:
        """demo.json."""
        content: dict[str, Any] = json.loads((self.data_dir / "demo.json").read_text())
        return content

    def start(self) -> float:
        """Start and wait until all is ready; the seconds that took."""
        started = time.monotonic()
        self._num_starts += 1
        names = [name for name in os.environ if name.startswith("LORAPLEX_")]
        inherited = {k: v for k, v in os.environ.items() if k not in names}
        kept = {k: os.environ[k] for k in names if k == "LORAPLEX_CACHE_DIR"}
        with self.output_file.open("ab") as output:
            # A test run that is killed takes its fleets with it.
            guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), "15", "--"]
            self.process = subprocess.Popen(
                [*guard, *self.command],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**inherited, **kept, **self._environment},
            )
        process = self.process

        def is_up_or_over() -> bool:
            return process.poll() is not None or self._has_started()

        wait_until(is_up_or_over, deadline_s=START_DEADLINE_S)
        assert process.poll() is None, self.output
        return time.monotonic() - started

    def _has_started(self) -> bool:
        try:
            self.state = json.loads((self.data_dir / "state.json").read_text())
        except FileNotFoundError:
            return False
        is_told = self.output.count("Ctrl-C stops everything") == self._num_starts
        return self.state["pid"] == self.pid and is_told

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(STOP_DEADLINE_S)

    def service_pid(self, name: str) -> int | None:
        """The pid of a service that runs now."""
        try:
            record = json.loads((self.data_dir / "run" / "pids" / f"{name}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return int(record["pid"]) if is_alive(record["pid"]) else None

    def kill(self, name: str) -> int:
        """kill -9 of one service; the pid that it had."""
        pid = self.service_pid(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def processes(self) -> list[psutil.Process]:
        """Every process that has to do with this data directory, however it was started."""
        found = []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), process.cwd()]
                words += [f"{k}={v}" for k, v in process.environ().items() if k[:9] == "LORAPLEX_"]
            except psutil.Error:
                continue
            if any(str(self.data_dir) in word for word in words) and process.pid != os.getpid():
                found.append(process)
        return found

    @property
    def gateway_url(self) -> str:
        """Of the OpenAI API, without /v1."""
        return str(self.state["gateway_url"])

    @property
    def admin_key(self) -> str:
        """From secrets.json."""
        content = json.loads((self.data_dir / "secrets.json").read_text())
        return str(content["admin_key"])

    @contextmanager
    def admin(self) -> Iterator[AdminClient]:
        """A client of its control API."""
        with AdminClient(self.state["control_url"], self.admin_key) as client:
            yield client

    def engine_stats(self) -> dict[str, Any]:
        """Of its one engine, fresh; one that has just started, or is in a long step, is asked again."""
        found: list[dict[str, Any]] = []

        def has_answered() -> bool:
            with self.admin() as admin:
                stats = admin.fleet()["replicas"][0]["stats"]
            found.extend([stats] if stats is not None else [])
            return bool(found)

        wait_until(has_answered, interval_s=0.1)
        return found[0]

    def request(self, request_id: str) -> dict[str, Any]:
        """A recent request (`x-request-id`) as the request log shows it."""
        answer = httpx.get(
            f"{self.state['control_url']}/admin/v1/requests?limit=100",
            headers={"authorization": f"Bearer {self.admin_key}"},
        )
        found = [row for row in answer.raise_for_status().json()["data"] if row["id"] == request_id]
        assert len(found) == 1, answer.text
        row: dict[str, Any] = found[0]
        return row

    def charges(self, tenant_id: str) -> list[dict[str, Any]]:
        """What the tenant has been charged so far, by model."""
        with self.admin() as admin:
            now = int(time.time())
            rows = admin.usage(now - 86_400, now + 86_400, ["tenant_id", "model"])
        shown = ("model", "start_time", "completion_tokens", "cost_usd")
        charged = [row for row in rows if row["tenant_id"] == tenant_id and float(row["cost_usd"])]
        return [{k: row[k] for k in shown} for row in charged]

    def check_books(self) -> dict[str, Any]:
        """Wait until every request is settled and landed; all invariants must hold then."""
        report: dict[str, Any] = {}

        def is_quiet() -> bool:
            with self.admin() as admin:
                report.update(admin.invariants())
            identity = report["identity"]
            return not identity["pending_requests"] and not identity["unlanded"]

        wait_until(is_quiet, deadline_s=QUIET_DEADLINE_S)
        assert report["identity"]["difference"] == 0, report
        assert report["ok"], [check for check in report["checks"] if not check["ok"]]
        return report


def kill_leftovers(fleet: Fleet) -> None:
    """For the end of a test that failed half-way."""
    if fleet.process is not None and fleet.process.poll() is None:
        fleet.process.kill()
        fleet.process.wait()
    for process in fleet.processes():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
