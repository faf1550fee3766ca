"""Every row of the table of faults; the few that every change is tested with are not `slow`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.cases import CASES, Case
from tests.chaos.table import run_case
from tests.chaos.world import World

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="lpx-"))
    try:
        async with World.open(folder) as opened:
            yield opened
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.in_ci else pytest.mark.slow)
        for case in CASES
    ],
)
async def test_nothing_is_lost_doubled_or_overspent(world: World, case: Case) -> None:
    verdict = await run_case(world, case)

    assert verdict.is_right, verdict
    assert verdict.recovery_s <= case.recovers_s, verdict
