"""Single statements: one round trip, repeated once after a broken connection, and after a lost race."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.db import calls
from loraplex_platform.db.errors import DatabaseUnavailableError
from loraplex_platform.db.session import open_database
from sqlalchemy import QueuePool, event

from tests.support.postgres import database_settings, serving_url, until_in_statement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database

_PID = "select pg_backend_pid() where %(n)s > 0"


def _cut(db_url: str) -> None:
    with psycopg.connect(db_url, autocommit=True) as owner:
        owner.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )


async def test_a_statement_commits_by_itself(db: Database, db_url: str) -> None:
    row = await db.sessions.calls.call(
        "insert into login_throttle values (%(name)s, now(), %(n)s) returning subject, failures",
        {"name": "x", "n": 3},
    )

    assert row == ("x", 3)
    with psycopg.connect(db_url) as owner:
        assert owner.execute("select failures from login_throttle").fetchone() == (3,)


async def test_numbers_of_any_size_are_one_prepared_statement(db: Database) -> None:
    pids = set()
    for number in (1, 40_000, 2**40):
        pids.add(await db.sessions.calls.call(_PID, {"n": number}))
    [(count,)] = {
        await db.sessions.calls.call(
            "select count(*) from pg_prepared_statements where statement like %(like)s",
            {"like": "%pg_backend_pid() where%"},
        )
    }

    assert len(pids) == 1, "an idle connection is used again"
    assert count == 1


async def test_a_connection_that_was_cut_is_replaced_without_anybody_noticing(
    db: Database, db_url: str
) -> None:
    async def pid() -> int:
        number: int = (await db.sessions.calls.call("select pg_backend_pid(), pg_sleep(0.05)", {}))[
            0
        ]
        return number

    before = set(await asyncio.gather(*(pid() for _ in range(4))))
    _cut(db_url)

    after = set(await asyncio.gather(*(pid() for _ in range(4))))

    assert len(before) == 4
    assert before.isdisjoint(after)


async def test_one_that_was_idle_for_long_is_the_pools_to_judge(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[object] = []
    pool = db.sessions.calls._engine.sync_engine.pool
    event.listen(pool, "checkout", lambda *_: lent.append(1))
    now_s = 1000.0
    monkeypatch.setattr(calls, "monotonic", lambda: now_s)
    for _ in range(2):
        await db.sessions.calls.call("select 1", {})
    num_borrowed = len(lent)
    now_s += calls.KEPT_S
    await db.sessions.calls.call("select 1", {})

    assert (num_borrowed, len(lent)) == (1, 2)


async def test_a_server_that_is_away_is_unavailable() -> None:
    settings = database_settings("postgresql://postgres@/loraplex?host=/nowhere")
    async with open_database(settings) as database:
        with pytest.raises(DatabaseUnavailableError):
            await database.sessions.calls.call("select 1", {})


async def test_a_statement_that_hangs_is_cut_and_its_connection_used_again(db_url: str) -> None:
    settings = database_settings(serving_url(db_url), database_pool_size=1)
    async with open_database(settings, statement_timeout_s=0.05) as database:
        with pytest.raises(DatabaseUnavailableError):
            await database.sessions.calls.call("select pg_sleep(5)", {})

        assert await database.sessions.calls.call("select 1", {}) == (1,)


async def test_who_is_cancelled_leaves_no_connection_midway(db: Database, db_url: str) -> None:
    asking = asyncio.create_task(db.sessions.calls.call("select pg_sleep(30)", {}))
    await until_in_statement(db_url, "pg_sleep(30)")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert await db.sessions.calls.call("select 2", {}) == (2,)


async def test_a_lost_race_is_run_again_and_not_for_ever(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_TRIES", 3)
    tries = 0
    once = db.sessions.calls._once

    async def lose(query: str, parameters: dict[str, object]) -> calls.Row:
        nonlocal tries
        tries += 1
        if tries in (1, 2, 4, 5, 6):
            raise psycopg.errors.DeadlockDetected
        return await once(query, parameters)

    monkeypatch.setattr(db.sessions.calls, "_once", lose)

    assert await db.sessions.calls.call("select 1", {}) == (1,)
    assert tries == 3
    with pytest.raises(psycopg.errors.DeadlockDetected):
        await db.sessions.calls.call("select 1", {})
    assert tries == 6


async def test_a_statement_at_fault_is_not_repeated(db: Database) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await db.sessions.calls.call("select 1 / %(zero)s", {"zero": 0})

    assert await db.sessions.calls.call("select 1", {}) == (1,)


async def test_who_waits_for_a_connection_gets_the_next_one_that_is_free(db_url: str) -> None:
    settings = database_settings(serving_url(db_url), database_pool_size=2)
    async with open_database(settings) as database:
        slow = "select pg_backend_pid(), pg_sleep(0.05)"

        pids = await asyncio.gather(*(database.sessions.calls.call(slow, {}) for _ in range(9)))

    assert len({pid for pid, _ in pids}) == 2


async def test_a_connection_goes_back_to_the_pool_now_and_then(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.sessions.calls.call(_PID, {"n": 1})
    pool = db.sessions.calls._engine.pool
    assert isinstance(pool, QueuePool)
    num_kept = pool.checkedout()

    monkeypatch.setattr(calls, "KEPT_S", 0.0)
    await db.sessions.calls.call(_PID, {"n": 1})

    assert (num_kept, pool.checkedout()) == (1, 0)
