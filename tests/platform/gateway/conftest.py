"""One stand for all tests of this package that leave it whole; a fresh one for those that break it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
from loraplex_engine.client import EngineLostError
from loraplex_platform.errors import EngineUnavailableError

from tests.platform.gateway.stand import BASE, Stand, announce, eventually
from tests.support.fake_engine import Script
from tests.support.folders import short_folder
from tests.support.metering import run_sql
from tests.support.postgres import PostgresServer


@pytest.fixture(scope="package")
def _package_folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def _shared_stand(
    postgres_server: PostgresServer, _redis_server_url: str, _package_folder: Path
) -> AsyncIterator[Stand]:
    with postgres_server.clone() as db_url:
        async with Stand.open(db_url, _redis_server_url, _package_folder) as stand:
            yield stand


@pytest_asyncio.fixture(loop_scope="package")
async def stand(_shared_stand: Stand) -> AsyncIterator[Stand]:
    """The shared stand, reset; its books are checked after every test."""
    _shared_stand.engine.script = Script()
    _shared_stand.engine.script_for = None
    _shared_stand.engine.received.clear()
    # Another test may have emptied its Redis, or announced a replica of the same name there.
    announce(_shared_stand.redis_url, _shared_stand.engine)
    # Its loop stood still while tests on other loops ran: the gateway may have to connect again.
    await _answering(_shared_stand)
    yield _shared_stand
    await _shared_stand.close_clients()
    await run_sql(
        _shared_stand.db,
        "update deployments set archived_at = now() where public_name like 'd-%' and archived_at is null",
    )
    await _shared_stand.check_books()


@pytest_asyncio.fixture(loop_scope="package")
async def own_stand(
    db_url: str, _redis_server_url: str, short_tmp_path: Path
) -> AsyncIterator[Stand]:
    """A stand that the test may break; it calls `check_books` itself."""
    redis_url = f"{_redis_server_url}?db=1"  # the shared stand's gateway looks into the first
    async with redis.asyncio.from_url(redis_url) as client:
        await client.flushdb()
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        yield stand


async def _answering(stand: Stand) -> None:
    """Wait for an engine that answers now; a connection may look ready and be found dead next."""
    async with asyncio.timeout(30):
        while True:
            await eventually(lambda: stand.gateway.router.num_ready > 0, "a ready engine")
            try:
                await stand.gateway.router.choose(BASE, 1).client.stats()
            except (EngineLostError, EngineUnavailableError):
                continue
            return
