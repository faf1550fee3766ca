from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.db import Tenant
from loraplex_platform.db.session import (
    Database,
    DatabaseUnavailableError,
    create_sync_database_engine,
    open_database,
)
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.ids import uuid7
from loraplex_platform.local.embedded import start_postgres
from loraplex_platform.local.server_process import EmbeddedServer
from sqlalchemy import exc, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from tests.support.metering import add_customer
from tests.support.pausing import paused
from tests.support.postgres import database_settings

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer


async def test_connections_run_as_the_role_with_a_timeout_in_utc(db: Database) -> None:
    names = "current_user, session_user, current_setting('statement_timeout'), current_setting('timezone')"
    async with db.sessions() as session:
        row = (await session.execute(text(f"select {names}"))).one()

    assert tuple(row) == ("loraplex_app", "loraplex_serve", "15s", "UTC")


@pytest.mark.parametrize(
    "statement",
    [
        "update ledger set amount_pico = 0",
        "delete from ledger",
        "truncate ledger",
        "delete from ledger_default",
        "insert into ledger_default select * from ledger",
        "update attempts set billed = 0",
        "delete from attempts",
        "update engine_usage set completion_tokens = 0",
        "delete from engine_usage",
        "update audit_log set action = 'x'",
        "delete from audit_log",
        "update usage_daily set requests = 0",
        "update rollup_dirty set day = now()",
        "update ledger_reversals set kind = 'usage'",
        "delete from ledger_reversals",
        "update invoice_lines set quantity = 0",
        "delete from invoice_series",
        "update deployment_revisions set params = '{}'",
        "update adapter_versions set digest = ''",
        "delete from requests",
        "delete from tenants",
        "drop table ledger",
        "alter table ledger disable trigger all",
        "create table mine (n int)",
        "create function f() returns int language sql as 'select 1'",
        "update alembic_version set version_num = '0'",
    ],
)
@pytest.mark.parametrize("role", ["loraplex_app", "none"])
async def test_the_serving_role_may_not(db: Database, role: str, statement: str) -> None:
    async with db.sessions() as session:
        await session.execute(text(f"set role {role}"))  # what the options set can be reset
        with pytest.raises(exc.ProgrammingError, match=r"permission denied|must be owner"):
            await session.execute(text(statement))


@pytest.mark.parametrize("statement", ["set role postgres", "set session authorization postgres"])
async def test_the_serving_login_cannot_become_the_owner(db: Database, statement: str) -> None:
    async with db.sessions() as session:
        with pytest.raises(exc.ProgrammingError, match="permission denied"):
            await session.execute(text(statement))


async def test_a_session_that_hangs_is_cut_and_reported_as_unavailable(db_url: str) -> None:
    async with open_database(database_settings(db_url), statement_timeout_s=0.05) as database:
        with pytest.raises(DatabaseUnavailableError):
            async with database.sessions() as session:
                await session.execute(text("select pg_sleep(5)"))


async def test_a_connection_that_was_cut_is_replaced(db: Database, db_url: str) -> None:
    async with db.sessions() as session:
        await session.execute(text("select 1"))
    with psycopg.connect(db_url, autocommit=True) as owner:
        owner.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )

    async with db.sessions() as session:
        assert (await session.execute(text("select 1"))).scalar_one() == 1


async def test_a_connection_cut_in_the_middle_is_unavailable_not_a_bug(
    db: Database, db_url: str
) -> None:
    async with db.sessions() as session:
        pid = (await session.execute(text("select pg_backend_pid()"))).scalar_one()
        with psycopg.connect(db_url, autocommit=True) as owner:
            owner.execute("select pg_terminate_backend(%s)", [pid])

        with pytest.raises(DatabaseUnavailableError):
            await session.execute(text("select 1"))


async def test_too_many_at_once_is_unavailable(
    db_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex_platform.db.session.POOL_TIMEOUT_S", 0.05)
    async with (
        open_database(database_settings(db_url, database_pool_size=1)) as database,
        database.sessions() as first,
        database.sessions() as second,
    ):
        await first.execute(text("select 1"))

        with pytest.raises(DatabaseUnavailableError, match="in use"):
            await second.execute(text("select 1"))


async def test_errors_of_ours_stay_what_they_are(db: Database) -> None:
    await add_customer(db, "acme")

    with pytest.raises(exc.IntegrityError):
        await add_customer(db, "acme")
    with pytest.raises(exc.ProgrammingError, match="nowhere"):
        async with db.sessions() as session:
            await session.execute(text("select * from nowhere"))


def test_the_sync_engine_behaves_the_same(db_url: str) -> None:
    engine = create_sync_database_engine(database_settings(db_url))
    with engine.connect() as connection:
        assert connection.execute(text("select current_user")).scalar_one() == "loraplex_app"
    engine.dispose()
    nowhere = create_sync_database_engine(
        database_settings("postgresql://postgres@/loraplex?host=/nowhere")
    )
    with pytest.raises(DatabaseUnavailableError):
        nowhere.connect()


# ---------------------------------------------------------------------------- transactions


async def test_a_lost_race_is_run_again_with_nothing_left_of_the_first_try(db: Database) -> None:
    tries = 0

    async def work(session: AsyncSession) -> int:
        nonlocal tries
        tries += 1
        session.add(Tenant(id=uuid7(), slug="acme", name="acme"))
        await session.flush()
        if tries < 3:
            await session.execute(text("do $$ begin raise sqlstate '40P01'; end $$"))
        return tries

    assert await run_transaction(db.sessions, work) == 3
    async with db.sessions() as session:
        assert len((await session.scalars(select(Tenant))).all()) == 1


async def test_two_that_lock_crosswise_both_get_through(db: Database) -> None:
    await add_customer(db, "acme")
    await add_customer(db, "globex")
    is_first_round = asyncio.Barrier(2)
    met: set[str] = set()

    async def lock_both(first: str, second: str) -> None:
        async def work(session: AsyncSession) -> None:
            lock = text("update tenants set name = name || '.' where slug = :slug")
            await session.execute(lock, {"slug": first})
            if first not in met:
                met.add(first)
                await is_first_round.wait()
            await session.execute(lock, {"slug": second})

        await run_transaction(db.sessions, work)

    await asyncio.gather(lock_both("acme", "globex"), lock_both("globex", "acme"))

    async with db.sessions() as session:
        names = (await session.scalars(select(Tenant.name).order_by(Tenant.name))).all()
    assert names == ["acme..", "globex.."]


async def test_only_idempotent_work_is_repeated_after_a_cut(db: Database, db_url: str) -> None:
    runs = 0

    async def work(session: AsyncSession) -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            pid = (await session.execute(text("select pg_backend_pid()"))).scalar_one()
            with psycopg.connect(db_url, autocommit=True) as owner:
                owner.execute("select pg_terminate_backend(%s)", [pid])
        await session.execute(text("select 1"))
        return runs

    with pytest.raises(DatabaseUnavailableError):
        await run_transaction(db.sessions, work)
    runs = 0
    assert await run_transaction(db.sessions, work, is_idempotent=True) == 2


# ---------------------------------------------------------------------------- down and back


@pytest.fixture
def own_server(short_tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = start_postgres(short_tmp_path / "pg", is_durable=False)
    yield server
    server.stop()


async def test_after_the_server_was_down_the_same_engine_works_again(
    own_server: EmbeddedServer, short_tmp_path: Path
) -> None:
    settings = database_settings(own_server.url, database_role=None)
    async with open_database(settings) as database:
        async with database.sessions() as session:
            await session.execute(text("select 1"))
        own_server.stop()

        with pytest.raises(DatabaseUnavailableError):
            async with database.sessions() as session:
                await session.execute(text("select 1"))
        again = start_postgres(short_tmp_path / "pg", is_durable=False)
        try:
            async with database.sessions() as session:
                assert (await session.execute(text("select 1"))).scalar_one() == 1
        finally:
            again.stop()


async def test_a_server_that_stands_still_is_unavailable_by_the_deadline(
    own_server: EmbeddedServer,
) -> None:
    settings = database_settings(own_server.url, database_role=None, database_pool_size=2)
    async with open_database(settings, answer_deadline_s=0.3) as database:
        async with database.sessions() as session:
            await session.execute(text("create table kept (n int)"))
            await session.commit()

        for is_at_commit in (False, True):
            async with database.sessions() as session:
                await session.execute(text("insert into kept values (1)"))
                work = session.commit() if is_at_commit else session.execute(text("select 1"))
                with paused(own_server.pid):
                    began_s = time.monotonic()
                    with pytest.raises(DatabaseUnavailableError):
                        await work
                    assert time.monotonic() - began_s < 2.0
        with paused(own_server.pid), pytest.raises(DatabaseUnavailableError):
            async with database.sessions() as session:
                await session.execute(text("select 1"))  # no connection is left, and none is made

        async with database.sessions() as session:
            count = (await session.execute(text("select count(*) from kept"))).scalar_one()
    # What was under way at COMMIT happened or not; the rest did not.
    assert count in (0, 1)


def test_fixtures_lend_databases_that_are_empty_again(postgres_server: PostgresServer) -> None:
    with postgres_server.borrow() as url, psycopg.connect(url) as connection:
        connection.execute(
            "insert into tenants (id, slug, name) values (gen_random_uuid(), 'x', 'x')"
        )
    with postgres_server.borrow() as again, psycopg.connect(again) as connection:
        row = connection.execute("select count(*), (select count(*) from price_items) from tenants")

        assert row.fetchone() == (0, 6)
    assert again == url
