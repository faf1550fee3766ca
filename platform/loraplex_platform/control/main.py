"""The control API's process: `run(settings)`, or `python -m loraplex_platform.control.main`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn
from pydantic import ValidationError

from loraplex_platform.control.app import create_app
from loraplex_platform.db.migrate import SchemaMismatchError, refuse_other_schema
from loraplex_platform.logs import configure_logging
from loraplex_platform.settings import ControlSettings
from loraplex_platform.tenancy import keys
from loraplex_platform.users.schemas import NewUser

log = structlog.get_logger(__name__)

DRAIN_S = 10


class ControlStartError(Exception):
    """The process cannot start as configured; the message names the setting and the remedy."""


class _Server(uvicorn.Server):
    """uvicorn, but a signal only drains: `run` then returns an exit status of its own."""

    def __init__(self, config: uvicorn.Config, port: int, port_file: Path | None) -> None:
        super().__init__(config)
        self._port = port
        self._port_file = port_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        # What stands until the end is never walked through again: half a second of nobody's answers each time.
        gc.collect()
        gc.freeze()
        if self._port_file is not None:
            await asyncio.to_thread(_write_port, self._port_file, self._port)
        log.info("control_ready", host=self.config.host, port=self._port)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _drain(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def run(settings: ControlSettings, *, port_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT, drain, and return an exit status.

    Args:
        settings: of this process; port 0 takes a free one.
        port_file: where to write the real port once requests are answered.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        _check(settings)
        refuse_other_schema(settings)
        listener = _listen(settings.control_host, settings.control_port)
    except (ControlStartError, SchemaMismatchError) as error:
        log.error("control_cannot_start", reason=str(error))
        return 2
    port = listener.getsockname()[1]
    app = create_app(settings)
    # Why it cannot start is said in a line by then; the server would add a traceback.
    logging.getLogger("uvicorn.error").addFilter(lambda _: not hasattr(app.state, "has_told_why"))
    config = uvicorn.Config(
        app,
        host=settings.control_host,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=DRAIN_S,
        lifespan="on",
    )
    server = _Server(config, port, port_file)
    with listener:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except SystemExit:  # the server's own, where the app cannot start
            return 2
    log.info("control_stopped")
    return 0


def _check(settings: ControlSettings) -> None:
    try:
        kind = keys.parse(settings.admin_key.get_secret_value()).kind
    except keys.MalformedKeyError as error:
        raise ControlStartError(
            f"LORAPLEX_ADMIN_KEY: {error}. An admin key is lpx_ak_... with its checksum, whole."
        ) from None
    if kind != "ak":
        raise ControlStartError("LORAPLEX_ADMIN_KEY: this is a tenant's key; it must be lpx_ak_...")
    _check_admin_user(settings)


def _check_admin_user(settings: ControlSettings) -> None:
    email, password = settings.admin_email, settings.admin_password
    if email is None and password is None:
        return
    if email is None or password is None:
        raise ControlStartError(
            "LORAPLEX_ADMIN_EMAIL and LORAPLEX_ADMIN_PASSWORD: set both or neither."
        )
    try:
        NewUser(email=email, password=password.get_secret_value(), role="admin")
    except ValidationError as error:
        # Not the error itself: it quotes what was given.
        faults = "; ".join(
            f"LORAPLEX_ADMIN_{str(fault['loc'][0]).upper()}: {fault['msg']}"
            for fault in error.errors(include_input=False)
        )
        raise ControlStartError(faults) from None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
        # asyncio sets it only where it can tell that a socket is TCP's, which it cannot of these: without it
        # an answer's body waits for its head to be acknowledged, 40 ms on a connection that is kept.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ControlStartError(
            f"LORAPLEX_CONTROL_HOST/PORT: cannot listen on {host}:{port} ({error.strerror}); "
            "choose another port, or 0 for a free one."
        ) from error


def _write_port(path: Path, port: int) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n", encoding="ascii")
    os.replace(partial, path)


def main(argv: list[str] | None = None) -> int:
    """Settings from the environment, the port file from the command line."""
    parser = argparse.ArgumentParser(description="Serve the control API.")
    parser.add_argument("--port-file", type=Path, help="write the real port here once ready")
    arguments = parser.parse_args(argv)
    settings = ControlSettings()  # type: ignore[call-arg]  # filled from the environment
    return run(settings, port_file=arguments.port_file)


if __name__ == "__main__":
    sys.exit(main())
