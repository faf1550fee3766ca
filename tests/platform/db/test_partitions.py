from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.db.session import Database
from loraplex_platform.ids import uuid7, uuid7_floor
from loraplex_platform.metering import queries as metering_queries
from loraplex_platform.metering import service
from loraplex_platform.worker import queries

from tests.support.metering import add_customer, reservation, settlement

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer


def _unix_ms(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc] # a date's parts


def _children(url: str, parent: str) -> dict[str, str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select c.relname, pg_get_expr(c.relpartbound, c.oid) from pg_inherits i"
            " join pg_class c on c.oid = i.inhrelid where i.inhparent = %s::regclass",
            [parent],
        )
        return dict(rows.fetchall())


@pytest.mark.parametrize("unix_ms", [0, 1, 1_764_000_000_123, 2**47])
def test_the_database_computes_the_same_floor(db_url: str, unix_ms: int) -> None:
    with psycopg.connect(db_url) as connection:
        row = connection.execute(
            "select loraplex_uuid7_floor(timestamptz 'epoch' + %s * interval '1 ms')", [unix_ms]
        ).fetchone()

    assert row == (uuid7_floor(unix_ms),)


def test_last_this_and_the_next_months_have_partitions_with_utc_bounds(db_url: str) -> None:
    now = datetime.now(UTC)
    for parent in ("requests", "ledger", "attempts", "engine_usage"):
        children = _children(db_url, parent)

        assert children.pop(f"{parent}_default") == "DEFAULT"
        assert len(children) == 4
        bounds = children[f"{parent}_y{now:%Y}m{now:%m}"]
        year, month = (now.year + now.month // 12, now.month % 12 + 1)
        lower = uuid7_floor(_unix_ms(now.year, now.month, 1))
        upper = uuid7_floor(_unix_ms(year, month, 1))
        assert bounds == f"FOR VALUES FROM ('{lower}') TO ('{upper}')"


async def test_the_worker_makes_what_is_missing_and_moves_what_came_early(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex_platform.db.session import open_database

    from tests.support.postgres import database_settings

    now = datetime.now(UTC)
    year, month = divmod(now.year * 12 + now.month - 1 + 4, 12)
    early = uuid7(_unix_ms(year, month + 1, 15))
    monkeypatch.setattr(
        metering_queries, "MAX_CLOCK_SKEW_S", 1e10
    )  # such an id is not admitted now
    with postgres_server.clone() as url:
        async with open_database(database_settings(url)) as db:
            customer = await add_customer(db)
            await service.reserve(db.sessions, reservation(customer, request_id=early))
            await service.settle(db.sessions, settlement(early))
            assert _tables_of(url, early) == [
                "attempts_default",
                "ledger_default",
                "requests_default",
            ]

            async with db.transaction() as session:
                made = await queries.make_partitions(session, 5)
            async with db.transaction() as session:
                again = await queries.make_partitions(session, 5)

            name = f"y{year}m{month + 1:02}"
            assert (made, again) == (3 * 4, 0)
            assert _tables_of(url, early) == [
                f"attempts_{name}",
                f"ledger_{name}",
                f"requests_{name}",
            ]
            # What was moved is still one request: it cannot be reserved or settled again.
            assert not (await service.settle(db.sessions, settlement(early))).applied
            with pytest.raises(Exception, match="months_ahead"):
                async with db.transaction() as session:
                    await queries.make_partitions(session, 1000)


def _tables_of(url: str, request_id: UUID) -> list[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select tableoid::regclass::text from requests where id = %(id)s"
            " union all select tableoid::regclass::text from ledger where entry_id = %(id)s"
            " union all select tableoid::regclass::text from attempts where request_id = %(id)s",
            {"id": request_id},
        )
        return sorted(name for (name,) in rows)


@pytest.mark.parametrize(
    "statement",
    [
        "select * from requests where id = %(id)s",
        "update requests set state = 'voided' where id = %(id)s and lease_token = 1",
        "select * from ledger where entry_id = %(id)s",
        "select sum(amount_pico) from ledger where entry_id >= %(id)s and entry_id < %(next)s",
        "select * from requests where tenant_id = %(id)s and id >= %(id)s and id < %(next)s"
        " order by id desc limit 20",
    ],
)
def test_partitions_are_pruned(db_url: str, statement: str) -> None:
    now = datetime.now(UTC)
    unix_ms = _unix_ms(now.year, now.month, 10)
    parameters = {"id": uuid7_floor(unix_ms), "next": uuid7_floor(unix_ms + 86_400_000)}

    with psycopg.connect(db_url) as connection:
        # An empty table that has been analyzed is cheapest to scan; the question is whether it can
        # be found by index.
        connection.execute("set enable_seqscan = off")
        plan = "\n".join(
            row[0] for row in connection.execute(f"explain {statement}", parameters).fetchall()
        )

    assert f"_y{now:%Y}m{now:%m}" in plan
    assert "_default" not in plan
    assert plan.count("_y") == plan.count(f"_y{now:%Y}m{now:%m}")
    assert "Index" in plan or "Bitmap" in plan


async def test_leases_due_are_found_by_the_partial_index(db: Database, db_url: str) -> None:
    customer = await add_customer(db)
    for _ in range(3):
        await service.reserve(db.sessions, reservation(customer))
    with psycopg.connect(db_url) as connection:
        connection.execute("set enable_seqscan = off")
        plan = "\n".join(
            row[0]
            for row in connection.execute(
                "explain select id from requests where state = 'reserved' and lease_until < now()"
            ).fetchall()
        )

    assert "lease_until_idx" in plan
