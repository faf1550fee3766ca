"""The worker process: run the loops until SIGTERM or SIGINT; /live and /metrics on a small port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from loraplex_platform.db.migrate import SchemaMismatchError, wait_until_current
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.gateway.tokenization import ModelFolderError
from loraplex_platform.logs import configure_logging
from loraplex_platform.settings import WorkerSettings
from loraplex_platform.worker.app import Worker, open_worker

log = structlog.get_logger(__name__)

PATIENCE_S = 30.0  # for a database that is still starting


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(settings: WorkerSettings, *, port_file: Path | None = None) -> int:
    """Work until SIGTERM or SIGINT; the process's exit code, 2 when it cannot start."""
    configure_logging(settings.log_level, settings.log_format)
    try:
        wait_until_current(settings, patience_s=PATIENCE_S)
        with socket.create_server((settings.worker_host, settings.worker_port)) as listener:
            asyncio.run(serve(settings, listener, port_file=port_file))
    except (
        SchemaMismatchError,
        DatabaseUnavailableError,
        ModelFolderError,
        OSError,
    ) as error:
        log.error("worker_cannot_start", reason=str(error))
        return 2
    log.info("worker_stopped")
    return 0


async def serve(
    settings: WorkerSettings, listener: socket.socket, *, port_file: Path | None = None
) -> None:
    """`run` on the running loop, with a socket that listens."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with open_worker(settings) as worker:
        server = _Server(
            uvicorn.Config(
                create_app(worker),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        log.info("worker_ready", host=settings.worker_host, port=port)
        if port_file is not None:
            await asyncio.to_thread(_publish_port, port_file, port)
        await stopping.wait()
        server.should_exit = True
        await serving


def create_app(worker: Worker) -> FastAPI:
    """Internal endpoints; nothing here is for tenants."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/live")
    async def live(response: Response) -> dict[str, Any]:
        stuck = worker.stuck
        response.status_code = 503 if stuck else 200
        return {"status": "stuck" if stuck else "ok", "stuck": stuck}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(worker.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _publish_port(path: Path, port: int) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(f"{port}\n", encoding="ascii")
    partial.replace(path)
