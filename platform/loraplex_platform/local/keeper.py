"""A process that keeps one embedded server: starts it, watches it, and stops it when told to.

`python -m loraplex_platform.local.keeper postgres|redis DATA_DIR URL_FILE`. The servers are in sessions
of their own; the keeper is the child that the supervisor can see, signal and restart. When the supervisor
is killed, the kernel tells the keeper, which stops its server; when the keeper is killed, it tells the
server.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from loraplex_platform.local.data_dir import write_private
from loraplex_platform.local.embedded import EmbeddedServerError, start_postgres, start_redis
from loraplex_platform.local.errors import StillRunningError

HURRY_SIGNAL = signal.SIGQUIT
WATCH_INTERVAL_S = 0.25


def keep(kind: str, data_dir: Path, url_file: Path) -> int:
    """Run one server until SIGTERM or SIGINT, or SIGQUIT, which stops it at once (also midway).

    The exit code is 1 if it ended by itself.
    """
    read_fd, write_fd = os.pipe()
    hurry = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == HURRY_SIGNAL:
            hurry.set()
        os.write(write_fd, b"x")

    # Before the start: a signal while the server comes up must still lead to its stop.
    for number in (signal.SIGTERM, signal.SIGINT, HURRY_SIGNAL):
        signal.signal(number, on_signal)
    server = start_postgres(data_dir) if kind == "postgres" else start_redis(data_dir)
    try:
        write_private(url_file, {"url": server.url, "pid": server.pid})
        while True:
            told, _, _ = select.select([read_fd], [], [], WATCH_INTERVAL_S)
            if told:
                return 0
            if not server.is_running:
                return 1
    finally:
        url_file.unlink(missing_ok=True)
        server.stop(is_hurried=hurry.is_set)


def main(arguments: list[str]) -> int:
    """Parse the command line of the module's docstring."""
    kind, data_dir, url_file = arguments
    try:
        return keep(kind, Path(data_dir), Path(url_file))
    except (EmbeddedServerError, StillRunningError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
