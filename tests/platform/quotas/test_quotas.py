"""Quotas inside reserve and settle: worst case held, `max_tokens` cut, actual use committed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    AlertFired,
    BaseModel,
    OutboxMessage,
    Project,
    Request,
)
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.quotas.errors import BudgetTooSmallError, QuotaExceededError
from loraplex_platform.quotas.schemas import NewLimit
from loraplex_platform.quotas.service import create_limit
from sqlalchemy import select, text

from tests.support.limits import (
    USD,
    all_windows,
    change_limit,
    remove_limit,
    set_limit,
    use_of,
)
from tests.support.metering import (
    Customer,
    add_customer,
    reservation,
    rows_of,
    run_sql,
    settlement,
)
from tests.support.postgres import until_in_statement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

# The standard book's prices of the base: pico-USD per token.
IN, CACHED, OUT = 20_000, 10_000, 40_000


async def test_setting_a_rolling_quota_reads_a_line_of_the_ledger_about_once(
    db: Database, db_url: str
) -> None:
    num_lines = 3000
    customer = await add_customer(db)
    request_id, _ = await reserve(db, customer)
    await service.settle(db.sessions, settlement(request_id))
    with psycopg.connect(db_url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute(
            "create temp table copies as select loraplex_uuid7_floor(at) as id from"
            " generate_series(1, %s) n, lateral (select now() - n * interval '9 min' as at) t",
            (num_lines,),
        )
        columns = owner.execute(
            "select string_agg(column_name, ', ') from information_schema.columns where"
            " table_name = 'ledger' and is_generated = 'NEVER' and column_name <> 'entry_id'"
        ).fetchone()
        assert columns is not None
        owner.execute(
            f"insert into ledger (entry_id, {columns[0]}) select copies.id,"  # type: ignore[arg-type]
            f" {', '.join('l.' + name for name in columns[0].split(', '))}"
            " from copies, ledger l where l.entry_id = %s",
            (request_id,),
        )
    reads = text(
        "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))"
        " from pg_stat_xact_user_tables where relname like 'ledger%'"
    )
    new = {"scope_kind": "tenant", "scope_id": format_id("tenant", customer.tenant_id)}
    new |= {"metric": "requests", "period": "rolling", "value": "9999"}

    async with db.transaction() as session:
        made = await create_limit(
            session,
            SYSTEM,
            NewLimit.model_validate(new | {"window_hours": 720}),
            sessions=db.sessions,
        )
        num_read = await session.scalar(reads)

    assert made.use is not None
    assert made.use.committed == num_lines + 1
    assert num_lines < num_read < 2 * num_lines


async def test_a_quota_that_waits_into_another_period_counts_that_one(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    with psycopg.connect(db_url) as owner:
        owner.execute("select loraplex_lock_limits(%s)", (customer.tenant_id,))
        setting = asyncio.create_task(set_limit(db, customer, "requests", "9"))
        await until_in_statement(db_url, waits_for="Lock")
        released_at = owner.execute("select clock_timestamp()").fetchone()
    await setting

    async with db.sessions() as session:
        set_at = await session.scalar(text("select changed_at from limits"))
    assert released_at is not None
    assert set_at > released_at[0]


def usd(pico: int) -> str:
    return f"{pico // USD}.{pico % USD:012d}"


async def reserve(db: Database, customer: Customer, **changes: Any) -> tuple[UUID, Any]:
    wanted = reservation(customer, **changes)
    return wanted.request_id, await service.reserve(db.sessions, wanted)


async def broken(db: Database) -> set[str]:
    report = await check_invariants(db.sessions)
    return {check.name for check in report.checks if not check.ok}


async def test_the_worst_case_is_held_and_only_what_was_used_stays(db: Database) -> None:
    customer = await add_customer(db)
    limits = {
        metric: await set_limit(db, customer, metric, value)
        for metric, value in {
            "requests": "10",
            "tokens_in": "1000",
            "tokens_out": "1000",
            "tokens_total": "1000",
            "cost": "1",
        }.items()
    }

    request_id, reserved = await reserve(db, customer)

    held = {metric: (await use_of(db, limit_id)) for metric, limit_id in limits.items()}
    assert held == {
        "requests": (0, 1),
        "tokens_in": (0, 10),
        "tokens_out": (0, 100),
        "tokens_total": (0, 110),
        "cost": (0, 10 * IN + 100 * OUT),
    }
    assert reserved.max_tokens == 100
    await service.settle(db.sessions, settlement(request_id, usage_cached_tokens=4))
    cost = 6 * IN + 4 * CACHED + 20 * OUT
    used = {metric: (await use_of(db, limit_id)) for metric, limit_id in limits.items()}
    assert used == {
        "requests": (1, 0),
        "tokens_in": (10, 0),
        "tokens_out": (20, 0),
        "tokens_total": (30, 0),
        "cost": (cost, 0),
    }
    assert await broken(db) == set()


async def test_max_tokens_is_cut_to_what_the_tightest_limit_pays(db: Database) -> None:
    customer = await add_customer(db)
    loose = await set_limit(db, customer, "tokens_total", "60")
    tight = await set_limit(db, customer, "cost", usd(10 * IN + 45 * OUT), "month")

    request_id, reserved = await reserve(db, customer, num_choices=2, est_completion_tokens=200)

    assert reserved.max_tokens == 22  # two choices of 22: 44 of 45
    request, _, _ = await rows_of(db, request_id)
    assert (request.est_completion_tokens, request.asked_completion_tokens) == (44, 200)
    assert request.clamped_by == tight
    assert await use_of(db, loose) == (0, 54)
    assert await use_of(db, tight) == (0, 10 * IN + 44 * OUT)


async def test_what_is_not_cut_says_so(db: Database) -> None:
    customer = await add_customer(db)
    await set_limit(db, customer, "tokens_total", "110")

    request_id, reserved = await reserve(db, customer)

    request, _, _ = await rows_of(db, request_id)
    assert reserved.max_tokens == 100
    assert request.clamped_by is None


async def test_a_request_that_gets_not_even_its_least_is_refused_and_takes_nothing(
    db: Database,
) -> None:
    customer = await add_customer(db)
    other = await set_limit(db, customer, "requests", "10", "month", scope_kind="key")
    limit_id = await set_limit(db, customer, "tokens_total", "300")
    first, _ = await reserve(db, customer, est_completion_tokens=270)
    wanted = reservation(customer, min_completion_tokens=11, est_completion_tokens=100)

    with pytest.raises(QuotaExceededError) as caught:
        await service.reserve(db.sessions, wanted)

    error = caught.value
    assert (error.status, error.type, error.error_code) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert error.headers["x-should-retry"] == "false"
    assert error.limit_id == limit_id
    for part in ("your organization", "tokens per day", "300", "280 held", "at least 21", "(UTC)"):
        assert part in error.message
    assert await use_of(db, limit_id) == (0, 280)
    assert await use_of(db, other) == (0, 1)
    async with db.sessions() as session:
        assert await session.get(Request, wanted.request_id) is None
    await service.settle(db.sessions, settlement(first))
    assert (await service.reserve(db.sessions, wanted)).max_tokens == 100


async def test_retry_after_is_said_only_where_waiting_so_long_is_a_retry(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "requests", "1")
    await reserve(db, customer)

    with pytest.raises(QuotaExceededError) as far:
        await reserve(db, customer)
    await run_sql(
        db,
        "update quota_windows set period_end = now() + interval '30 s' where scope_id = :id",
        id=customer.tenant_id,
    )
    with pytest.raises(QuotaExceededError) as near:
        await reserve(db, customer)

    assert limit_id == far.value.limit_id == near.value.limit_id
    until_midnight = timedelta(days=1) - (
        datetime.now(UTC) - datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    )
    assert ("Retry-After" in far.value.headers) == (until_midnight <= timedelta(seconds=60))
    assert 25 <= int(near.value.headers["Retry-After"]) <= 30


async def test_who_asks_again_finds_its_own_reservation_not_a_spent_quota(db: Database) -> None:
    customer = await add_customer(db)
    await set_limit(db, customer, "requests", "1")
    wanted = reservation(customer)
    first = await service.reserve(db.sessions, wanted)

    assert await service.reserve(db.sessions, wanted) == first


async def test_a_request_larger_than_the_whole_limit_is_told_so(db: Database) -> None:
    customer = await add_customer(db)
    await set_limit(db, customer, "tokens_total", "300")

    with pytest.raises(BudgetTooSmallError) as caught:
        await reserve(db, customer, est_prompt_tokens=300)

    error = caught.value
    assert (error.status, error.error_code) == (400, "request_exceeds_budget")
    assert error.headers == {"x-should-retry": "false"}
    assert "at least 301" in error.message
    assert "300" in error.message


async def test_a_limit_of_nothing_refuses_everything(db: Database) -> None:
    customer = await add_customer(db)
    await set_limit(db, customer, "requests", "0", "total")

    with pytest.raises(QuotaExceededError, match="ask the operator"):
        await reserve(db, customer)


async def test_a_soft_limit_only_alerts_and_each_threshold_once(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(
        db, customer, "tokens_total", "100", hard=False, alert_pct=[50, 100, 50]
    )

    for generated in (30, 25, 60, 60):
        request_id, reserved = await reserve(db, customer, est_completion_tokens=60)
        assert reserved.max_tokens == 60
        await service.settle(db.sessions, settlement(request_id, usage_generated=generated))

    assert await use_of(db, limit_id) == (215, 0)
    async with db.sessions() as session:
        messages = await session.scalars(
            select(OutboxMessage).where(OutboxMessage.topic == "alert").order_by(OutboxMessage.id)
        )
        fired = (await session.scalars(select(AlertFired))).all()
        alerts = [(message.payload["pct"], message.payload["used"]) for message in messages]
    assert alerts == [(50, "75"), (100, "145")]
    assert sorted(alert.pct for alert in fired) == [50, 100]
    # Not again when the outbox has forgotten it.
    await run_sql(db, "delete from outbox")
    request_id, _ = await reserve(db, customer)
    await service.settle(db.sessions, settlement(request_id))
    async with db.sessions() as session:
        assert (await session.scalars(select(OutboxMessage))).all() == []


async def test_faults_and_voids_and_probes_cost_the_tenants_quota_nothing(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "cost", "1")
    fault, _ = await reserve(db, customer)
    void, _ = await reserve(db, customer)
    probe, _ = await reserve(db, customer, key_id=None, kind="probe", endpoint="probe")

    await service.settle(db.sessions, settlement(fault, usage_outcome="fault"))
    await service.void(db.sessions, void, 1, voided_by="gw-1")
    await service.settle(db.sessions, settlement(probe, kind="probe"))

    assert await use_of(db, limit_id) == (0, 0)
    assert await broken(db) == set()


async def test_a_settle_that_used_more_than_was_held_is_written_and_blocks_what_comes_next(
    db: Database,
) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "tokens_total", "110")
    request_id, _ = await reserve(db, customer)

    result = await service.settle(db.sessions, settlement(request_id, usage_generated=500))

    assert result.applied
    assert await use_of(db, limit_id) == (510, 0)
    with pytest.raises(QuotaExceededError):
        await reserve(db, customer, est_prompt_tokens=1)
    assert await broken(db) == {"hard_quotas_are_kept"}


async def test_a_limit_set_in_the_middle_counts_from_the_beginning_of_its_period(
    db: Database,
) -> None:
    customer = await add_customer(db)
    done, _ = await reserve(db, customer)
    await service.settle(db.sessions, settlement(done))
    running, _ = await reserve(db, customer)

    limit_id = await set_limit(db, customer, "tokens_total", "200")

    assert await use_of(db, limit_id) == (30, 110)
    _, reserved = await reserve(db, customer)
    assert reserved.max_tokens == 50
    await service.settle(db.sessions, settlement(running))
    assert await use_of(db, limit_id) == (60, 60)
    assert await broken(db) == set()


@pytest.mark.parametrize("period", ["day", "month", "total", "rolling"])
async def test_a_limit_changed_or_removed_meanwhile_leaks_no_hold(
    db: Database, period: str
) -> None:
    customer = await add_customer(db)
    hours = {"window_hours": 24} if period == "rolling" else {}
    limit_id = await set_limit(db, customer, "requests", "3", period, **hours)
    kept, removed = [(await reserve(db, customer))[0] for _ in range(2)]

    await change_limit(db, limit_id, value="2")
    with pytest.raises(QuotaExceededError):
        await reserve(db, customer)
    await service.settle(db.sessions, settlement(kept))
    assert await use_of(db, limit_id) == (1, 1)
    await remove_limit(db, limit_id)
    unseen, _ = await reserve(db, customer)
    await service.settle(db.sessions, settlement(removed))
    await service.settle(db.sessions, settlement(unseen))
    again = await set_limit(db, customer, "requests", "4", period, **hours)

    assert await use_of(db, again) == (3, 0)
    assert await broken(db) == set()


async def test_limits_of_every_scope_are_asked_and_none_of_anybody_elses(db: Database) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    project = Project(id=uuid7(), tenant_id=acme.tenant_id, name="p")
    base = BaseModel(
        id=uuid7(),
        name="base",
        revision="1",
        tokenizer_sha256="0" * 64,
        chat_template_sha256="0" * 64,
        architecture={},
    )
    adapter = Adapter(id=uuid7(), tenant_id=acme.tenant_id, name="a", base_model_id=base.id)
    version = AdapterVersion(
        id=uuid7(),
        tenant_id=acme.tenant_id,
        adapter_id=adapter.id,
        version=1,
        digest="sha256:" + "a" * 64,
        status="ready",
        size_bytes=1,
        rank=8,
        target_modules=["q_proj"],
        report={},
    )
    async with db.transaction() as session:
        session.add_all([project, base])
        await session.flush()
        session.add(adapter)
        await session.flush()
        session.add(version)
    await run_sql(
        db,
        "update api_keys set project_id = :project where id = :key",
        project=project.id,
        key=acme.key_id,
    )
    scopes = {
        "platform": None,
        "tenant": format_id("tenant", acme.tenant_id),
        "project": format_id("project", project.id),
        "key": format_id("api_key", acme.key_id),
        "adapter": format_id("adapter", adapter.id),
    }
    limits = {
        kind: await set_limit(db, acme, "requests", "9", scope_kind=kind, scope_id=scope_id)
        for kind, scope_id in scopes.items()
    }

    await reserve(db, acme, adapter_version_id=version.id)
    await reserve(db, acme)
    await reserve(db, globex)

    held = {kind: (await use_of(db, limit_id))[1] for kind, limit_id in limits.items()}
    assert held == {"platform": 3, "tenant": 2, "project": 2, "key": 2, "adapter": 1}
    assert await broken(db) == set()


async def test_a_shared_limit_says_nothing_of_what_others_use(db: Database) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    await set_limit(db, acme, "tokens_total", "777", scope_kind="platform")
    await reserve(db, globex, est_completion_tokens=767)

    with pytest.raises(QuotaExceededError) as caught:
        await reserve(db, acme)

    assert "777" not in caught.value.message
    assert "This service" in caught.value.message


async def test_what_rolls_is_free_again_when_its_bucket_has_passed(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "requests", "2", "rolling", window_hours=24)
    for _ in range(2):
        request_id, _ = await reserve(db, customer)
        await service.settle(db.sessions, settlement(request_id))

    async def back(hours: int) -> None:
        """Let what has been used be so much longer ago."""
        await run_sql(
            db,
            "update quota_windows set period_start = period_start - make_interval(hours => :hours),"
            " period_end = period_end - make_interval(hours => :hours) where committed > 0",
            hours=hours,
        )

    await run_sql(db, "delete from quota_windows where committed = 0")
    await back(24)  # its bucket is partly within the last 24 hours: still counted
    with pytest.raises(QuotaExceededError, match="in any 1 day"):
        await reserve(db, customer)
    assert await use_of(db, limit_id) == (2, 0)
    await run_sql(db, "delete from quota_windows where committed = 0")
    await back(1)
    await reserve(db, customer)
    assert await use_of(db, limit_id) == (0, 1)


async def test_a_limit_holds_only_in_its_time_but_always_counts(db: Database) -> None:
    customer = await add_customer(db)
    later = int((datetime.now(UTC) + timedelta(hours=1)).timestamp())
    future = await set_limit(db, customer, "requests", "1", valid_from=later)
    past = await set_limit(db, customer, "tokens_in", "1", "month", valid_to=later - 7200)

    for _ in range(2):
        await reserve(db, customer)

    assert await use_of(db, future) == (0, 2)
    assert await use_of(db, past) == (0, 20)


async def test_windows_are_made_once_by_many_first_requests(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "requests", "5")
    await run_sql(db, "delete from quota_windows")

    results = await asyncio.gather(
        *(reserve(db, customer) for _ in range(20)), return_exceptions=True
    )

    refused = [result for result in results if isinstance(result, BaseException)]
    assert {type(error) for error in refused} == {QuotaExceededError}
    assert len(refused) == 15
    assert await use_of(db, limit_id) == (0, 5)
    assert len(await all_windows(db)) == 1


async def test_a_new_time_zone_keeps_what_was_used(db: Database) -> None:
    customer = await add_customer(db)
    limit_id = await set_limit(db, customer, "requests", "5", "month")
    request_id, _ = await reserve(db, customer)
    await service.settle(db.sessions, settlement(request_id))
    await reserve(db, customer)

    await run_sql(db, "update tenants set billing_tz = 'Pacific/Kiritimati'")

    [window] = await all_windows(db)
    assert (window.period_start + timedelta(hours=14)).hour == 0
    assert await use_of(db, limit_id) == (1, 1)
    assert "windows_equal_the_books" not in await broken(db)
