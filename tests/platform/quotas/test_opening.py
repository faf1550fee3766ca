"""A quota that is set while requests come and go: exact, and nobody waits for the counting."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.billing.rollups import RollupWorker
from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.errors import ConflictError
from loraplex_platform.ids import uuid7_floor
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.quotas import opening, queries
from loraplex_platform.quotas.errors import QuotaExceededError
from sqlalchemy import event, text

from tests.support.limits import all_limits, remove_limit, set_limit, use_of
from tests.support.metering import Customer, add_customer, reservation, run_sql, settlement
from tests.support.traffic import Caller, add_traffic

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database
    from sqlalchemy import Connection

Step = Callable[[], Awaitable[None]]

METRICS = ("requests", "tokens_in", "tokens_out", "tokens_total", "cost")
PERIODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("day", {}),
    ("month", {}),
    ("total", {}),
    ("rolling", {"window_hours": 48}),
)
SCOPES = ("tenant", "key", "platform")


class Traffic:
    """Requests of some customers that begin and end as a seed has it."""

    def __init__(self, db: Database, customers: list[Customer], seed: int) -> None:
        self.db = db
        self.customers = customers
        self.random = random.Random(seed)
        self.running: list[UUID] = []

    async def go_on(self, steps: int) -> None:
        """So many beginnings and ends."""
        for _ in range(steps):
            if not self.running or self.random.random() < 0.5:
                wanted = reservation(
                    self.random.choice(self.customers), est_completion_tokens=90, endpoint="chat"
                )
                await service.reserve(self.db.sessions, wanted)
                self.running.append(wanted.request_id)
            else:
                await self.end(self.random.choice(self.running))

    async def end(self, request_id: UUID) -> None:
        """Settled or voided; faults are nobody's use."""
        self.running.remove(request_id)
        if self.random.random() < 0.2:
            await service.void(self.db.sessions, request_id, 1, voided_by="test")
            return
        outcome = self.random.choice(["completed", "completed", "aborted", "fault"])
        await service.settle(
            self.db.sessions,
            settlement(
                request_id,
                usage_outcome=outcome,
                usage_generated=self.random.randrange(90),
                usage_cached_tokens=self.random.randrange(10),
            ),
        )

    async def make_old(self, db_url: str, age: timedelta) -> None:
        """Let one that runs have begun earlier."""
        request_id = self.running.pop()
        at = datetime.now(UTC) - age
        old_id = UUID(int=uuid7_floor(int(at.timestamp() * 1000)).int | self.random.getrandbits(62))
        with psycopg.connect(db_url) as owner:
            owner.execute(
                "update requests set id = %s, admitted_at = %s where id = %s",
                (old_id, at, request_id),
            )
        self.running.append(old_id)


async def add_history(db: Database, db_url: str, customers: list[Customer], seed: int) -> None:
    """Five days, most of them rolled up, one of which is marked again; and today's."""
    now = datetime.now(UTC)
    callers = [Caller(customer, None) for customer in customers]
    for days_ago, is_rolled_up in ((5, True), (1, False)):
        add_traffic(
            db_url,
            callers,
            rows=200,
            start=now - timedelta(days=days_ago),
            end=now - timedelta(days=days_ago - 1, minutes=20),
            seed=seed,
        )
        while is_rolled_up and await RollupWorker(db.sessions).run_once():
            pass
    with psycopg.connect(db_url) as owner:
        # As of gateways whose clocks are off: their ids say other minutes than the database.
        owner.execute(
            "update requests set admitted_at = admitted_at + make_interval(mins =>"
            " abs(hashtext(id::text)) % 19 - 9) where id >= loraplex_uuid7_floor(now() - '1 day'::interval)"
        )
        owner.execute(
            "insert into rollup_dirty select distinct tenant_id, admitted_at::date + n"
            " from requests, generate_series(-1, 1) n"
        )
    await run_sql(
        db,
        "insert into rollup_dirty select tenant_id, min(day) from usage_daily group by tenant_id",
    )


def in_pieces_of(monkeypatch: pytest.MonkeyPatch, lines: int, rollup_rows: int) -> None:
    """Let few rows be as many as a statement may read."""
    monkeypatch.setattr(opening, "FIRST_LINES", lines)
    monkeypatch.setattr(opening, "MOST_LINES", 4 * lines)
    monkeypatch.setattr(opening, "ROLLUP_ROWS", rollup_rows)


def between_steps(monkeypatch: pytest.MonkeyPatch, before: Step, after: Step) -> None:
    """Do something between opening and counting, and something between counting and closing."""
    count = opening.count

    async def counted(*arguments: Any) -> dict[int, int]:
        await before()
        used = await count(*arguments)
        await after()
        return used

    monkeypatch.setattr(opening, "count", counted)


async def broken(db: Database) -> list[str]:
    report = await check_invariants(db.sessions)
    # History comes without windows' journals.
    names = {"windows_equal_the_books", "hard_quotas_are_kept", "rollups_equal_the_ledger"}
    return [f"{c.name}: {c.detail}" for c in report.checks if c.name in names and not c.ok]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
async def test_whatever_begins_and_ends_meanwhile_is_counted_once(
    db: Database, db_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    if seed % 2:
        in_pieces_of(monkeypatch, lines=1 + seed, rollup_rows=seed // 2)
    customers = [await add_customer(db, name) for name in ("acme", "globex")]
    await run_sql(db, "update tenants set billing_tz = 'America/New_York' where slug = 'acme'")
    await add_history(db, db_url, customers, seed)
    traffic = Traffic(db, customers, seed)
    await traffic.go_on(8)
    while not traffic.running:
        await traffic.go_on(1)
    await traffic.make_old(db_url, timedelta(hours=30))
    between_steps(monkeypatch, lambda: traffic.go_on(4), lambda: traffic.go_on(4))

    for period, fields in PERIODS:
        for scope in traffic.random.sample(SCOPES, 2):
            metric = traffic.random.choice(METRICS)
            wanted = {**fields, "scope_kind": scope}
            limit_id = await set_limit(db, customers[0], metric, "99999999", period, **wanted)
            assert await broken(db) == []
            if traffic.random.random() < 0.3:
                # What comes while there is none is counted when it is set again.
                await remove_limit(db, limit_id)
                await traffic.go_on(3)
                await set_limit(db, customers[0], metric, "99999999", period, **wanted)
                assert await broken(db) == []
    while traffic.running:
        await traffic.end(traffic.running[0])

    assert await broken(db) == []
    async with db.sessions() as session:
        assert await session.scalar(text("select sum(held) from quota_windows")) == 0


async def test_requests_are_admitted_while_a_quota_is_counted_and_it_holds_afterwards(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer = await add_customer(db)
    for _ in range(3):
        await settle_one(db, customer)
    is_counting, may_go_on = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        is_counting.set()
        await may_go_on.wait()

    between_steps(monkeypatch, pause, nothing)

    setting = asyncio.create_task(set_limit(db, customer, "requests", "5", "month"))
    await is_counting.wait()
    for _ in range(2):
        await settle_one(db, customer)
    still_counting = not setting.done()
    may_go_on.set()
    limit_id = await setting

    assert still_counting
    assert await use_of(db, limit_id) == (5, 0)
    with pytest.raises(QuotaExceededError):
        await settle_one(db, customer)


async def test_an_opening_that_was_broken_off_does_nothing_and_can_be_done_again(
    db: Database, db_url: str
) -> None:
    customer = await add_customer(db)
    await settle_one(db, customer)
    what = opening.Counted(
        tenant_id=customer.tenant_id,
        scope_kind="tenant",
        scope_id=customer.tenant_id,
        metric="requests",
        period="total",
        window_s=0,
    )
    await opening.open_windows(db.sessions, what)  # and then its process died
    await settle_one(db, customer)

    async with db.sessions() as session:
        assert (await session.scalars(queries.limits_of(None))).all() == []
        assert not await opening.is_counted(session, what)
    assert await broken(db) == []
    limit_id = await set_limit(db, customer, "requests", "2", "total")

    assert await use_of(db, limit_id) == (2, 0)
    assert [limit.is_opening for limit in await all_limits(db)] == [False]
    assert await broken(db) == []


async def test_openings_that_were_broken_off_are_purged(db: Database, db_url: str) -> None:
    what = opening.Counted(
        tenant_id=None,
        scope_kind="platform",
        scope_id=NO_SCOPE_ID,
        metric="cost",
        period="rolling",
        window_s=86_400,
    )
    opened = await opening.open_windows(db.sessions, what)
    async with db.transaction() as session:
        await queries.purge(session)
    assert len(await all_limits(db)) == 1
    with psycopg.connect(db_url) as owner:
        owner.execute("update limits set created_at = created_at - interval '2 hours'")
    async with db.transaction() as session:
        await queries.purge(session)

    assert await all_limits(db) == []
    async with db.transaction() as session:
        with pytest.raises(ConflictError, match="set the limit again"):
            await opening.close(session, opened, {})


async def test_a_second_limit_of_the_same_windows_counts_nothing_again(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    customer = await add_customer(db)
    await settle_one(db, customer)
    await set_limit(db, customer, "requests", "9", "month")
    await settle_one(db, customer)

    async def fail() -> None:
        raise AssertionError("it was counted again")

    between_steps(monkeypatch, fail, nothing)
    limit_id = await set_limit(db, customer, "requests", "5", "month", hard=False)

    assert await use_of(db, limit_id) == (2, 0)


async def test_two_who_set_the_same_quota_at_once_set_it_once(db: Database) -> None:
    customer = await add_customer(db)
    await settle_one(db, customer)

    results = await asyncio.gather(
        *(set_limit(db, customer, "requests", "9", "day") for _ in range(3)),
        return_exceptions=True,
    )

    limit_ids = [result for result in results if isinstance(result, UUID)]
    assert len(limit_ids) == 1
    assert all(isinstance(r, UUID | ConflictError) for r in results), results
    assert await use_of(db, limit_ids[0]) == (1, 0)


_READ = """
select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) from pg_stat_xact_user_tables
where relname like 'ledger%%' or relname like 'requests%%' or relname = 'usage_daily'
"""


def rows_read_by_each(db: Database, counts: list[int]) -> None:
    """Of ledger, requests and rollups, by Postgres's own count, for each statement of a transaction."""

    def count(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        if statement != _READ:
            total = int(connection.exec_driver_sql(_READ).scalar_one())
            counts.append(total - sum(counts))

    event.listen(db.engine.sync_engine, "after_cursor_execute", count)


@pytest.mark.parametrize("period", ["total", "rolling"])
@pytest.mark.parametrize("scope", SCOPES)
async def test_no_statement_reads_more_for_a_tenant_that_has_more(
    db: Database, db_url: str, monkeypatch: pytest.MonkeyPatch, scope: str, period: str
) -> None:
    """A busy tenant's million may be of a few minutes, or of a day that waits for its rollup."""
    customer = await add_customer(db)
    at = datetime.now(UTC) - timedelta(hours=30)
    add_traffic(
        db_url, [Caller(customer, None)], rows=2000, start=at, end=at + timedelta(seconds=50)
    )
    scope_id = {"tenant": customer.tenant_id, "key": customer.key_id, "platform": NO_SCOPE_ID}[
        scope
    ]
    what = opening.Counted(
        tenant_id=None if scope == "platform" else customer.tenant_id,
        scope_kind=scope,
        scope_id=scope_id,
        metric="requests",
        period=period,
        window_s=48 * 3600 if period == "rolling" else 0,
    )
    in_pieces_of(monkeypatch, lines=50, rollup_rows=50)
    opened = await opening.open_windows(db.sessions, what)
    counts: list[int] = []
    async with db.sessions() as session:
        rows_read_by_each(db, counts)
        used = await opening.count(session, opened)

    assert 1800 < sum(used.values()) < 2000  # some are faults
    # A line, its request, and their windows' few.
    assert max(counts) <= 2.5 * opening.MOST_LINES, counts


@pytest.mark.parametrize("seed", range(20))
def test_every_moment_is_in_one_stretch_and_those_near_a_bound_in_one_that_asks(seed: int) -> None:
    draw = random.Random(seed)
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    length = timedelta(minutes=draw.choice([2, 15, 30, 60, 1440]))
    starts = [now - n * length + timedelta(minutes=1) for n in range(25, -1, -1)]
    windows = [
        SimpleNamespace(id=n, period_start=at, period_end=at + length)
        for n, at in enumerate(starts)
    ]
    opened = opening.Opening(
        what=opening.Counted(
            tenant_id=None,
            scope_kind="platform",
            scope_id=NO_SCOPE_ID,
            metric="cost",
            period="rolling",
            window_s=int(24 * length.total_seconds()),
        ),
        limit_id=NO_SCOPE_ID,
        window_ids=[window.id for window in windows],
        first_at=starts[0],
        opened_at=now,
        held_since=now - timedelta(minutes=draw.choice([11, 12, 500])),
    )

    stretches = list(opening._stretches(opened, windows, starts[0]))  # type: ignore[arg-type] # rows

    skew = timedelta(minutes=10)
    assert stretches[0].first_at <= starts[0] - skew
    assert stretches[-1].end_at >= now + skew
    for one, following in itertools.pairwise(stretches):
        assert one.first_at < one.end_at == following.first_at
    for one in stretches:
        if one.window_id is not None:
            window = windows[one.window_id]
            assert window.period_start <= one.first_at - skew
            assert one.end_at + skew <= window.period_end
            assert one.end_at <= opened.held_since
    if length > timedelta(hours=12):
        assert any(one.window_id is not None for one in stretches)


async def settle_one(db: Database, customer: Customer) -> None:
    wanted = reservation(customer)
    await service.reserve(db.sessions, wanted)
    await service.settle(db.sessions, settlement(wanted.request_id))


async def nothing() -> None:
    """Between steps."""
