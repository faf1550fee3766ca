"""The command line against a control API that serves on a real port.

async with commands(stand) as run:
    done = await run("retention", "--dry-run")
    assert done.code == 0, done
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from structlog.testing import capture_logs

from tests.platform.control.stand import ADMIN_KEY, Stand
from tests.platform.gateway.stand import eventually
from tests.support.command_tree import invoke


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a command."""

    code: int
    out: str
    err: str


@asynccontextmanager
async def commands(stand: Stand) -> AsyncIterator[Callable[..., Awaitable[Done]]]:
    """A function that runs `loraplex ...`, for as long as the block lasts."""
    config = uvicorn.Config(stand.app, port=0, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, "the control API serves")
    port = server.servers[0].sockets[0].getsockname()[1]
    env = {
        "LORAPLEX_CONTROL_URL": f"http://127.0.0.1:{port}",
        "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
        "COLUMNS": "300",
    }

    async def run(*arguments: str, text: str | None = None) -> Done:
        result = await asyncio.to_thread(invoke, arguments, env, text=text)
        return Done(result.exit_code, result.stdout, result.stderr)

    try:
        # The API's log goes to standard output here, where the command's answer is looked for.
        with capture_logs():
            yield run
    finally:
        server.should_exit = True
        await serving
