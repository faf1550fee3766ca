"""The replica's small internal HTTP: /live, /ready, /metrics; and the watchdog behind /live.

Bound to loopback unless told otherwise; it says nothing about tenants or prompts, but metrics are
still nobody else's business. Alive means: steps make progress when there is work. A process that
accepts connections while its step loop hangs is not alive, and its supervisor should know.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import ClassVar

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from loraplex_engine.errors import ConfigError

log = structlog.get_logger(__name__)

STALL_LIMIT_S = 60.0


class Watchdog:
    """Tells progress from a hang, and leaves a dump of all stacks in the log, once per hang."""

    def __init__(self, stalled_s: Callable[[], float], *, limit_s: float = STALL_LIMIT_S) -> None:
        self._stalled_s = stalled_s
        self._limit_s = limit_s
        self._has_dumped = False

    def check(self) -> bool:
        """Whether the loop makes progress; call every second or so."""
        stalled_s = self._stalled_s()
        if stalled_s <= self._limit_s:
            self._has_dumped = False
            return True
        if not self._has_dumped:
            self._has_dumped = True
            log.critical("engine_stalled", stalled_s=round(stalled_s, 1), stacks=all_stacks())
        return False


def all_stacks() -> dict[str, list[str]]:
    """Thread name -> its stack, outermost call first, as `file:line function`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')}-{ident}": [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack(top)
        ]
        for ident, top in sys._current_frames().items()
    }


class HealthServer:
    """See the module's header.

    Args:
        port: 0 picks a free one; `port` then says which.
        live_problem, ready_problem: None when fine, else what is wrong, in a few words.

    Raises:
        ConfigError: the port is taken, or it or the host is none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        live_problem: Callable[[], str | None],
        ready_problem: Callable[[], str | None],
    ) -> None:
        class Handler(_Handler):
            checks: ClassVar = {"/live": live_problem, "/ready": ready_problem}
            metrics: ClassVar = registry

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"--metrics-port {port}: cannot listen on {host} ({error})"
            ) from error
        self.port = int(self._server.server_address[1])
        self._has_started = False
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="health-http", daemon=True
        )

    def start(self) -> None:
        """Begin to answer."""
        self._has_started = True
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        if self._has_started:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # Not HTTPServer's: that one asks the name service who we are, which can take seconds.
        TCPServer.server_bind(self)


class _Handler(BaseHTTPRequestHandler):
    checks: ClassVar[dict[str, Callable[[], str | None]]]
    metrics: ClassVar[CollectorRegistry]
    protocol_version = "HTTP/1.1"
    timeout = 10  # of a client that sends nothing

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        check = self.checks.get(path)
        if check is not None:
            problem = check()
            body = json.dumps({"status": "ok" if problem is None else problem}).encode()
            self._answer(200 if problem is None else 503, "application/json", body)
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, generate_latest(self.metrics))
        else:
            self._answer(404, "application/json", b'{"status": "not found"}')

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes every few seconds are no news."""
