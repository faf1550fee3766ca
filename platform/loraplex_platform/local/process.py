"""One child process: started so that it cannot outlive us, recorded so that it can be found, ended for sure.

Three things keep a killed supervisor from leaving anything behind: the kernel signals the children when
it dies (`exec_guard.py`), each child's pid is on disk with what proves that it is still the same process,
and the next start ends what is left of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from loraplex_platform.local.data_dir import read_json, write_private

GUARD = Path(__file__).with_name("exec_guard.py")
STALE_TERM_DEADLINE_S = 5.0


Ending = Literal["in order", "at once", "killed"]


@dataclass(frozen=True, slots=True)
class Stale:
    """A process of an earlier run that was still there."""

    name: str
    pid: int


class Child:
    """A running child and its record."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, record: Path) -> None:
        self.name = name
        self._process = process
        self._record = record

    @classmethod
    async def spawn(
        cls,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_file: Path,
        pids: Path,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> Child:
        """Start `command` in a session of its own, its output appended to `log_file`.

        Must be called from the main thread: the kernel's signal follows the *thread* that forked.

        Raises:
            OSError: it could not be started at all.
        """
        guarded = [
            sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(int(death_signal)), "--",
            *command,
        ]  # fmt: skip
        log_fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *guarded,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                # A Ctrl-C in the terminal goes to the foreground group: ours alone, which then drains
                # the children in order.
                start_new_session=True,
                umask=0o077,
            )
        finally:
            os.close(log_fd)
        record = pids / f"{name}.json"
        identity = process_identity(process.pid)
        if identity is not None:
            write_private(record, {"name": name, "pid": process.pid, "identity": identity})
        return cls(name, process, record)

    @property
    def pid(self) -> int:
        """The process's id; it is also its session's and group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end, then end whatever it left in its group and drop the record."""
        code = await self._process.wait()
        kill_group(self.pid)
        self._record.unlink(missing_ok=True)
        return code

    async def stop(
        self,
        stop_signal: signal.Signals,
        deadline_s: float,
        hurry: asyncio.Event,
        *,
        hurry_signal: signal.Signals = signal.SIGKILL,
        hurry_deadline_s: float = 0.0,
    ) -> Ending:
        """Ask it to end; kill it at the deadline.

        As soon as `hurry` is set it gets `hurry_signal` instead, and is killed `hurry_deadline_s` later.
        """
        if self._process.returncode is not None:
            await self.wait()
            return "in order"
        ended = asyncio.ensure_future(self.wait())
        if not hurry.is_set():
            self._process.send_signal(stop_signal)
            hurried = asyncio.ensure_future(hurry.wait())
            await asyncio.wait(
                {ended, hurried}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            hurried.cancel()
            if ended.done():
                await ended
                return "in order"
        if hurry.is_set() and hurry_signal != signal.SIGKILL:
            if self._process.returncode is None:
                self._process.send_signal(hurry_signal)
            await asyncio.wait({ended}, timeout=hurry_deadline_s)
            if ended.done():
                await ended
                return "at once"
        kill_group(self.pid)
        await ended
        return "killed"


def end_stale(pids: Path, deadline_s: float = STALE_TERM_DEADLINE_S) -> list[Stale]:
    """End the recorded processes of an earlier run that still live; returns them. Blocks for seconds.

    A pid is believed only with the recorded boot and start time: pids are used again.
    """
    found: list[tuple[Stale, psutil.Process]] = []
    for record in sorted(pids.glob("*.json")):
        content = read_json(record) or {}
        pid, identity = content.get("pid"), content.get("identity")
        if isinstance(pid, int) and identity and process_identity(pid) == identity:
            found.append((Stale(str(content.get("name")), pid), psutil.Process(pid)))
        record.unlink(missing_ok=True)
    processes = [process for _, process in found]
    for process in processes:
        _signal(process.pid, signal.SIGTERM)
    psutil.wait_procs(processes, timeout=deadline_s)
    for process in processes:
        kill_group(process.pid)
    psutil.wait_procs(processes, timeout=deadline_s)
    return [stale for stale, _ in found]


def kill_group(pid: int) -> None:
    """SIGKILL to every process of the group that `pid` leads (or led)."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError:
        # Only processes of another user are left in the group: never ours to end.
        return


def last_lines(log_file: Path, count: int = 15) -> list[str]:
    """The end of a log, for a message about why its writer failed."""
    try:
        with log_file.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if line.strip()][-count:]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def process_identity(pid: int) -> str | None:
    """What no other process ever has: boot and start time of `pid`; None if it does not run.

    Not the command line: it changes when a process execs, which ours all do.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return f"{process.create_time():.2f}"
        # Ticks since boot: unlike psutil's figure, not moved by a clock that is set right.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
    return f"{boot}:{after_name[19]}"
