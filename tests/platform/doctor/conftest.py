"""A configuration to look at, made of what the test's own servers are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from loraplex_platform.doctor.findings import Finding, Status, answer
from loraplex_platform.doctor.look import Look
from loraplex_platform.doctor.run import choose
from loraplex_platform.local.data_dir import DataDir

Ask = Callable[..., Awaitable[Finding]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Make one check of a configuration: `await ask("redis.eviction", LORAPLEX_REDIS_URL=...)`."""

    async def make(
        name: str,
        *,
        is_local: bool = False,
        is_running: bool = False,
        engine: dict[str, str] | None = None,
        data_dir: Path | None = None,
        **variables: str,
    ) -> Finding:
        look = Look(
            source="a test",
            variables=variables,
            data_dir=DataDir(data_dir or tmp_path / "data"),
            is_local=is_local,
            is_running=is_running,
            engine_variables=engine or {},
        )
        (check,) = choose([name])
        finding = (await answer(check, look)).finding
        assert (finding.remedy is None) == (finding.status in (Status.OK, Status.SKIPPED))
        return finding

    return make
