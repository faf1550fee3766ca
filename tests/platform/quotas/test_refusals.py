"""Refusals are counted, written once a second, and found again by their requests."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from loraplex_platform.db import Refusal
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.records import GATEWAY_LOST
from loraplex_platform.quotas import queries, refusal_log
from loraplex_platform.quotas.errors import LimitError
from loraplex_platform.quotas.explain import Explanation, explain
from loraplex_platform.quotas.refusal_log import RefusalLog
from sqlalchemy import select

from tests.support.limits import all_windows, remove_limit, set_limit
from tests.support.metering import Customer, add_customer, reservation, run_sql, settlement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


async def refused(db: Database, log: RefusalLog, customer: Customer) -> UUID:
    """A request that a limit refuses."""
    wanted = reservation(customer)
    with pytest.raises(LimitError) as caught:
        await service.reserve(db.sessions, wanted)
    log.note(customer.tenant_id, customer.key_id, wanted.request_id, caught.value)
    return wanted.request_id


async def explained(db: Database, request_id: UUID) -> Explanation:
    async with db.sessions() as session:
        return await explain(session, format_id("request", request_id))


async def refusals(db: Database) -> list[Refusal]:
    async with db.sessions() as session:
        return list((await session.scalars(select(Refusal).order_by(Refusal.count))).all())


async def test_those_of_one_key_and_limit_are_one_row_a_second(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_log, "MAX_REQUEST_IDS", 2)
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    limits = [await set_limit(db, customer, "requests", "0") for customer in (acme, globex)]
    log = RefusalLog(db.sessions)
    ids = [await refused(db, log, acme) for _ in range(3)]
    await refused(db, log, globex)

    await log.flush()
    await log.flush()

    one, three = await refusals(db)
    assert (one.count, one.tenant_id, one.limit_id) == (1, globex.tenant_id, limits[1])
    assert (three.count, three.request_ids) == (3, ids[:2])
    assert (three.code, three.key_id) == ("insufficient_quota", acme.key_id)


async def test_a_flood_of_keys_is_bounded(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_log, "MAX_GROUPS", 2)
    log = RefusalLog(db.sessions)
    for _ in range(5):
        log.note(uuid7(), uuid7(), uuid7(), LimitError("no", limit_id=None))

    await log.flush()

    assert len(await refusals(db)) == 2


async def test_why_was_i_blocked(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "tokens_total", "100", scope_kind="key")
    admitted = reservation(customer, est_completion_tokens=500)
    await service.reserve(db.sessions, admitted)
    log = RefusalLog(db.sessions)
    blocked = [await refused(db, log, customer) for _ in range(2)]
    await log.flush()

    why = await explained(db, blocked[0])
    running = await explained(db, admitted.request_id)

    assert (why.outcome, why.limit_ids) == ("refused", [limit_id])
    assert "this API key on tokens per day" in why.summary
    assert "100 held" in why.summary
    assert why.details == [
        "It was refused by the limit of this API key on tokens per day, now 100.",
        "2 requests of this key were refused so within a second.",
    ]
    assert (running.outcome, running.limit_ids) == ("running", [limit_id])
    assert running.details[0] == (
        "It asked for up to 500 tokens and was cut to 90: a limit paid no more."
    )
    await service.settle(
        db.sessions,
        settlement(admitted.request_id, usage_generated=90, finish_reason="length"),
    )
    done = await explained(db, admitted.request_id)
    assert (done.outcome, done.summary) == (
        "completed",
        "It was answered, and ended where a limit paid no more tokens.",
    )
    await remove_limit(db, limit_id)
    assert "removed since" in (await explained(db, blocked[0])).details[0]


@pytest.mark.parametrize(
    ("how", "outcome"), [("fault", "failed"), ("void", "not_run"), ("stop", "completed")]
)
async def test_what_became_of_a_request(db: Database, how: str, outcome: str) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    if how == "void":
        await service.void(
            db.sessions, wanted.request_id, 1, voided_by="gw-1", error_code="queue_full"
        )
    else:
        usage = "completed" if how == "stop" else "fault"
        reason = how if how == "stop" else "error"
        await service.settle(
            db.sessions,
            settlement(wanted.request_id, usage_outcome=usage, finish_reason=reason),
        )

    found = await explained(db, wanted.request_id)

    assert found.outcome == outcome
    assert (how == "void") == ("It ended with the error queue_full." in found.details)


@pytest.mark.parametrize(
    ("outcome", "ending"),
    [
        (
            "aborted",
            {
                "usage_outcome": "aborted",
                "finish_reason": "abort",
                "http_status": 499,
                "error_code": "client_disconnected",
            },
        ),
        (
            "failed",
            {
                "usage_outcome": "lost",
                "usage_source": "journal",
                "settled_by": "sweeper",
                "finish_reason": "error",
                "http_status": None,
                "error_code": GATEWAY_LOST,
            },
        ),
        (
            "aborted",
            {
                "usage_outcome": "aborted",
                "usage_source": "journal",
                "settled_by": "sweeper",
                "finish_reason": "abort",
                "http_status": None,
                "error_code": GATEWAY_LOST,
            },
        ),
    ],
)
async def test_an_answer_that_nobody_may_have_heard_is_not_called_answered(
    db: Database, outcome: str, ending: dict[str, object]
) -> None:
    wanted = reservation(await add_customer(db))
    await service.reserve(db.sessions, wanted)
    await service.settle(db.sessions, settlement(wanted.request_id, **ending))

    found = await explained(db, wanted.request_id)

    assert found.outcome == outcome
    assert "answered" not in found.summary


async def test_what_is_not_known_or_no_id_is_not_found(db: Database) -> None:
    with pytest.raises(NotFoundError, match="Nothing is known"):
        await explained(db, uuid7())
    async with db.sessions() as session:
        with pytest.raises(NotFoundError, match="x-request-id"):
            await explain(session, "req_1")


async def test_old_refusals_and_windows_are_purged_and_what_is_held_never(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer, other = await add_customer(db), await add_customer(db, "globex")
    await set_limit(db, customer, "requests", "1")
    await service.reserve(db.sessions, reservation(customer))
    log = RefusalLog(db.sessions)
    await refused(db, log, customer)
    await log.flush()
    await set_limit(db, other, "tokens_in", "1", "month")
    await run_sql(
        db,
        "update quota_windows set period_start = period_start - interval '2 years',"
        " period_end = period_end - interval '2 years'",
    )

    async with db.transaction() as session:
        await queries.purge(session)

    assert len(await refusals(db)) == 1
    monkeypatch.setattr(queries, "REFUSALS_KEPT", timedelta(0))
    async with db.transaction() as session:
        await queries.purge(session)
    assert await refusals(db) == []
    assert [(window.metric, window.held) for window in await all_windows(db)] == [("requests", 1)]
