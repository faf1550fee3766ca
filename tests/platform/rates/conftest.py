from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loraplex_platform.local.embedded import start_redis
from loraplex_platform.rates.redis_client import DEADLINE_S

from tests.platform.rates.stand import World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from loraplex_platform.local.server_process import EmbeddedServer


@pytest.fixture
async def world(redis_url: str) -> AsyncIterator[World]:
    """Over the shared Redis, empty."""
    world = World(redis_url)
    yield world
    await world.close()


@pytest.fixture
def own_redis(short_tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A Redis that the test may stop."""
    server = start_redis(short_tmp_path / "redis")
    yield server
    server.stop()


@pytest.fixture
async def own_world(own_redis: EmbeddedServer) -> AsyncIterator[World]:
    """Over a Redis of its own, with the deadline of a gateway."""
    world = World(own_redis.url, deadline_s=DEADLINE_S)
    yield world
    await world.close()
