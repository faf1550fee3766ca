"""A stand per test: its own database, an empty Redis, a scripted engine, the app in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.platform.control.stand import Stand


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        yield stand
