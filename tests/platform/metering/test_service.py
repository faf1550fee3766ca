from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from loraplex_platform.billing.prices import NoPriceError
from loraplex_platform.errors import (
    ConflictError,
    ExpiredKeyError,
    InvalidApiKeyError,
    RevokedKeyError,
    TenantSuspendedError,
)
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.metering.records import Renewal
from loraplex_platform.metering.usage import UsageQuery, report_usage

from tests.support.metering import add_customer, reservation, rows_of, run_sql, settlement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database


async def test_reserve_writes_the_row_with_price_and_lease(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer, adapter_version_id=uuid7(), has_stop_strings=True)

    reserved = await service.reserve(db.sessions, wanted)

    request, attempts, ledger = await rows_of(db, wanted.request_id)
    assert (request.state, request.lease_token, reserved.lease_token) == ("reserved", 1, 1)
    assert request.est_pico == 10 * 30_000 + 100 * 60_000
    assert request.price_book_id == reserved.price_book_id
    assert request.has_stop_strings
    assert request.lease_until - request.admitted_at == timedelta(seconds=20)
    assert (attempts, ledger) == ([], [])


async def test_reserve_again_reads_its_own_row(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)

    first = await service.reserve(db.sessions, wanted)

    assert await service.reserve(db.sessions, wanted) == first
    with pytest.raises(ConflictError):
        await service.reserve(
            db.sessions, reservation(customer, request_id=wanted.request_id, owner="gw-2")
        )


async def test_a_key_is_refused_from_the_moment_it_is_revoked_or_expired(db: Database) -> None:
    customer = await add_customer(db)
    await service.reserve(db.sessions, reservation(customer))

    await run_sql(db, "update api_keys set status='revoked', revoked_at=now()")
    with pytest.raises(RevokedKeyError):
        await service.reserve(db.sessions, reservation(customer))

    await run_sql(
        db,
        "update api_keys set status='active', revoked_at=null, expires_at=:at",
        at=datetime.now(UTC) - timedelta(milliseconds=1),
    )
    with pytest.raises(ExpiredKeyError):
        await service.reserve(db.sessions, reservation(customer))


async def test_other_refusals_say_why(db: Database) -> None:
    customer = await add_customer(db)
    other = await add_customer(db, "globex")

    with pytest.raises(InvalidApiKeyError, match="Unknown"):
        await service.reserve(db.sessions, reservation(customer, key_id=other.key_id))
    with pytest.raises(InvalidApiKeyError, match="Unknown"):
        await service.reserve(db.sessions, reservation(customer, key_id=None))
    with pytest.raises(InvalidApiKeyError, match="Unknown"):
        await service.reserve(db.sessions, reservation(customer, tenant_id=uuid7()))
    await run_sql(db, "update tenants set status='suspended' where slug='acme'")
    with pytest.raises(TenantSuspendedError):
        await service.reserve(db.sessions, reservation(customer))
    with pytest.raises(TenantSuspendedError):
        await service.reserve(db.sessions, reservation(customer, key_id=None, kind="probe"))


async def test_what_has_no_price_is_not_served(db: Database, db_url: str) -> None:
    import psycopg

    customer = await add_customer(db)
    with psycopg.connect(db_url) as connection:
        connection.execute("update price_books set effective_to = now()")

    with pytest.raises(NoPriceError):
        await service.reserve(db.sessions, reservation(customer))


async def test_settle_bills_once_and_a_second_settle_changes_nothing(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)

    first = await service.settle(db.sessions, settlement(wanted.request_id, usage_cached_tokens=4))
    second = await service.settle(db.sessions, settlement(wanted.request_id, usage_generated=99))

    request, [attempt], [entry] = await rows_of(db, wanted.request_id)
    cost = 6 * 20_000 + 4 * 10_000 + 20 * 40_000
    assert (first.applied, first.amount_pico, second.applied) == (True, cost, False)
    assert (entry.kind, entry.account, entry.amount_pico) == ("usage", "revenue", cost)
    assert (entry.prompt_tokens, entry.cached_tokens, entry.completion_tokens) == (10, 4, 20)
    assert (request.state, request.completion_tokens, request.settled_by) == ("settled", 20, "gw-1")
    assert request.finish_reason == "stop"
    assert (attempt.generated, attempt.billed, attempt.absorbed) == (20, 20, 0)


async def test_tokens_past_a_stop_string_are_counted_but_not_charged(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)

    await service.settle(db.sessions, settlement(wanted.request_id, usage_discarded_past_stop=3))

    request, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (attempt.generated, attempt.billed, attempt.discarded_past_stop) == (20, 17, 3)
    assert (entry.completion_tokens, request.completion_tokens) == (17, 17)


@pytest.mark.parametrize("outcome", ["fault", "lost"])
async def test_a_fault_is_absorbed(db: Database, outcome: str) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)

    await service.settle(
        db.sessions,
        settlement(wanted.request_id, usage_outcome=outcome, usage_source="observed"),
    )

    request, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (attempt.billed, attempt.absorbed, request.completion_tokens) == (0, 20, 0)
    assert (entry.account, entry.completion_tokens) == ("absorbed", 20)
    assert entry.amount_pico == 10 * 20_000 + 20 * 40_000


async def test_a_probe_is_absorbed(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer, key_id=None, kind="probe", endpoint="probe")
    await service.reserve(db.sessions, wanted)

    await service.settle(db.sessions, settlement(wanted.request_id, kind="probe"))

    _, [attempt], [entry] = await rows_of(db, wanted.request_id)
    assert (attempt.billed, attempt.absorbed, entry.account) == (0, 20, "absorbed")


async def test_only_the_delivering_attempt_is_billed(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    assert await service.assign(
        db.sessions, wanted.request_id, 1, replica_id="replica-2", attempt=2
    )
    failed = AttemptUsage(outcome="lost", source="observed", prompt_tokens=10, generated=5)

    await service.settle(
        db.sessions, settlement(wanted.request_id, usage_attempt=2, earlier=(failed,))
    )

    request, [first, second], [entry] = await rows_of(db, wanted.request_id)
    assert (first.absorbed, first.billed, second.billed) == (5, 0, 20)
    assert (entry.completion_tokens, request.attempt, request.replica_id) == (20, 2, "replica-2")


async def test_counts_that_do_not_add_up_write_nothing(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)

    with pytest.raises(ValueError, match="exceed"):
        await service.settle(
            db.sessions, settlement(wanted.request_id, usage_discarded_past_stop=21)
        )

    request, attempts, ledger = await rows_of(db, wanted.request_id)
    assert (request.state, attempts, ledger) == ("reserved", [], [])


async def test_void_costs_nothing_and_is_final(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)

    first = await service.void(
        db.sessions,
        wanted.request_id,
        1,
        voided_by="gw-1",
        http_status=503,
        error_code="queue_full",
    )
    second = await service.void(db.sessions, wanted.request_id, 1, voided_by="gw-1")
    assert (first.applied, second.applied) == (True, False)
    assert not (await service.settle(db.sessions, settlement(wanted.request_id))).applied

    request, attempts, ledger = await rows_of(db, wanted.request_id)
    assert (request.state, request.error_code) == ("voided", "queue_full")
    assert (attempts, ledger) == ([], [])


async def test_renew_extends_held_leases_and_names_lost_ones(db: Database) -> None:
    customer = await add_customer(db)
    wanted = [reservation(customer, lease_s=1) for _ in range(4)]
    for each in wanted:
        await service.reserve(db.sessions, each)
    held, taken, closed, lower = (each.request_id for each in wanted)
    await run_sql(db, "update requests set lease_token = 2 where id = :id", id=taken)
    await run_sql(db, "update requests set checkpoint_tokens = 9 where id = :id", id=lower)
    await service.settle(db.sessions, settlement(closed))

    lost = await service.renew(
        db.sessions, [Renewal(each.request_id, 1, checkpoint_tokens=7) for each in wanted]
    )

    assert lost == {taken, closed}
    request, _, _ = await rows_of(db, held)
    assert request.checkpoint_tokens == 7
    assert request.lease_until > datetime.now(UTC) + timedelta(seconds=15)
    assert (await rows_of(db, lower))[0].checkpoint_tokens == 9
    assert await service.renew(db.sessions, []) == set()


async def test_a_holder_of_an_old_lease_can_do_nothing(db: Database) -> None:
    customer = await add_customer(db)
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    await run_sql(db, "update requests set lease_token = 2")

    assert not (await service.settle(db.sessions, settlement(wanted.request_id, 1))).applied
    void = await service.void(db.sessions, wanted.request_id, 1, voided_by="gw-1")
    assert not void.applied
    assert not await service.assign(db.sessions, wanted.request_id, 1, replica_id="r", attempt=2)
    assert (await service.settle(db.sessions, settlement(wanted.request_id, 2))).applied


async def test_many_that_settle_at_once_write_one_row(db: Database) -> None:
    customer = await add_customer(db)
    wanted = [reservation(customer) for _ in range(5)]
    await asyncio.gather(*(service.reserve(db.sessions, each) for each in wanted))

    results = await asyncio.gather(
        *(
            service.settle(db.sessions, settlement(each.request_id, usage_generated=size))
            for each in wanted
            for size in (20, 30, 40)
        )
    )

    assert sum(result.applied for result in results) == len(wanted)
    for each in wanted:
        _, attempts, ledger = await rows_of(db, each.request_id)
        assert (len(attempts), len(ledger)) == (1, 1)
        assert attempts[0].generated == ledger[0].completion_tokens


@pytest.mark.parametrize("skew_s", [-661, 661])
async def test_an_id_that_no_report_would_find_is_not_admitted(db: Database, skew_s: int) -> None:
    customer = await add_customer(db)
    off = uuid7(int((time.time() + skew_s) * 1000))
    slightly_off = uuid7(int((time.time() + skew_s * 0.8) * 1000))

    with pytest.raises(service.ClockSkewError) as caught:
        await service.reserve(db.sessions, reservation(customer, request_id=off))
    await service.reserve(db.sessions, reservation(customer, request_id=slightly_off))

    assert (caught.value.status, caught.value.error_code) == (503, "clock_skew")
    now = datetime.now(UTC)
    await service.settle(db.sessions, settlement(slightly_off))
    query = UsageQuery(start=now - timedelta(minutes=1), end=now + timedelta(minutes=1))
    async with db.sessions() as session:
        page = await report_usage(session, query)
    assert [row.requests for row in page.rows] == [1]
