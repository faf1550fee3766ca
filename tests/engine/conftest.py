"""A server without a model, and a gateway that is connected to it (`tests.support.replicas`)."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from loraplex_engine.client import EngineClient

from tests.support.replicas import Replica, run_replica


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: unix socket paths are at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="lpx-") as name:
        yield Path(name)


@pytest.fixture
async def replica(folder: Path) -> AsyncIterator[Replica]:
    async with run_replica(folder) as replica:
        yield replica


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[EngineClient]:
    async with EngineClient(replica.address, gateway_id="g1") as client:
        await client.connect()
        yield client
