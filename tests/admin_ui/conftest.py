"""One platform for all tests of the console: they make tenants of their own in it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.admin_ui.stand import Stand, stand

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

_numbers = itertools.count(1)


@pytest.fixture(scope="package")
def platform(postgres_server: PostgresServer, session_folder: Path) -> Iterator[Stand]:
    """Control API, gateway and worker on real ports; see stand.py."""
    from loraplex_platform.local.embedded import start_redis

    with tempfile.TemporaryDirectory(prefix="lpx-") as name, postgres_server.clone() as url:
        folder = Path(name)
        # One of its own: other tests empty theirs.
        redis = start_redis(folder / "redis")
        try:
            with stand(url, redis.url, folder) as made:
                yield made
        finally:
            redis.stop()


@pytest.fixture
def tenant(platform: Stand) -> dict[str, Any]:
    """A tenant of this test's own."""
    return platform.tenant(f"tenant-{next(_numbers)}")
