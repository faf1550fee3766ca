"""Rollups: whole days, made again from the books; reports that read them and are never stale."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from loraplex_platform.billing import rollups
from loraplex_platform.billing.rollups import RollupWorker, roll_up
from loraplex_platform.db import UsageDaily
from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import usage
from loraplex_platform.metering.usage import UsageFilter, UsagePage, UsageQuery, report_usage
from sqlalchemy import event, select, text

from tests.support.billing import (
    STANDARD_BOOK,
    add_model,
    add_usage,
    as_owner,
    count,
    set_zone,
)
from tests.support.metering import add_customer

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database
    from sqlalchemy.ext.asyncio import AsyncSession

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)


async def rolled_up(db: Database) -> int:
    return await RollupWorker(db.sessions).run_once()


async def report(db: Database, **changes: Any) -> UsagePage:
    values: dict[str, Any] = {
        "start": datetime(2026, 1, 1, tzinfo=UTC),
        "end": datetime(2027, 1, 1, tzinfo=UTC),
    }
    async with db.sessions() as session:
        return await report_usage(session, UsageQuery(**values | changes))


async def days_of(db: Database) -> list[UsageDaily]:
    async with db.sessions() as session:
        rows = await session.scalars(select(UsageDaily).order_by(UsageDaily.day, UsageDaily.model))
        return list(rows)


async def test_a_bucket_holds_its_day_by_every_dimension(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    model = add_model(db_url, acme)
    project = uuid7()
    add_usage(db_url, acme, NOON, cached=4)
    add_usage(db_url, acme, NOON, prompt=30, completion=1)
    add_usage(db_url, acme, NOON, account="absorbed")
    add_usage(db_url, acme, NOON, model=model, project_id=project)
    add_usage(db_url, acme, NOON, kind="probe", account="absorbed")

    assert await rolled_up(db) == 1

    base, adapter = await days_of(db)
    assert (base.day, base.requests, base.billed_requests) == (date(2026, 3, 14), 3, 2)
    assert (base.prompt_tokens, base.cached_tokens, base.completion_tokens) == (40, 4, 21)
    assert base.absorbed_tokens == 20
    assert base.amount_pico == 36 * 20_000 + 4 * 10_000 + 21 * 40_000
    assert base.absorbed_pico == 10 * 20_000 + 20 * 40_000
    assert (base.key_id, base.deployment_id, base.project_id) == (acme.key_id, None, None)
    assert (adapter.project_id, adapter.deployment_id) == (project, model.deployment_id)
    assert adapter.adapter_version_id == model.adapter_version_id
    assert adapter.price_book_id == STANDARD_BOOK
    assert adapter.amount_pico == 10 * 30_000 + 20 * 60_000
    assert count(db_url, "rollup_dirty") == 0


async def test_doing_it_again_changes_nothing(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    await rolled_up(db)
    [before] = await days_of(db)
    for _ in range(3):
        as_owner(db_url, "insert into rollup_dirty values (%s, '2026-03-14')", acme.tenant_id)
        assert await rolled_up(db) == 1

    [after] = await days_of(db)

    assert (
        (after.requests, after.amount_pico)
        == (before.requests, before.amount_pico)
        == (
            1,
            10 * 20_000 + 20 * 40_000,
        )
    )


async def test_a_late_settle_marks_its_own_day(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    add_usage(db_url, acme, NOON + timedelta(days=2))
    await rolled_up(db)

    add_usage(db_url, acme, NOON, settled_at=NOON + timedelta(days=2))

    [marked] = as_owner(db_url, "select distinct day from rollup_dirty")
    assert marked == (date(2026, 3, 14),)
    assert await rolled_up(db) == 1
    assert [row.requests for row in await days_of(db)] == [2, 1]


async def test_a_report_is_right_before_while_and_after_it_is_rolled_up(
    db: Database, db_url: str
) -> None:
    acme = await add_customer(db)
    seen = []
    for number in range(3):
        add_usage(db_url, acme, NOON)
        [row] = (await report(db)).rows
        seen.append(row.requests)
        if number == 1:
            await rolled_up(db)
            [row] = (await report(db)).rows
            seen.append(row.requests)

    assert seen == [1, 2, 2, 3]


async def test_a_settle_during_a_rollup_is_not_forgotten(db: Database, db_url: str) -> None:
    """The worker has deleted the marks it saw; another settle's mark comes and stays."""
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    async with db.sessions() as session:
        assert await roll_up(session, acme.tenant_id, NOON.date())
        add_usage(db_url, acme, NOON)  # committed before the worker is
        await session.commit()

    assert count(db_url, "rollup_dirty") == 1
    [row] = (await report(db)).rows
    assert row.requests == 2
    await rolled_up(db)
    assert [row.requests for row in await days_of(db)] == [2]


@pytest.mark.parametrize("before", ["execute", "scalar"])
async def test_what_settles_while_a_rollup_runs_is_in_its_mark_or_in_the_bucket_never_in_both(
    db: Database, db_url: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Its marks are taken away by one statement, its rows made by another."""
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    async with db.sessions() as session:
        calls = []
        do = getattr(session, before)

        async def settle_and_do(*arguments: Any, **options: Any) -> Any:
            # Of `scalar` the first is the claim: a bucket's snapshot is the claim's.
            if len(calls) == (before == "scalar"):
                add_usage(db_url, acme, NOON, account="absorbed")
            calls.append(arguments)
            return await do(*arguments, **options)

        monkeypatch.setattr(session, before, settle_and_do)
        assert await roll_up(session, acme.tenant_id, NOON.date())
        await session.commit()

    assert [day.requests for day in await days_of(db)] == [1]
    assert count(db_url, "rollup_dirty") == 1
    [row] = (await report(db)).rows
    assert (row.requests, row.completion_tokens, row.absorbed_tokens) == (2, 20, 20)
    await rolled_up(db)
    assert [day.requests for day in await days_of(db)] == [2]


async def test_a_report_adds_what_has_settled_since_and_does_not_make_the_day_again(
    db: Database, db_url: str
) -> None:
    acme = await add_customer(db)
    model = add_model(db_url, acme)
    for _ in range(3):
        add_usage(db_url, acme, NOON)
    await rolled_up(db)
    add_usage(db_url, acme, NOON, cached=4)
    add_usage(db_url, acme, NOON, model=model, account="absorbed")
    add_usage(db_url, acme, NOON, kind="probe", account="absorbed")
    as_owner(db_url, "delete from ledger where entry_id not in (select entry_id from rollup_dirty)")

    rows = (await report(db, group_by=("model",))).rows

    assert [
        (row.model, row.requests, row.prompt_tokens, row.cached_tokens, row.absorbed_tokens)
        for row in rows
    ] == [("smollm2-135m", 4, 40, 4, 0), (model.name, 1, 0, 0, 20)]
    assert rows[0].cost_pico == 36 * 20_000 + 4 * 10_000 + 80 * 40_000


async def test_a_mark_without_a_request_has_its_whole_day_made_again(
    db: Database, db_url: str
) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    await rolled_up(db)
    add_usage(db_url, acme, NOON)
    as_owner(db_url, "update usage_daily set requests = 99")
    as_owner(db_url, "insert into rollup_dirty values (%s, '2026-03-14')", acme.tenant_id)

    [row] = (await report(db)).rows

    assert row.requests == 2


async def test_two_workers_make_a_bucket_once(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    for _ in range(20):
        add_usage(db_url, acme, NOON)

    counts = await asyncio.gather(*(rolled_up(db) for _ in range(4)))

    assert sum(counts) >= 1
    [row] = await days_of(db)
    assert row.requests == 20
    assert count(db_url, "rollup_dirty") == 0


async def test_a_bucket_that_took_long_rests(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    now = 0.0

    def clock_s() -> float:
        nonlocal now
        now += 1.0  # so that making the bucket takes a second or more
        return now

    worker = RollupWorker(db.sessions, clock_s=clock_s)
    add_usage(db_url, acme, NOON)
    assert await worker.run_once() == 1
    add_usage(db_url, acme, NOON)
    assert await worker.run_once() == 0

    now += 100.0

    assert await worker.run_once() == 1


async def test_a_bucket_that_cannot_be_made_does_not_keep_others_from_it(
    db: Database, db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme, globex = await add_customer(db), await add_customer(db, "globex")
    add_usage(db_url, acme, NOON)
    add_usage(db_url, globex, NOON + timedelta(days=1))
    make = rollups.roll_up

    async def take_too_long(session: AsyncSession, tenant_id: UUID, day: date) -> bool:
        if tenant_id == acme.tenant_id:
            raise DatabaseUnavailableError
        return await make(session, tenant_id, day)

    monkeypatch.setattr(rollups, "roll_up", take_too_long)
    worker = RollupWorker(db.sessions)
    with pytest.raises(DatabaseUnavailableError):
        await worker.run_once()

    assert await worker.run_once() == 1
    assert [row.tenant_id for row in await days_of(db)] == [globex.tenant_id]


async def test_what_retention_has_dropped_stays_as_it_was_rolled_up(
    db: Database, db_url: str
) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    await rolled_up(db)
    as_owner(db_url, "delete from requests")
    as_owner(
        db_url,
        "insert into dropped_months (month, requests, attempts, engine_usage)"
        " values ('2026-03-01', 1, 1, 0)",
    )
    as_owner(db_url, "insert into rollup_dirty values (%s, '2026-03-14')", acme.tenant_id)

    await rolled_up(db)

    assert [row.requests for row in await days_of(db)] == [1]
    assert count(db_url, "rollup_dirty") == 0


@pytest.mark.parametrize(
    ("zone", "local", "day"),
    [
        ("UTC", "2026-03-14T23:59:59", "2026-03-14"),
        ("Europe/Berlin", "2026-03-29T01:59:59", "2026-03-29"),  # clocks go forward at 2:00
        ("Europe/Berlin", "2026-03-30T00:00:00", "2026-03-30"),
        ("Europe/Berlin", "2026-10-25T23:59:59", "2026-10-25"),  # 25 hours long
        ("America/New_York", "2026-03-08T23:59:59", "2026-03-08"),
        ("Asia/Kathmandu", "2026-03-14T00:00:00", "2026-03-14"),  # +5:45
        ("Pacific/Kiritimati", "2026-03-14T00:00:00", "2026-03-14"),  # +14
        ("Pacific/Pago_Pago", "2026-03-14T23:59:59", "2026-03-14"),  # -11
        ("America/Havana", "2026-11-01T00:30:00", "2026-11-01"),  # midnight comes twice
        ("Africa/Cairo", "2026-04-24T01:00:00", "2026-04-24"),  # midnight is skipped
    ],
)
async def test_a_day_is_the_tenants_own(
    db: Database, db_url: str, zone: str, local: str, day: str
) -> None:
    acme = await add_customer(db)
    set_zone(db_url, acme, zone)
    at = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone))
    add_usage(db_url, acme, at.astimezone(UTC))
    add_usage(db_url, acme, at.replace(fold=1).astimezone(UTC))

    for _ in range(2):
        page = await report(db, only=UsageFilter(tenant_id=acme.tenant_id))
        [row] = page.rows
        assert (row.date, row.requests, page.zone) == (day, 2, zone)
        assert row.start.astimezone(ZoneInfo(zone)).date().isoformat() == day
        assert row.start <= at < row.end
        await rolled_up(db)

    [stored] = await days_of(db)
    assert stored.day.isoformat() == day


async def test_a_day_that_the_range_cuts_is_whole(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    set_zone(db_url, acme, "Asia/Tokyo")  # its 14 March is 13 March 15:00 to 14 March 15:00, UTC
    for hour in (14, 16):
        add_usage(db_url, acme, datetime(2026, 3, 13, hour, tzinfo=UTC))
    noon = datetime(2026, 3, 14, 12, tzinfo=UTC)
    add_usage(db_url, acme, noon)

    [row] = (await report(db, start=noon, end=noon + timedelta(seconds=1))).rows

    assert (row.date, row.requests) == ("2026-03-14", 2)


async def test_months_are_the_tenants_own_too(db: Database, db_url: str) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    set_zone(db_url, globex, "America/Los_Angeles")
    at = datetime(2026, 4, 1, 3, tzinfo=UTC)  # still March on the west coast
    for customer in (acme, globex):
        add_usage(db_url, customer, at)
        add_usage(db_url, customer, at - timedelta(days=20))

    rows = (await report(db, bucket_width="1mo", group_by=("tenant_id",))).rows

    assert [(row.tenant, row.date, row.requests) for row in rows] == [
        ("acme", "2026-03", 1),
        ("globex", "2026-03", 2),
        ("acme", "2026-04", 1),
    ]
    spans = {(row.tenant, row.date): (row.start, row.end) for row in rows}
    assert spans["globex", "2026-03"] == (
        datetime(2026, 3, 1, 8, tzinfo=UTC),
        datetime(2026, 4, 1, 7, tzinfo=UTC),
    )


async def test_filters_and_groups_of_every_dimension(db: Database, db_url: str) -> None:
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    model, project = add_model(db_url, acme), uuid7()
    add_usage(db_url, acme, NOON, model=model, project_id=project)
    add_usage(db_url, acme, NOON)
    add_usage(db_url, globex, NOON)
    cases: list[tuple[str, Any, int]] = [
        ("tenant_id", acme.tenant_id, 2),
        ("project_id", project, 1),
        ("key_id", globex.key_id, 1),
        ("model", model.name, 1),
        ("deployment_id", model.deployment_id, 1),
        ("adapter_version_id", model.adapter_version_id, 1),
        ("price_book_id", STANDARD_BOOK, 3),
    ]
    await rolled_up(db)

    for name, value, requests in cases:
        for width in ("1d", "1h"):
            day = {"start": NOON - timedelta(hours=1), "end": NOON + timedelta(hours=1)}
            only = UsageFilter(**{name: value})
            rows = (await report(db, bucket_width=width, only=only, group_by=(name,), **day)).rows
            assert {getattr(row, name) for row in rows} == {value}, (name, width)
            assert sum(row.requests for row in rows) == requests
    assert (await report(db, only=UsageFilter(project_id=uuid7()))).rows == []
    # Days do not know revisions: tests/platform/metering asks minutes and hours for those.
    assert {name for name, _, _ in cases} == set(usage.GROUPS) - {"revision_id"}


async def test_short_buckets_cover_little_time(db: Database) -> None:
    for width, days in (("1m", 2), ("1h", 8)):
        span = {"start": NOON, "end": NOON + timedelta(days=days)}
        assert (await report(db, bucket_width=width, **span)).rows == []
        with pytest.raises(InvalidRequestError, match=f"at most {days} days"):
            await report(
                db, bucket_width=width, start=NOON, end=NOON + timedelta(days=days, seconds=1)
            )


async def test_what_is_open_is_not_final(db: Database, db_url: str) -> None:
    acme = await add_customer(db)
    add_usage(db_url, acme, NOON)
    end = NOON + timedelta(days=3)
    assert (await report(db, end=end)).final_until == end

    as_owner(
        db_url,
        "insert into requests (id, tenant_id, price_book_id, endpoint, model, is_stream, owner,"
        " lease_until, admitted_at, est_prompt_tokens, est_completion_tokens, est_pico)"
        " values (gen_random_uuid(), %s, %s, 'x', 'm', false, 'gw', now(), %s, 1, 1, 1)",
        acme.tenant_id,
        STANDARD_BOOK,
        NOON + timedelta(days=1),
    )

    assert (await report(db, end=end)).final_until == NOON + timedelta(days=1)
    other = await report(db, end=end, only=UsageFilter(tenant_id=uuid7()))
    assert other.final_until == end


async def test_a_report_reads_no_requests(db: Database, db_url: str) -> None:
    """Plans of the report's statements: rollups, marks and tenants, however much there is."""
    acme = await add_customer(db)
    for number in range(5):
        add_usage(db_url, acme, NOON + timedelta(days=number))
    await rolled_up(db)
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _k: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "usage_daily" in statement:
            statements.append((statement, parameters))

    event.listen(db.engine.sync_engine, "before_cursor_execute", note)
    try:
        for width in ("1d", "1mo"):
            page = await report(db, bucket_width=width, group_by=("tenant_id", "model"))
            assert sum(row.requests for row in page.rows) == 5
    finally:
        event.remove(db.engine.sync_engine, "before_cursor_execute", note)

    assert len(statements) == 2
    async with db.engine.connect() as connection:
        # Of a table of five rows Postgres would rather read all than use its index.
        await connection.exec_driver_sql("set enable_seqscan = off")
        for statement, parameters in statements:
            explain = f"explain (analyze, format json) {statement}"
            [plan] = (await connection.exec_driver_sql(explain, parameters)).scalar_one()
            assert _relations(plan["Plan"]) <= {"usage_daily", "rollup_dirty", "tenants"}
            assert _calls(plan["Plan"]) == [0]  # of loraplex_usage_of, which would read them


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]


def _relations(plan: dict[str, Any]) -> set[str]:
    """Those that were read, but for the ledger's few lines of adapter-hours, by their own index."""
    return {
        node["Relation Name"]
        for node in _nodes(plan)
        if "Relation Name" in node
        and node["Actual Loops"]
        and "tenant_id_day" not in node.get("Index Name", "")
    }


def _calls(plan: dict[str, Any]) -> list[int]:
    return [
        node["Actual Loops"]
        for node in _nodes(plan)
        if node.get("Function Name") == "loraplex_usage_of"
    ]


async def test_a_member_sees_its_tenants_usage_only(db: Database, db_url: str) -> None:
    from loraplex_platform.db.tenant_scope import enter_tenants

    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    seen: list[set[UUID | None]] = []
    for customer in (acme, globex):
        add_usage(db_url, customer, NOON)
    for _ in range(2):  # live, then rolled up
        async with db.sessions() as session:
            await enter_tenants(session, [acme.tenant_id])
            page = await report_usage(
                session,
                UsageQuery(
                    start=NOON - timedelta(days=1),
                    end=NOON + timedelta(days=1),
                    group_by=("tenant_id",),
                ),
            )
            seen.append({row.tenant_id for row in page.rows})
        await rolled_up(db)

    assert seen == [{acme.tenant_id}, {acme.tenant_id}]


async def test_the_runtime_role_may_not_change_a_rollup_by_hand(db: Database) -> None:
    from sqlalchemy import exc

    async with db.sessions() as session:
        with pytest.raises(exc.ProgrammingError, match="permission denied"):
            await session.execute(text("update usage_daily set requests = 0"))
