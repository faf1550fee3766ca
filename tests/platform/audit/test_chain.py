"""The audit log's hash chain: what it proves, and that it costs no deadlock."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.audit.service import SYSTEM, record
from loraplex_platform.db.audit import NO_TENANT
from loraplex_platform.db.session import Database
from loraplex_platform.ids import uuid7
from loraplex_platform.metering.invariants import Check, check_invariants
from psycopg.rows import dict_row

from tests.support.metering import add_customer


async def write(db: Database, tenant_id: UUID | None, *names: str) -> None:
    async with db.transaction() as session:
        for name in names:
            record(
                session,
                SYSTEM,
                "thing.change",
                "thing",
                name,
                tenant_id=tenant_id,
                detail={"b": 1, "aa": "ü", "nested": {"x": [1, 2.5, None]}},
                before={"name": "old"},
                after={"name": name},
            )
            await session.flush()


def rows_of(url: str, chain: UUID) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        return connection.execute(
            "select * from audit_log where chain = %s order by seq", [chain]
        ).fetchall()


def as_owner(url: str, statement: str, *parameters: object) -> None:
    """Whoever owns the database can switch triggers off; the chain is there to show it."""
    with psycopg.connect(url) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute(statement, parameters)


async def i10(db: Database, **options: Any) -> Check:
    report = await check_invariants(db.sessions, **options)
    broken = [check.name for check in report.checks if not check.ok]
    assert broken in ([], ["audit_chain_is_unbroken"]), "nothing else turns red"
    return next(check for check in report.checks if check.code == "I10")


def canonical(value: Any) -> str:
    """jsonb as Postgres writes it: keys by length, then by bytes."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
        return "{" + ", ".join(f"{canonical(key)}: {canonical(value[key])}" for key in keys) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(canonical, value)) + "]"
    if isinstance(value, UUID):
        value = str(value)
    return json.dumps(value, ensure_ascii=False)


async def test_rows_are_linked_in_the_order_of_commits_and_anybody_can_recompute_it(
    db: Database, db_url: str
) -> None:
    tenant_id = (await add_customer(db)).tenant_id
    await write(db, tenant_id, "first", "second")
    await write(db, None, "of the platform")
    await write(db, tenant_id, "third")

    rows = rows_of(db_url, tenant_id)
    previous = hashlib.sha256(f"loraplex audit {tenant_id}".encode()).digest()
    for place, row in enumerate(rows, 1):
        epoch = datetime.fromtimestamp(0, row["at"].tzinfo)
        names = ["actor_kind", "actor_id", "request_id", "action", "object_kind", "object_id"]
        names += ["tenant_id", "detail", "before", "after", "chain", "seq", "id"]
        content = {name: row[name] for name in names}
        since_epoch = row["at"] - epoch
        content["at_us"] = (
            since_epoch.days * 86_400 + since_epoch.seconds
        ) * 1_000_000 + since_epoch.microseconds
        digest = hashlib.sha256(previous + canonical(content).encode()).digest()
        assert (row["seq"], row["prev_hash"], row["hash"]) == (place, previous, digest)
        previous = digest
    assert [row["object_id"] for row in rows] == ["first", "second", "third"]
    assert len(rows_of(db_url, NO_TENANT)) == 1
    assert (await i10(db)).ok


async def test_who_inserts_chooses_neither_time_nor_place(db: Database, db_url: str) -> None:
    with psycopg.connect(db_url) as connection:
        connection.execute("set role loraplex_app")
        connection.execute(
            "insert into audit_log (id, at, actor_kind, action, object_kind, detail, chain, seq,"
            " prev_hash, hash) values (%s, '2001-01-01', 'system', 'x', 'x', '{}', %s, 7, 'x', 'x')",
            [uuid7(), uuid7()],
        )
        connection.commit()
        for statement in (
            "update audit_log set action = 'y'",
            "delete from audit_log",
            "truncate audit_log",
            "update audit_heads set seq = 0",
            "insert into audit_heads values (gen_random_uuid(), 1, 'x', 1, 'x')",
            "delete from audit_heads",
            "select loraplex_audit_link(gen_random_uuid())",
            "alter table audit_log disable trigger all",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
            connection.rollback()
            connection.execute("set role loraplex_app")

    [row] = rows_of(db_url, NO_TENANT)
    assert (row["seq"], row["at"].year > 2001) == (1, True)
    assert (await i10(db)).ok


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("update audit_log set object_id = 'other' where seq = 2", "was changed"),
        ("update audit_log set at = at - interval '1 day' where seq = 2", "was changed"),
        ("update audit_log set after = null where seq = 2", "was changed"),
        ("delete from audit_log where seq = 1", "does not follow"),
        ("delete from audit_log where seq = 3", "does not follow"),
        ("delete from audit_log where seq = 5", "rows are missing"),
        ("delete from audit_log where seq >= 4", "rows are missing"),
        ("delete from audit_log", "rows are missing"),
        (
            "update audit_log set seq = 102 where seq = 2;"
            "update audit_log set seq = 2 where seq = 3;"
            "update audit_log set seq = 3 where seq = 102",
            "was changed",
        ),
        ("delete from audit_heads", "has no head"),
        (
            "insert into audit_log (id, actor_kind, action, object_kind, detail, chain)"
            " values (gen_random_uuid(), 'system', 'x', 'x', '{}',"
            " '00000000-0000-0000-0000-000000000000')",
            "was never linked",
        ),
        # Forged as well as the owner of the database can: linked to the newest row, but past the head.
        (
            "insert into audit_log (id, actor_kind, action, object_kind, detail, chain, seq, prev_hash)"
            " select gen_random_uuid(), 'system', 'x', 'x', '{}', chain, 6, hash from audit_log"
            " where seq = 5; update audit_log a set hash = loraplex_audit_digest(a) where seq = 6",
            "added past the head",
        ),
    ],
)
async def test_every_tampering_is_found(
    db: Database, db_url: str, statement: str, told: str
) -> None:
    for name in "abcde":
        await write(db, None, name)
    assert (await i10(db)).ok

    with psycopg.connect(db_url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        for part in statement.split(";"):
            connection.execute(part)  # type: ignore[arg-type] # a test's own text

    check = await i10(db)
    assert not check.ok
    assert told in check.detail


async def test_a_change_before_the_looked_at_time_is_left_to_the_full_check(
    db: Database, db_url: str
) -> None:
    await write(db, None, "a", "b")
    with psycopg.connect(db_url) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("update audit_log set at = at - interval '3 days'")
        # As honest old rows are: hashed with the time that they have.
        for seq in (1, 2):
            connection.execute(
                "update audit_log a set prev_hash = coalesce((select hash from audit_log p"
                " where p.seq = a.seq - 1), prev_hash) where seq = %s",
                [seq],
            )
            connection.execute(
                "update audit_log a set hash = loraplex_audit_digest(a) where seq = %s", [seq]
            )
        connection.execute(
            "update audit_heads set hash = (select hash from audit_log where seq = 2)"
        )
    assert (await i10(db)).ok
    since = datetime.now().astimezone()

    as_owner(db_url, "update audit_log set action = 'other' where seq = 1")

    assert (await i10(db, since=since)).ok
    assert not (await i10(db)).ok


async def test_writers_of_several_chains_in_any_order_never_deadlock(
    db: Database, db_url: str
) -> None:
    tenants = [(await add_customer(db, f"t{number}")).tenant_id for number in range(3)]

    async def change(number: int) -> None:
        # Audit rows first, and the rows that they are about after them, in an order of each one's own:
        # with heads locked at insert this is a deadlock at once.
        order = tenants[number % 3 :] + tenants[: number % 3]
        if number % 2:
            order.reverse()
        async with db.transaction() as session:
            for tenant_id in [*order, None]:
                record(session, SYSTEM, "x", "x", None, tenant_id=tenant_id)
                await session.flush()
                await asyncio.sleep(0)

    await asyncio.gather(*(change(number) for number in range(40)))

    for chain in [*tenants, NO_TENANT]:
        assert [row["seq"] for row in rows_of(db_url, chain)] == list(range(1, 41))
    assert (await i10(db)).ok


async def test_what_is_rolled_back_leaves_no_gap(db: Database, db_url: str) -> None:
    await write(db, None, "kept")
    async with db.sessions() as session:
        record(session, SYSTEM, "x", "x", "lost")
        await session.flush()
        await session.rollback()
    await write(db, None, "kept too")

    assert [(row["seq"], row["object_id"]) for row in rows_of(db_url, NO_TENANT)] == [
        (1, "kept"),
        (2, "kept too"),
    ]
    assert (await i10(db)).ok
