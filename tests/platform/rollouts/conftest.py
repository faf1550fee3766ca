"""A control API with one tenant whose deployment has two revisions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.platform.control.stand import Stand
from tests.platform.rollouts.stand import World


@pytest.fixture
async def world(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[World]:
    options = {"webhook_key": "webhook-key-for-tests-0123456789abcdef"}
    async with Stand.open(db_url, redis_url, short_tmp_path, **options) as stand:
        yield await World.make(stand)
