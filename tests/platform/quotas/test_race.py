"""Three processes and many clients against a budget for 50 requests."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest
from loraplex_platform.metering.invariants import check_invariants

from tests.support.limits import set_limit, use_of
from tests.support.metering import add_customer
from tests.support.postgres import serving_url
from tests.support.processes import Peer, hear_all
from tests.support.quota_race import Outcome, Race

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

PROCESSES, CLIENTS, BUDGET = 3, 60, 50
WORST_PICO = 10 * 20_000 + 100 * 40_000  # of `reservation`'s request at the standard prices


@pytest.mark.parametrize("is_holding", [True, False])
async def test_no_more_are_admitted_than_the_budget_pays(
    db: Database, db_url: str, is_holding: bool
) -> None:
    customer = await add_customer(db)
    limit_pico = BUDGET * WORST_PICO
    limit_id = await set_limit(
        db, customer, "cost", f"{limit_pico // 10**12}.{limit_pico % 10**12:012d}", "month"
    )

    race = Race(serving_url(db_url), customer.tenant_id, customer.key_id, CLIENTS, is_holding)
    with ExitStack() as stack:
        peers = [
            stack.enter_context(Peer("-m", "tests.support.quota_race")) for _ in range(PROCESSES)
        ]
        for peer in peers:
            peer.tell(msgspec.to_builtins(race))
        for word in ["ready", "asked"] if is_holding else ["ready"]:
            assert hear_all(peers) == [word] * PROCESSES
            for peer in peers:
                peer.tell("go on")
        outcomes = msgspec.convert(hear_all(peers), list[Outcome])

    admitted = sum(outcome.admitted for outcome in outcomes)
    paid_pico = sum(outcome.paid_pico for outcome in outcomes)
    assert paid_pico <= limit_pico
    if is_holding:
        assert admitted == BUDGET
    else:
        assert admitted >= BUDGET  # what the first did not use the next may
    assert sum(outcome.refused for outcome in outcomes) == PROCESSES * CLIENTS - admitted
    assert await use_of(db, limit_id) == (paid_pico, 0)
    report = await check_invariants(db.sessions)
    assert [check for check in report.checks if not check.ok] == []
