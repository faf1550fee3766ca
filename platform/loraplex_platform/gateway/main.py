"""The gateway process: listen, serve, and on SIGTERM or SIGINT drain.

Draining: not ready, new requests get 503 with `Retry-After`, running ones get `drain_grace_s` to
finish, then they are ended (their streams with an error frame) and settled. A second signal skips
the grace. What rollouts want of answers is given up at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn
import uvloop
from starlette.types import ASGIApp

from loraplex_platform.db.migrate import SchemaMismatchError, refuse_other_schema
from loraplex_platform.gateway.app import create_app, open_gateway
from loraplex_platform.gateway.context import Gateway
from loraplex_platform.gateway.failpoints import FailpointError
from loraplex_platform.gateway.http_protocol import BoundedHttpProtocol
from loraplex_platform.gateway.spool import SpoolFolderError
from loraplex_platform.gateway.tokenization import ModelFolderError
from loraplex_platform.logs import configure_logging
from loraplex_platform.settings import GatewaySettings

log = structlog.get_logger(__name__)

_BACKLOG = 2048
# A request makes thousands of objects and leaves no cycle. What is there to be looked through are the requests
# under way, in a pause that all of them feel: 300 objects each, so with 32 side by side this is not reached.
_GC_THRESHOLDS = (20_000, 10, 10)
_CLOSE_S = 5  # for the last bytes to reach their clients


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: ours drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`."""
        yield


def run(settings: GatewaySettings, *, port_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code."""
    configure_logging(settings.log_level, settings.log_format)
    try:
        refuse_other_schema(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(settings, port_file=port_file))
    except (ModelFolderError, SchemaMismatchError, SpoolFolderError, FailpointError) as error:
        log.error("gateway_cannot_start", reason=str(error))
        return 2
    except OSError as error:
        log.error("gateway_cannot_listen", reason=str(error))
        return 2


async def serve(settings: GatewaySettings, *, port_file: Path | None = None) -> int:
    """`run` on the running loop."""
    listener = listen(settings.gateway_host, settings.gateway_port)
    with listener:
        async with open_gateway(settings) as gateway:
            server = make_server(create_app(gateway))
            _settle_heap()
            stopping, hurrying = asyncio.Event(), asyncio.Event()

            def on_signal() -> None:
                (hurrying if stopping.is_set() else stopping).set()

            loop = asyncio.get_running_loop()
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, on_signal)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            host, port = listener.getsockname()[:2]
            log.info("gateway_listening", host=host, port=port, gateway_id=gateway.gateway_id)
            if port_file is not None:
                _publish_port(port_file, port)
            waiting = asyncio.create_task(stopping.wait())
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await _drain(gateway, settings.drain_grace_s, hurrying)
            server.should_exit = True
            await serving
    log.info("gateway_stopped")
    return 0


def _settle_heap() -> None:
    """What is there now stays: modules, schemas, tokenizer. Looking through all of it again takes a quarter
    of a second, in which every request waits."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def make_server(app: ASGIApp) -> Server:
    """uvicorn as a gateway runs it, on the running loop."""
    return Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSE_S,
        )
    )


async def _drain(gateway: Gateway, grace_s: float, hurrying: asyncio.Event) -> None:
    """Let running requests finish while new ones hear 503; then end what is left."""
    gateway.is_draining = True
    log.info("gateway_draining", in_flight=gateway.pumps.num_live, grace_s=grace_s)
    await gateway.copying.close()
    finishing = asyncio.create_task(gateway.pumps.wait(grace_s))
    hurry = asyncio.create_task(hurrying.wait())
    await asyncio.wait({finishing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (finishing, hurry):
        task.cancel()
    await gateway.pumps.drain(0.0, gateway.draining_error())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _publish_port(path: Path, port: int) -> None:
    """Write the real port; the rename makes it appear whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"{port}\n")
    temporary.replace(path)
