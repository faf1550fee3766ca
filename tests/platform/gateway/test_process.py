"""The gateway as a process of its own: port file, drain on SIGTERM, no torch, short pauses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from loraplex_platform.db.session import open_database

from tests.platform.gateway import tiny_model
from tests.platform.gateway.gateway_process import gateway_process
from tests.platform.gateway.stand import (
    BASE,
    add_base,
    announce,
    check_invariants,
    deploy,
    says,
)
from tests.support.fake_engine import FakeEngine
from tests.support.metering import Customer, add_customer
from tests.support.postgres import database_settings, serving_url


@dataclass
class _Process:
    url: str
    pid: int
    process: asyncio.subprocess.Process
    engine: FakeEngine
    customer: Customer


@asynccontextmanager
async def _running(
    db_url: str, redis_url: str, folder: Path, *, drain_grace_s: float
) -> AsyncIterator[_Process]:
    async with (
        open_database(database_settings(serving_url(db_url))) as db,
        FakeEngine(folder, max_model_len=tiny_model.CONTEXT_LENGTH, vocab_size=400) as engine,
    ):
        customer = await add_customer(db)
        await deploy(db, await add_base(db), None, BASE)
        announce(redis_url, engine)
        starting = gateway_process(db_url, redis_url, folder / "gw", drain_grace_s=drain_grace_s)
        async with starting as gateway:
            yield _Process(gateway.url, gateway.pid, gateway.process, engine, customer)
            await check_invariants(db, engine)


async def _frames(process: _Process, body: dict[str, object]) -> AsyncIterator[str]:
    headers = {"authorization": f"Bearer {process.customer.secret}"}
    async with (
        httpx.AsyncClient(base_url=process.url, headers=headers, timeout=30) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line:
                yield line


_BODY: dict[str, object] = {
    "model": BASE,
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
    "max_tokens": 100,
}


async def test_sigterm_lets_streams_finish_and_the_process_never_loads_torch(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with _running(db_url, redis_url, short_tmp_path, drain_grace_s=30) as process:
        process.engine.script = says("a story that takes a while", token_delay_s=0.03)
        frames = _frames(process, _BODY)
        await anext(frames)
        os.kill(process.pid, signal.SIGTERM)

        rest = [frame async for frame in frames]

        assert rest[-1] == "data: [DONE]"
        output, _ = await process.process.communicate()
        assert process.process.returncode == 0
        assert b"modules []" in output
        # A full collection, in which every request waits, has little to look through.
        _, frozen, loose = output.splitlines()[-1].split()
        assert int(loose) < int(frozen) / 4


async def test_after_the_grace_streams_end_with_an_error_frame(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    async with _running(db_url, redis_url, short_tmp_path, drain_grace_s=0.1) as process:
        process.engine.script = says("a story without an end " * 4, token_delay_s=0.2)
        frames = _frames(process, _BODY)
        await anext(frames)
        os.kill(process.pid, signal.SIGTERM)

        rest = [frame async for frame in frames]

        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "draining"
        _, log = await process.process.communicate()
        assert process.process.returncode == 0
        assert process.customer.secret.encode() not in log
        assert b"hello" not in log
        assert process.engine.num_running == 0
