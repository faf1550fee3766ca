"""The gateway against the engine's real server process (its model made up): both ends of the wire.

Ends of requests are where two readings of a protocol differ, so each is run once against the real
thing, and its journal is compared with the books.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from loraplex_engine.client import EngineClient
from loraplex_platform.db import Attempt, EngineUsage
from loraplex_platform.db.session import open_database
from loraplex_platform.gateway.app import open_gateway
from loraplex_platform.metering.invariants import check_invariants
from openai import AsyncOpenAI
from sqlalchemy import select

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import (
    BASE,
    add_base,
    deploy,
    eventually,
    serving,
    settings_for,
)
from tests.support.metering import add_customer
from tests.support.postgres import database_settings, serving_url


@contextlib.asynccontextmanager
async def _engine_process(folder: Path, redis_url: str) -> AsyncIterator[str]:
    """A replica that registers itself in Redis; token i is the last one plus one."""
    address = f"ipc://{folder}/engine.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fake_replica", "--step-s", "0.01", "--"),
        *("--address", address, "--journal-dir", str(folder / "journal")),
        *("--base-model", BASE, "--replica-id", "replica-1", "--redis-url", redis_url),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_every_ending_agrees_with_the_engines_journal(
    db_url: str, redis_url: str, short_tmp_path: Path
) -> None:
    settings = settings_for(db_url, redis_url, short_tmp_path)
    async with (
        _engine_process(short_tmp_path, redis_url) as address,
        open_database(database_settings(serving_url(db_url))) as db,
        open_gateway(settings) as gateway,
        serving(gateway) as url,
    ):
        customer = await add_customer(db)
        await deploy(db, await add_base(db), None, BASE)
        await eventually(lambda: gateway.router.num_ready == 1, "the replica", deadline_s=60)
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key=customer.secret, max_retries=0, timeout=30
        ) as client:
            # "a" is followed by the tokens of the next ids: the text is known.
            [first] = tiny_model.ids_of("a")
            follows = tiny_model.reference().decode([first + 1, first + 2, first + 3])

            whole = await client.completions.create(model=BASE, prompt="a", max_tokens=3)
            assert whole.choices[0].text == follows
            assert whole.choices[0].finish_reason == "length"

            stopped = await client.completions.create(
                model=BASE, prompt="a", max_tokens=100, stop=follows[-1]
            )
            assert stopped.choices[0].text == follows[:-1]
            assert stopped.choices[0].finish_reason == "stop"
            assert stopped.usage is not None
            assert stopped.usage.completion_tokens == 3

            stream = await client.completions.create(
                model=BASE, prompt="a", max_tokens=200, stream=True
            )
            await anext(aiter(stream))
            await stream.close()
        await eventually(lambda: gateway.pumps.num_live == 0)

        await _land_journal(db, address)
        report = await check_invariants(db.sessions)
        assert report.ok, [check for check in report.checks if not check.ok]
        assert report.identity.unlanded == 0
        async with db.sessions() as session:
            attempts = (await session.scalars(select(Attempt).order_by(Attempt.request_id))).all()
        assert [a.outcome for a in attempts] == ["completed", "completed", "aborted"]
        assert all(a.source == "terminal" for a in attempts)
        assert attempts[0].billed == attempts[1].billed == 3
        assert attempts[2].generated < 200


async def _land_journal(db: Any, address: str) -> None:
    async with EngineClient(address, gateway_id="test") as engine:
        await engine.connect()
        reply = await engine.read_journal(0)
    async with db.transaction() as session:
        for entry in reply.entries:
            session.add(
                EngineUsage(
                    request_id=UUID(entry.request_id),
                    attempt=entry.attempt,
                    replica_id="replica-1",
                    tenant_id=UUID(entry.tenant_id),
                    adapter_digest=entry.adapter_digest,
                    finish_reason=entry.finish_reason,
                    prompt_tokens=entry.usage.prompt_tokens,
                    cached_tokens=entry.usage.cached_tokens,
                    completion_tokens=entry.usage.completion_tokens,
                    ended_at=datetime.fromtimestamp(entry.ended_at_unix_s, UTC),
                )
            )
