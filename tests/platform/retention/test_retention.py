"""What goes when its time is over, what may not go yet, and what never goes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.audit.service import SYSTEM, record
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.retention import service as retention
from loraplex_platform.retention.queries import drop_audit
from loraplex_platform.retention.service import Due

from tests.platform.control.stand import Stand, error_of
from tests.support.metering import Customer, add_customer, reservation, settlement
from tests.support.postgres import database_settings, serving_url
from tests.support.processes import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import PostgresServer


class World:
    """A database of its own, with a month long past that has requests in it."""

    def __init__(self, db: Database, url: str, customer: Customer) -> None:
        self.db = db
        self.url = url
        self.customer = customer
        now = datetime.now(UTC)
        year, month = divmod(now.year * 12 + now.month - 1 - 20, 12)
        self.month = datetime(year, month + 1, 1, tzinfo=UTC)
        self.suffix = f"_y{self.month:%Y}m{self.month:%m}"

    def owner(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def make_month(self, month: datetime | None = None) -> None:
        """Partitions as they were made in their time."""
        month = month or self.month
        suffix = f"_y{month:%Y}m{month:%m}"
        bounds = self.owner(
            "select loraplex_uuid7_floor(%s), loraplex_uuid7_floor((%s at time zone 'UTC'"
            " + interval '1 month') at time zone 'UTC')",
            month,
            month,
        )[0]
        for parent in ("requests", "attempts", "engine_usage", "ledger"):
            self.owner(
                f"create table {parent}{suffix} partition of {parent}"
                f" for values from ('{bounds[0]}') to ('{bounds[1]}')"
            )

    async def settled(self, *, is_old: bool = False) -> UUID:
        """A settled request, landed in the engine's journal; an old one was made in that month."""
        wanted = reservation(self.customer)
        await service.reserve(self.db.sessions, wanted)
        await service.settle(self.db.sessions, settlement(wanted.request_id))
        request_id = wanted.request_id
        if is_old:
            at = self.month + timedelta(days=10)
            request_id = uuid7(int(at.timestamp() * 1000))
            with psycopg.connect(self.url) as connection:
                # Its rows move to the partitions of their time.
                connection.execute("set session_replication_role = replica")
                for statement in (
                    "update requests set id = %(id)s, admitted_at = %(at)s, settled_at = %(at)s"
                    " where id = %(was)s",
                    "update attempts set request_id = %(id)s, recorded_at = %(at)s"
                    " where request_id = %(was)s",
                    "update ledger set entry_id = %(id)s, occurred_at = %(at)s"
                    " where entry_id = %(was)s",
                    "update rollup_dirty set day = (%(at)s::timestamptz at time zone 'UTC')::date",
                ):
                    connection.execute(
                        statement, {"id": request_id, "was": wanted.request_id, "at": at}
                    )
        self.owner(
            "insert into engine_usage (request_id, attempt, replica_id, tenant_id, finish_reason,"
            " prompt_tokens, cached_tokens, completion_tokens, ended_at)"
            " values (%s, 1, 'replica-1', %s, 'stop', 10, 0, 20, now())",
            request_id,
            self.customer.tenant_id,
        )
        return request_id

    def count(self, table: str) -> int:
        return int(self.owner(f"select count(*) from {table}")[0][0])

    async def requests_rule(self) -> Due:
        async with self.db.sessions() as session:
            return next(due for due in await retention.look(session) if due.name == "requests")


@pytest.fixture
async def world(postgres_server: PostgresServer) -> AsyncIterator[World]:
    with postgres_server.clone() as url:
        async with open_database(database_settings(serving_url(url))) as db:
            world = World(db, url, await add_customer(db))
            world.make_month()
            yield world


async def rolled_up(world: World) -> None:
    world.owner(
        "select loraplex_roll_up(tenant_id, day) from (select distinct * from rollup_dirty) d"
    )
    world.owner("delete from rollup_dirty")


async def test_a_month_goes_whole_and_the_books_still_add_up(world: World) -> None:
    old = await world.settled(is_old=True)
    await rolled_up(world)
    new = await world.settled()
    await rolled_up(world)
    ledger = world.owner("select * from ledger order by entry_id")
    due = await world.requests_rule()
    assert (due.rows, due.months, due.blocked) == (1, (f"{world.month:%Y-%m}",), ())
    assert world.count("requests") == 2, "looking changes nothing"

    done = await retention.clean(world.db.sessions, SYSTEM)

    assert done["requests"] == 1
    tables = world.owner(
        "select tablename from pg_tables where tablename like %s", f"%{world.suffix}"
    )
    assert tables == [(f"ledger{world.suffix}",)]
    assert world.owner("select id from requests") == [(new,)]
    assert world.owner("select request_id from attempts") == [(new,)]
    assert world.owner("select * from ledger order by entry_id") == ledger, "the ledger never goes"
    assert world.owner("select count(*) from ledger where entry_id = %s", old) == [(1,)]
    assert world.count("usage_daily") == 2, "rollups stay"
    report = await check_invariants(world.db.sessions)
    assert [check.name for check in report.checks if not check.ok] == []
    assert (await retention.clean(world.db.sessions, SYSTEM)).get("requests") is None
    assert world.owner("select detail from audit_log where action = 'retention.apply'") == [
        ({"months": 1},)
    ]


async def test_each_month_goes_in_a_transaction_of_its_own(world: World) -> None:
    await world.settled(is_old=True)
    await rolled_up(world)
    world.make_month((world.month + timedelta(days=40)).replace(day=1))

    assert (await retention.clean(world.db.sessions, SYSTEM))["requests"] == 2

    assert world.owner(
        "select requests, attempts, engine_usage from dropped_months order by month"
    ) == [(1, 1, 1), (0, 0, 0)]
    assert world.owner("select count(distinct xmin::text) from dropped_months") == [(2,)]
    assert world.owner("select detail from audit_log where action = 'retention.apply'") == [
        ({"months": 1},),
        ({"months": 1},),
    ]


async def test_gateways_do_not_wait_while_a_month_is_counted(world: World) -> None:
    await world.settled(is_old=True)
    await rolled_up(world)
    with (
        psycopg.connect(world.url) as holder,
        psycopg.connect(world.url, autocommit=True) as gateway,
    ):
        # As long as this lasts the count stands still, as one of many rows does.
        holder.execute(f"lock table attempts{world.suffix} in access exclusive mode")
        task = asyncio.create_task(retention.clean(world.db.sessions, SYSTEM))
        await until(
            lambda: bool(
                world.owner(
                    "select pid from pg_stat_activity where wait_event_type = 'Lock'"
                    " and query = 'select loraplex_drop_month()' and pid <> pg_backend_pid()"
                )
            )
        )
        gateway.execute("set lock_timeout = '500ms'")
        gateway.execute("select from requests where id = gen_random_uuid()")
        gateway.execute("update requests set model = model where id = gen_random_uuid()")
        assert "requests" not in await task, "it waits no longer than two seconds"
        holder.rollback()

    assert (await retention.clean(world.db.sessions, SYSTEM))["requests"] == 1


async def test_a_ledger_row_of_a_dropped_month_is_still_checked_against_its_price(
    world: World,
) -> None:
    await world.settled(is_old=True)
    await rolled_up(world)
    await retention.clean(world.db.sessions, SYSTEM)

    world.owner("update ledger set amount_pico = amount_pico + 1")

    report = await check_invariants(world.db.sessions)
    assert "amount_is_tokens_times_price" in {c.name for c in report.checks if not c.ok}


async def test_a_month_with_something_reserved_or_not_rolled_up_stays(world: World) -> None:
    request_id = await world.settled(is_old=True)
    due = await world.requests_rule()
    assert due.months == ()
    assert due.blocked == (f"{world.month:%Y-%m}: 1 days that are not rolled up",)
    assert "requests" not in await retention.clean(world.db.sessions, SYSTEM)

    await rolled_up(world)
    world.owner(
        "update requests set state = 'reserved', settled_at = null where id = %s", request_id
    )
    due = await world.requests_rule()
    assert due.blocked == (f"{world.month:%Y-%m}: 1 reserved requests",)
    assert "requests" not in await retention.clean(world.db.sessions, SYSTEM)
    assert world.count("requests") == 1


async def test_what_is_younger_than_the_rule_says_stays(world: World) -> None:
    await world.settled(is_old=True)
    await rolled_up(world)
    async with world.db.transaction() as session:
        await retention.set_rule(session, SYSTEM, "requests", None)
    assert await retention.clean(world.db.sessions, SYSTEM) == {}

    age = datetime.now(UTC) - world.month
    async with world.db.transaction() as session:
        await retention.set_rule(session, SYSTEM, "requests", age.days - 15)
    assert (await retention.clean(world.db.sessions, SYSTEM)).get("requests") is None
    async with world.db.transaction() as session:
        await retention.set_rule(session, SYSTEM, "requests", age.days - 40)
    assert (await retention.clean(world.db.sessions, SYSTEM))["requests"] == 1


async def test_the_runtime_role_can_neither_shorten_the_least_nor_drop_by_itself(
    world: World,
) -> None:
    with psycopg.connect(serving_url(world.url), autocommit=True) as connection:
        connection.execute("set role loraplex_app")
        for name, days in (("requests", 61), ("audit_log", 3649), ("ledger", 10_000)):
            with pytest.raises(psycopg.errors.CheckViolation):
                connection.execute("insert into retention_settings values (%s, %s)", [name, days])
        for statement in (
            f"drop table requests{world.suffix}",
            f"drop table ledger{world.suffix}",
            "delete from dropped_months",
            "delete from ledger",
            "delete from attempts",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


@pytest.mark.parametrize("piece", [retention.BATCH, 1])
async def test_the_audit_log_is_cut_at_its_old_end_and_the_rest_stays_proven(
    world: World, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(retention, "BATCH", piece)

    async def write(name: str, tenant_id: UUID | None) -> None:
        async with world.db.transaction() as session:
            record(session, SYSTEM, "x", "x", name, tenant_id=tenant_id)

    def age(*names: str) -> None:
        """As if they had been written eleven years ago, with the hashes of then."""
        with psycopg.connect(world.url) as connection:
            connection.execute("set session_replication_role = replica")
            connection.execute(
                "update audit_log set at = at - interval '11 years' where object_id = any(%s)",
                [list(names)],
            )
            rows = connection.execute("select id, chain from audit_log order by chain, seq")
            for row_id, _ in rows.fetchall():
                connection.execute(
                    "update audit_log a set prev_hash = coalesce((select p.hash from audit_log p"
                    " where p.chain = a.chain and p.seq = a.seq - 1), a.prev_hash) where id = %s",
                    [row_id],
                )
                connection.execute(
                    "update audit_log a set hash = loraplex_audit_digest(a) where id = %s", [row_id]
                )
            connection.execute(
                "update audit_heads h set hash = (select hash from audit_log a"
                " where a.chain = h.chain and a.seq = h.seq)"
            )

    tenant_id = world.customer.tenant_id
    for name in ("a", "b", "c"):
        await write(name, tenant_id)
    await write("p", None)
    age("a", "b", "p")
    assert (await check_invariants(world.db.sessions)).ok
    assert "audit_log" not in await retention.clean(world.db.sessions, SYSTEM), "kept for ever"

    async with world.db.transaction() as session:
        await retention.set_rule(session, SYSTEM, "audit_log", 3650)
    done = await retention.clean(world.db.sessions, SYSTEM)

    assert done["audit_log"] == 3
    left = {row[0] for row in world.owner("select object_id from audit_log")}
    assert left == {"c", "audit_log", "requests"}, "what retention did is in it too"
    await write("d", tenant_id)
    report = await check_invariants(world.db.sessions)
    assert [check.name for check in report.checks if not check.ok] == []
    with psycopg.connect(world.url) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("delete from audit_log where object_id = 'c'")
    report = await check_invariants(world.db.sessions)
    assert [check.code for check in report.checks if not check.ok] == ["I10"]


async def test_whoever_cuts_one_chain_holds_up_no_other_tenant(world: World) -> None:
    other = await add_customer(world.db, "globex")
    async with world.db.transaction() as session:
        record(session, SYSTEM, "x", "x", "old", tenant_id=world.customer.tenant_id)
    async with world.db.transaction() as session:
        await retention.set_rule(session, SYSTEM, "audit_log", 3650)
    world.owner("alter table audit_log disable trigger user")
    world.owner("update audit_log set at = at - interval '11 years' where object_id = 'old'")
    world.owner("alter table audit_log enable trigger user")

    async with world.db.transaction() as cutting:
        assert await drop_audit(cutting, 10) == 1
        async with asyncio.timeout(10), world.db.transaction() as session:
            record(session, SYSTEM, "x", "x", "new", tenant_id=other.tenant_id)

    left = {row[0] for row in world.owner("select object_id from audit_log")}
    assert left == {"audit_log", "new"}


async def test_done_deliveries_old_sessions_and_old_checks_go(world: World) -> None:
    world.owner(
        "insert into webhooks (id, url, topics, secret_box, secret_key_id)"
        " values (%s, 'https://x', '{alert}', 'x', 'x')",
        uuid7(),
    )
    for status, days in (("delivered", 31), ("pending", 31), ("failed", 29)):
        world.owner(
            "insert into webhook_deliveries (id, webhook_id, topic, dedupe_key, payload,"
            " occurred_at, give_up_at, created_at, status, delivered_at)"
            " select gen_random_uuid(), id, 'alert', %s, '{}', now(), now(),"
            " now() - make_interval(days => %s), %s, case when %s = 'delivered' then now() end"
            " from webhooks",
            status,
            days,
            status,
            status,
        )
    for days in (200, 100, 1):
        world.owner(
            "insert into invariant_runs (id, checked_at, checked_by, is_ok, took_ms, report)"
            " values (%s, now() - make_interval(days => %s), 'worker', true, 1, '{}')",
            uuid7(),
            days,
        )

    done = await retention.clean(world.db.sessions, SYSTEM)

    assert done == {"requests": 1, "webhook_deliveries": 1, "invariant_runs": 2}
    left = {row[0] for row in world.owner("select status from webhook_deliveries")}
    assert left == {"pending", "failed"}


async def test_rules_over_http_say_what_is_due_and_changes_are_audited(
    db_url: str, redis_url: str, short_tmp_path: Any
) -> None:
    async with Stand.open(db_url, redis_url, short_tmp_path) as stand:
        admin, viewer = stand.admin, await stand.login("viewer")
        shown = (await viewer.get("/admin/v1/retention")).json()["data"]
        rules = {rule["id"]: rule for rule in shown}
        assert rules["requests"]["keep_days"] == 400
        assert rules["audit_log"]["keep_days"] is None
        assert all(rule["rows_due"] == 0 for rule in shown)

        changed = await admin.put("/admin/v1/retention/requests", json={"keep_days": 100})
        too_short = await admin.put("/admin/v1/retention/requests", json={"keep_days": 30})
        unknown = await admin.put("/admin/v1/retention/ledger", json={"keep_days": 5000})
        forbidden = await viewer.put("/admin/v1/retention/requests", json={"keep_days": 100})
        ran = await admin.post("/admin/v1/retention/runs")
        log = (await admin.get("/admin/v1/audit", params={"action": "retention.*"})).json()["data"]

    assert changed.json()["keep_days"] == 100
    assert "at least 62 days" in error_of(too_short, 400, "invalid_request")["message"]
    assert unknown.status_code == 400
    error_of(forbidden, 403, "permission_denied")
    assert (ran.status_code, ran.json()["deleted"]) == (201, {})
    assert [(entry["before"], entry["after"]) for entry in log] == [
        ({"keep_days": 400}, {"keep_days": 100})
    ]
