"""Postgres, broken in each way that a check knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from loraplex_platform.db import migrate
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.doctor.database import judge_version
from loraplex_platform.ids import format_id
from loraplex_platform.metering import service
from loraplex_platform.metering.invariant_runs import check_and_keep
from psycopg import sql

from tests.platform.doctor.conftest import Ask
from tests.support.metering import add_customer, reservation, run_sql, settlement
from tests.support.postgres import database_settings, serving_url

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

NAMES = (
    "database.reachable",
    "database.version",
    "database.login",
    "database.schema",
    "database.clock",
    "database.time_zones",
)


def as_owner(url: str, statement: str) -> None:
    """With the owner's login, and no trigger in the way."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute(statement)  # type: ignore[call-overload] # ours


@pytest.fixture
def own_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The owner's URL of a database to break."""
    with postgres_server.clone() as url:
        yield url


async def test_a_sound_database_has_nothing_wrong(ask: Ask, postgres_url: str) -> None:
    found = {
        name: await ask(name, LORAPLEX_DATABASE_URL=serving_url(postgres_url)) for name in NAMES
    }

    assert {name: one.status for name, one in found.items()} == dict.fromkeys(NAMES, "ok")
    assert "as loraplex_serve" in found["database.reachable"].found


async def test_no_database_at_all_is_said_once_and_the_rest_is_skipped(ask: Ask) -> None:
    url = "postgresql://loraplex@127.0.0.1:1/loraplex"

    found = {name: await ask(name, LORAPLEX_DATABASE_URL=url) for name in NAMES}

    first = found.pop("database.reachable")
    assert first.status == "fail"
    assert "refused" in first.found
    assert first.remedy is not None
    assert "start Postgres" in first.remedy
    assert {one.status for one in found.values()} == {"skipped"}
    assert "see database.reachable" in found["database.version"].found


@pytest.mark.parametrize("name", NAMES)
async def test_nothing_configured_is_skipped_and_says_what_to_set(ask: Ask, name: str) -> None:
    found = await ask(name)

    assert found.status == "skipped"
    assert "LORAPLEX_DATABASE_URL is not set" in found.found


def test_an_old_postgres_is_refused() -> None:
    assert judge_version(130_011).status == "fail"
    assert judge_version(130_011).found == "13.11"
    assert judge_version(140_000).status == "ok"
    assert judge_version(180_003).found == "18.3"


async def test_the_owners_login_is_warned_of(ask: Ask, postgres_url: str) -> None:
    found = await ask("database.login", LORAPLEX_DATABASE_URL=postgres_url)

    assert found.status == "warn"
    assert "can rewrite ledger and audit log" in found.found
    assert found.remedy is not None
    assert "LORAPLEX_SERVE_ROLE=loraplex_serve" in found.remedy


async def test_a_login_that_may_not_serve_is_named(
    ask: Ask, own_url: str, postgres_server: PostgresServer
) -> None:
    del postgres_server
    with psycopg.connect(own_url, autocommit=True) as connection:
        connection.execute("create role a_stranger login")
    try:
        from loraplex_platform.variables import with_login

        found = await ask("database.login", LORAPLEX_DATABASE_URL=with_login(own_url, "a_stranger"))
    finally:
        with psycopg.connect(own_url, autocommit=True) as connection:
            connection.execute("drop role a_stranger")

    assert found.status == "fail"
    assert found.found == "a_stranger is no member of loraplex_app"
    assert found.remedy is not None
    assert "grant loraplex_app" in found.remedy


async def test_a_schema_that_is_behind_or_ahead_is_told_apart(ask: Ask, own_url: str) -> None:
    first = list(migrate.scripts().walk_revisions())[-1].revision
    with psycopg.connect(own_url, autocommit=True) as connection:
        connection.execute("update alembic_version set version_num = %s", [first])
    behind = await ask("database.schema", LORAPLEX_DATABASE_URL=own_url)
    with psycopg.connect(own_url, autocommit=True) as connection:
        connection.execute("update alembic_version set version_num = 'from_tomorrow'")
    ahead = await ask("database.schema", LORAPLEX_DATABASE_URL=own_url)

    assert (behind.status, ahead.status) == ("fail", "fail")
    assert f"behind (found {first}" in behind.found
    assert behind.remedy is not None
    assert "loraplex migrate" in behind.remedy
    assert "ahead (found from_tomorrow" in ahead.found
    assert ahead.remedy is not None
    assert "the release that migrated it" in ahead.remedy


async def test_an_empty_database_needs_migrate(ask: Ask, postgres_server: PostgresServer) -> None:
    with postgres_server.empty() as url:
        schema = await ask("database.schema", LORAPLEX_DATABASE_URL=url)
        outbox = await ask("books.outbox", LORAPLEX_DATABASE_URL=url)

    assert schema.status == "fail"
    assert "found none" in schema.found
    assert outbox.status == "skipped"
    assert "see database.login and database.schema" in outbox.found


@pytest.mark.parametrize(
    ("interval", "status", "side"),
    [
        ("20 seconds", "warn", "20 s behind"),
        ("-20 seconds", "warn", "20 s ahead of"),
        ("10 minutes", "fail", "600 s behind"),
    ],
)
async def test_clocks_that_differ(
    ask: Ask, own_url: str, interval: str, status: str, side: str
) -> None:
    name = own_url.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(own_url, autocommit=True) as connection:
        # A server whose clock is wrong, for whoever asks it without naming pg_catalog.
        connection.execute(
            sql.SQL(
                "create function public.clock_timestamp() returns timestamptz language sql as"
                " 'select pg_catalog.clock_timestamp() + interval ''{}'''"
            ).format(sql.SQL(interval))
        )
        connection.execute(
            sql.SQL("alter database {} set search_path = public, pg_catalog").format(
                sql.Identifier(name)
            )
        )

    found = await ask("database.clock", LORAPLEX_DATABASE_URL=own_url)

    assert found.status == status
    assert side in found.found
    assert found.remedy is not None
    assert "timedatectl set-ntp true" in found.remedy


async def test_a_tenants_unknown_time_zone(ask: Ask, db: Database, db_url: str) -> None:
    await add_customer(db)
    # As after a restore to a server with other time zone data; a trigger refuses it otherwise.
    as_owner(db_url, "update tenants set billing_tz = 'Mars/Olympus'")

    found = await ask("database.time_zones", LORAPLEX_DATABASE_URL=serving_url(db_url))

    assert found.status == "fail"
    assert found.found == "tenants use Mars/Olympus, which is not known"


async def test_a_postgres_without_time_zone_data(ask: Ask, own_url: str) -> None:
    name = own_url.partition("?")[0].rpartition("/")[2]
    with psycopg.connect(own_url, autocommit=True) as connection:
        connection.execute("create table public.pg_timezone_names (name text)")
        connection.execute("grant select on public.pg_timezone_names to loraplex_app")
        connection.execute(
            sql.SQL("alter database {} set search_path = public, pg_catalog").format(
                sql.Identifier(name)
            )
        )

    found = await ask("database.time_zones", LORAPLEX_DATABASE_URL=own_url)

    assert found.status == "fail"
    assert "Postgres knows 0 time zones" in found.found


# ------------------------------------------------------------------------------------ the books


async def test_books_that_were_never_checked_then_hold_then_are_broken_then_old(
    ask: Ask, db: Database, db_url: str
) -> None:
    url = serving_url(db_url)
    never = await ask("books.invariants", LORAPLEX_DATABASE_URL=url)
    await check_and_keep(db.sessions, "worker")
    holds = await ask("books.invariants", LORAPLEX_DATABASE_URL=url)
    as_owner(db_url, "update invariant_runs set checked_at = now() - interval '5 hours'")
    old = await ask("books.invariants", LORAPLEX_DATABASE_URL=url)
    # The engine says that it made more than was billed.
    wanted = reservation(await add_customer(db))
    await service.reserve(db.sessions, wanted)
    await service.settle(db.sessions, settlement(wanted.request_id))
    as_owner(
        db_url,
        "insert into engine_usage (request_id, attempt, replica_id, tenant_id, finish_reason,"
        " prompt_tokens, cached_tokens, completion_tokens, ended_at)"
        " select id, 1, 'replica-1', tenant_id, 'stop', 10, 0, 99, now() from requests",
    )
    await check_and_keep(db.sessions, "worker")
    broken = await ask("books.invariants", LORAPLEX_DATABASE_URL=url)

    assert (never.status, holds.status, old.status) == ("warn", "ok", "warn")
    assert "5 h ago" in old.found
    assert broken.status == "fail"
    assert "broken" in broken.found
    assert broken.remedy is not None
    assert "loraplex reconcile" in broken.remedy


async def test_leases_that_nobody_settles(ask: Ask, db: Database, db_url: str) -> None:
    url = serving_url(db_url)
    wanted = reservation(await add_customer(db))
    await service.reserve(db.sessions, wanted)
    running = await ask("books.leases", LORAPLEX_DATABASE_URL=url)
    await run_sql(db, "update requests set lease_until = now() - interval '10 minutes'")
    stuck = await ask("books.leases", LORAPLEX_DATABASE_URL=url)

    assert running.status == "ok"
    assert stuck.status == "fail"
    assert "1 requests" in stuck.found
    assert format_id("request", wanted.request_id) in stuck.found


async def test_an_outbox_that_waits_and_one_that_gave_up(
    ask: Ask, db: Database, db_url: str
) -> None:
    url = serving_url(db_url)
    add = (
        "insert into outbox (topic, dedupe_key, payload, created_at, dead_at) values"
        " ('alert', :key, '{}', now() - interval '20 minutes', :dead)"
    )
    empty = await ask("books.outbox", LORAPLEX_DATABASE_URL=url)
    await run_sql(db, add, key="a", dead=None)
    waits = await ask("books.outbox", LORAPLEX_DATABASE_URL=url)
    await run_sql(db, "update outbox set dead_at = now() where topic = 'alert'")
    dead = await ask("books.outbox", LORAPLEX_DATABASE_URL=url)

    assert (empty.status, waits.status, dead.status) == ("ok", "warn", "fail")
    assert "1 of alert, the oldest for 20 min" in waits.found
    assert dead.remedy is not None
    assert "loraplex outbox --revive alert" in dead.remedy


async def test_processes_that_have_given_no_sign(ask: Ask, db: Database, db_url: str) -> None:
    url = serving_url(db_url)
    engines = await ask("fleet.engines", LORAPLEX_DATABASE_URL=url)
    gateways = await ask("fleet.gateways", LORAPLEX_DATABASE_URL=url)
    worker = await ask("fleet.worker", LORAPLEX_DATABASE_URL=url)
    await run_sql(
        db,
        "insert into gateways (gateway_id, started_at, last_seen_at)"
        " values ('gw-1', now() - interval '1 hour', now() - interval '9 minutes')",
    )
    await run_sql(
        db,
        "insert into replicas (replica_id, record, last_seen_at)"
        " values ('engine-1', '{}', now() - interval '3 hours')",
    )
    long_ago = [
        await ask(f"fleet.{name}", LORAPLEX_DATABASE_URL=url)
        for name in ("engines", "gateways", "worker")
    ]
    await run_sql(db, "update gateways set last_seen_at = now()")
    await run_sql(db, "update replicas set last_seen_at = now()")
    fresh = [
        await ask(f"fleet.{name}", LORAPLEX_DATABASE_URL=url)
        for name in ("engines", "gateways", "worker")
    ]

    assert {engines.status, gateways.status, worker.status} == {"fail"}
    assert [one.status for one in long_ago] == ["fail"] * 3
    assert "engine-1, 3 h ago" in long_ago[0].found
    assert "9 min ago" in long_ago[1].found
    # Seen by the worker only: Redis, where engines say that they are there, is not configured.
    assert [one.status for one in fresh] == ["warn", "ok", "ok"]


async def test_a_model_that_is_not_the_registered_one(
    ask: Ask, db: Database, db_url: str, tmp_path: object
) -> None:
    from pathlib import Path

    from loraplex_platform.db import BaseModel
    from loraplex_platform.ids import uuid7
    from loraplex_platform.registry.base_model import read_base_model

    from tests.support.tiny_fleet import BASE, write_model

    assert isinstance(tmp_path, Path)
    folder = write_model(tmp_path)
    variables = {
        "LORAPLEX_DATABASE_URL": serving_url(db_url),
        "LORAPLEX_MODEL_DIR": str(folder),
        "LORAPLEX_BASE_MODEL": BASE,
    }
    unknown = await ask("model.registered", **variables)
    facts = read_base_model(folder, BASE)
    # Only the owner's login may: a control API registers through a function of its own.
    async with (
        open_database(database_settings(db_url, database_role=None)) as owner,
        owner.transaction() as session,
    ):
        session.add(
            BaseModel(
                id=uuid7(),
                name=BASE,
                revision=facts.revision,
                tokenizer_sha256=facts.tokenizer_sha256,
                chat_template_sha256=facts.chat_template_sha256,
                architecture=facts.architecture,
            )
        )
    known = await ask("model.registered", **variables)
    template = folder / "tokenizer_config.json"
    template.write_text(template.read_text().replace("chat_template", "a_chat_template", 1))
    (folder / "chat_template.jinja").write_text("{{ 'hello' }}")
    changed = await ask("model.registered", **variables)

    assert (unknown.status, known.status, changed.status) == ("skipped", "ok", "fail")
    assert "chat template in" in changed.found
