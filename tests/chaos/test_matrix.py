"""Every row of the table of faults; the few that every change is tested with are not `slow`."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.cases import BROKEN, CASES, Case
from tests.chaos.table import run_case
from tests.chaos.world import World
from tests.support.folders import short_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    with short_folder() as folder:
        async with World.open(folder) as opened:
            yield opened


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


# The last one: what is forged is counted in other tables as well by then.
async def test_a_lost_or_forged_bill_is_noticed(world: World) -> None:
    """Else all the others prove nothing."""
    await world.new_customer()
    async with world.gateway() as gateway:
        answers = [await world.ask(gateway, is_stream=is_stream) for is_stream in (False, True)]
    forge = "update ledger set completion_tokens = completion_tokens + %s where entry_id = %s"

    assert (await world.judge(answers)).is_right
    with world.owner() as owner:
        owner.execute(forge, (1, answers[0].request_id))
    forged = await world.judge(answers)
    with world.owner() as owner:
        owner.execute(forge, (-1, answers[0].request_id))

    assert not forged.is_right
    assert forged.num_lost == 1
    assert any(name.startswith("ledger_equals_attempts") for name in forged.broken_invariants)
    world.limit = 1
    assert (await world.judge(answers)).overspend > 0
    never = dataclasses.replace(answers[0], request_id=None)
    unheard = await world.judge([never], BROKEN)
    assert (unheard.num_lost, unheard.num_unearned) == (1, 0)
    refused = [dataclasses.replace(answer, is_whole=False, code="busy") for answer in answers]
    assert (await world.judge(refused, BROKEN)).num_unearned == 2
    assert (await world.judge([])).num_unearned == 2
