"""The process of an embedded server: it ends with whoever started it, and is ended for sure.

It has a session of its own, so neither a Ctrl-C in our terminal nor the end of our process group reaches
it. When its starter dies, however that comes, the kernel sends it its stop signal (Linux; elsewhere
`embedded.end_server` finds it).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import structlog

from loraplex_platform.local.errors import StillRunningError
from loraplex_platform.local.exec_guard import death_request

log = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 10.0


def never() -> bool:
    """Nobody is in a hurry."""
    return False


@dataclass(slots=True)
class EmbeddedServer:
    """A running server. `url` reaches it; `stop` ends it in order and is idempotent."""

    name: str
    url: str
    pid: int
    socket_path: Path
    stop_signal: signal.Signals
    kill_signal: signal.Signals  # its quickest end that loses nothing it has promised to keep
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)  # None: not our child

    @property
    def is_running(self) -> bool:
        """Whether the server's process is still there."""
        if self.process is not None:
            return self.process.poll() is None
        return is_alive(self.pid)

    def stop(
        self, timeout_s: float = STOP_TIMEOUT_S, is_hurried: Callable[[], bool] = never
    ) -> None:
        """End the server: in order first, by force when it does not end in `timeout_s` seconds.

        `is_hurried` is asked all the while: as soon as it says so, force it is.

        Raises:
            StillRunningError: not even SIGKILL ended it.
        """
        if not is_hurried():
            self._end_by(self.stop_signal, timeout_s, is_hurried)
        self._end_by(self.kill_signal, KILL_TIMEOUT_S)
        # The server alone: Postgres's other processes notice that it is gone and end by themselves.
        self._end_by(signal.SIGKILL, KILL_TIMEOUT_S)
        if self.is_running:
            raise StillRunningError(self.name, self.pid)
        self.socket_path.unlink(missing_ok=True)
        log.info("embedded_server_stopped", server=self.name, pid=self.pid)

    def _end_by(
        self, number: signal.Signals, timeout_s: float, is_hurried: Callable[[], bool] = never
    ) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.02)


def spawn(
    command: list[str],
    folder: Path,
    owner: pwd.struct_passwd | None,
    death_signal: signal.Signals,
) -> subprocess.Popen[bytes]:
    """Start a program as `owner` (None: as ourselves), its output appended to `folder`/server.log.

    It gets `death_signal` when we die.
    """
    # The kernel's signal follows the thread that forked.
    assert threading.current_thread() is threading.main_thread()  # noqa: S101
    with (folder / "server.log").open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            start_new_session=True,
            umask=0o077,
            user=owner.pw_uid if owner else None,
            group=owner.pw_gid if owner else None,
            extra_groups=[] if owner else None,
            # Not through exec_guard.py: `owner` may not be allowed to run our Python.
            preexec_fn=death_request(os.getpid(), death_signal),  # noqa: PLW1509
        )


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
