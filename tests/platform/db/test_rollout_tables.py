"""The tables of rollouts: what a tenant's transaction may see and write of them, and rows across migrations."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from loraplex_platform.db import migrate
from loraplex_platform.db.migration_sql import edit_function, reverted
from loraplex_platform.db.session import open_database
from loraplex_platform.db.tenant_scope import enter_tenants
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service
from loraplex_platform.metering.invariants import check_invariants
from sqlalchemy import create_engine, text
from sqlalchemy.exc import ProgrammingError

from tests.support.billing import STANDARD_BOOK, Model, add_model, as_owner
from tests.support.metering import Customer, add_customer, reservation, rows_of, settlement
from tests.support.postgres import database_settings, serving_url
from tests.support.revisions import add_build, add_revision, add_rollout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loraplex_platform.db.session import Database

    from tests.support.postgres import PostgresServer

BY_TENANT = (
    "adapter_aliases",
    "adapter_alias_events",
    "pins",
    "pin_events",
    "rollouts",
    "rollout_events",
    "resident_adapters",
)


def add_rest(url: str, customer: Customer, model: Model, revision_id: UUID) -> None:
    """An alias that the deployment follows, a pin and a resident adapter."""
    as_owner(
        url,
        "insert into adapter_aliases (adapter_id, alias, tenant_id, version_id)"
        " values (%s, 'live', %s, %s)",
        *(model.adapter_id, customer.tenant_id, model.adapter_version_id),
    )
    as_owner(
        url,
        "update deployments set followed_adapter_id = %s, followed_alias = 'live' where id = %s",
        *(model.adapter_id, model.deployment_id),
    )
    as_owner(
        url,
        "insert into pins (tenant_id, deployment_id, revision_id, reason, created_by)"
        " values (%s, %s, %s, 'r', 'c')",
        *(customer.tenant_id, model.deployment_id, revision_id),
    )
    as_owner(
        url,
        "insert into resident_adapters select tenant_id, id, digest, 'r', 'c'"
        " from adapter_versions where id = %s",
        model.adapter_version_id,
    )


def add_platforms(url: str) -> tuple[UUID, UUID]:
    """The platform's own deployment in a rollout; both ids."""
    deployment_id, base_id, first = uuid7(), uuid7(), uuid7()
    as_owner(
        url,
        "insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256,"
        " architecture) values (%s, 'the-base', 'r', 't', 'c', '{}')",
        base_id,
    )
    as_owner(
        url,
        "insert into deployments (id, public_name, base_model_id) values (%s, 'the-base', %s)",
        *(deployment_id, base_id),
    )
    as_owner(
        url,
        "insert into deployment_revisions (id, deployment_id, number, base_model_id, params, sha256)"
        " values (%s, %s, 1, %s, '{}', 'x')",
        *(first, deployment_id, base_id),
    )
    as_owner(
        url,
        "update deployments set current_revision_id = %s where id = %s",
        *(first, deployment_id),
    )
    canary = add_revision(url, deployment_id, engine_build_id=add_build(url, "fp", base_id))
    return deployment_id, add_rollout(url, deployment_id, canary)


async def refused(db: Database, tenant_id: UUID, statement: str, **parameters: Any) -> str:
    """Why a tenant's transaction may not."""
    async with db.sessions() as session:
        await enter_tenants(session, [tenant_id])
        with pytest.raises(ProgrammingError) as caught:
            await session.execute(text(statement), parameters)
    return str(caught.value.orig)


async def test_a_tenant_sees_its_own_and_the_platforms_rollouts_and_no_others(
    db: Database, db_url: str
) -> None:
    mine, theirs = await add_customer(db, "acme"), await add_customer(db, "globex")
    for customer in (mine, theirs):
        model = add_model(db_url, customer)
        canary = add_revision(db_url, model.deployment_id)
        add_rest(db_url, customer, model, canary)
        add_rollout(db_url, model.deployment_id, canary)
    _, platforms = add_platforms(db_url)

    seen: dict[str, set[UUID | None]] = {}
    async with db.sessions() as session:
        await enter_tenants(session, [mine.tenant_id])
        for table in BY_TENANT:
            rows = await session.execute(text(f"select tenant_id from {table}"))
            seen[table] = {tenant_id for (tenant_id,) in rows}
        told = await session.scalar(
            text("select message from rollout_events where rollout_id = :id"), {"id": platforms}
        )
        builds = (await session.scalars(text("select fingerprint from engine_builds"))).all()

    for table, tenant_ids in seen.items():
        platform: set[UUID | None] = {None} if table.startswith("rollout") else set()
        assert tenant_ids == {mine.tenant_id} | platform, table
    assert told == "It began."
    assert builds == ["fp"]


async def test_a_tenant_changes_no_rollout_but_its_own_and_no_history(
    db: Database, db_url: str
) -> None:
    mine, theirs = await add_customer(db, "acme"), await add_customer(db, "globex")
    made = {}
    for customer in (mine, theirs):
        model = add_model(db_url, customer)
        canary = add_revision(db_url, model.deployment_id)
        add_rest(db_url, customer, model, canary)
        made[customer] = add_rollout(db_url, model.deployment_id, canary)
    _, platforms = add_platforms(db_url)

    async with db.sessions() as session:
        await enter_tenants(session, [mine.tenant_id])
        changed = (
            await session.scalars(text("update rollouts set is_paused = true returning id"))
        ).all()
        moved = (
            await session.scalars(text("update pins set reason = 'x' returning tenant_id"))
        ).all()
        await session.commit()

    assert changed == [made[mine]]
    assert moved == [mine.tenant_id]
    # The trigger writes what the role may not.
    [(noted,)] = as_owner(db_url, "select count(*) from pin_events where reason = 'x'")
    assert noted == 1
    event = (
        "insert into rollout_events (rollout_id, seq, tenant_id, kind, actor, message, detail)"
        " values (:rollout, 9, :tenant, 'paused', 'a', 'm', '{}')"
    )
    for rollout, tenant_id in ((made[theirs], theirs.tenant_id), (platforms, None)):
        why = await refused(db, mine.tenant_id, event, rollout=rollout, tenant=tenant_id)
        assert "row-level security" in why
    for statement in (
        "delete from rollouts",
        "delete from rollout_events",
        "update rollout_events set message = 'x'",
        "insert into pin_events (tenant_id, deployment_id) select tenant_id, deployment_id from pins",
        "update adapter_alias_events set alias = 'x'",
        "delete from pin_events",
        "update engine_builds set fingerprint = 'x'",
        "update resident_adapters set reason = 'x'",
        "select * from price_books",
    ):
        assert "permission denied" in await refused(db, mine.tenant_id, statement), statement


async def test_rows_of_the_release_before_outlive_the_migration(
    postgres_server: PostgresServer,
) -> None:
    with postgres_server.empty() as url:
        settings = database_settings(url)
        migrate.upgrade(settings, "0015")
        customer = Customer(uuid7(), uuid7(), "")
        as_owner(
            url,
            "insert into tenants (id, slug, name) values (%s, 'acme', 'Acme')",
            customer.tenant_id,
        )
        as_owner(
            url,
            "insert into api_keys (id, tenant_id, name, public_id, last4) values (%s, %s, 'k', 'p', 'l')",
            *(customer.key_id, customer.tenant_id),
        )
        model = add_model(url, customer)
        done, open_ = uuid7(), uuid7()
        for request_id in (done, open_):
            as_owner(
                url,
                "select loraplex_reserve(%s, %s, %s, %s, null, %s, 'user', 'chat.completions', 'm',"
                " false, false, 'gw-1', 'replica-1', 1, 600, 10, 100, 1, 1,"
                " extract(epoch from now())::float8, 600)",
                *(request_id, customer.tenant_id, customer.key_id, model.deployment_id),
                model.adapter_version_id,
            )
        as_owner(
            url,
            "select loraplex_settle(%s, 1, 'user', 'gw-1', 'revenue', 1, 'replica-1', 'completed',"
            " 'terminal', 10, 0, 20, 20, 0, 0, 0, null, 'stop', 200, null, 1, 2)",
            done,
        )

        migrate.upgrade(settings)

        async with open_database(database_settings(serving_url(url))) as db:
            request, _, [entry] = await rows_of(db, done)
            assert (request.state, request.arm, request.sampling) == ("settled", None, None)
            assert (entry.revision_id, int(entry.amount_pico)) == (None, 10 * 30_000 + 20 * 60_000)
            # What was in progress meanwhile ends as it would have.
            result = await service.settle(db.sessions, settlement(open_, fingerprint="fp"))
            assert (result.applied, result.amount_pico) == (True, int(entry.amount_pico))
            request, _, _ = await rows_of(db, open_)
            assert request.fingerprint == "fp"
            report = await check_invariants(db.sessions)
            assert [c for c in report.checks if c.code in ("I1", "I2", "I9") and not c.ok] == []


async def test_with_rollouts_under_way_it_goes_down_and_up_again_and_the_books_hold(
    postgres_server: PostgresServer,
) -> None:
    with postgres_server.clone() as url:
        settings = database_settings(url)
        async with open_database(database_settings(serving_url(url))) as db:
            customer = await add_customer(db)
            model = add_model(url, customer)
            canary = add_revision(url, model.deployment_id, price_book_id=STANDARD_BOOK)
            add_rest(url, customer, model, canary)
            rollout = add_rollout(url, model.deployment_id, canary, step=0)
            ids = []
            for kind in ("user", "probe", "shadow"):
                wanted = reservation(
                    customer,
                    kind=kind,
                    key_id=customer.key_id if kind == "user" else None,
                    deployment_id=model.deployment_id,
                    revision_id=canary,
                    adapter_version_id=model.adapter_version_id,
                    rollout_id=rollout,
                    rollout_step=0,
                    arm="shadow" if kind == "shadow" else "stable",
                    sampling={"temperature": 1.0},
                )
                await service.reserve(db.sessions, wanted)
                await service.settle(db.sessions, settlement(wanted.request_id, kind=kind))
                ids.append(wanted.request_id)
        before = as_owner(
            url, "select entry_id, account, amount_pico from ledger order by entry_id"
        )

        migrate.downgrade(settings, "0015")

        kinds = as_owner(url, "select id, kind from requests order by id")
        assert dict(kinds) == dict(zip(ids, ("user", "probe", "probe"), strict=True))
        migrate.upgrade(settings)
        migrate.compare_with_models(settings)
        assert before == as_owner(
            url, "select entry_id, account, amount_pico from ledger order by entry_id"
        )
        async with open_database(database_settings(serving_url(url))) as db:
            report = await check_invariants(db.sessions)
            assert [c for c in report.checks if c.code in ("I1", "I2", "I9") and not c.ok] == []


# ---------------------------------------------------------------------------- edit_function


@contextmanager
def migrating(url: str) -> Iterator[psycopg.Connection]:
    """As within a migration of the schema's owner, undone in the end; a connection in the same transaction."""
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection)
            with Operations.context(context):
                yield connection.connection.driver_connection  # type: ignore[misc]
            connection.rollback()
    finally:
        engine.dispose()


def define(
    connection: psycopg.Connection, body: str = "select 1 + 1", parameters: str = ""
) -> None:
    connection.execute(
        f"create function zz_sum({parameters}) returns integer language sql as '{body}'".encode()
    )


def sums(connection: psycopg.Connection, call: str = "zz_sum()") -> Any:
    row = connection.execute(f"select {call}".encode()).fetchone()
    assert row is not None
    return row[0]


def test_a_function_is_edited_and_back(db_url: str) -> None:
    edits = (("1 + 1", "1 + 2"), ("select 1", "select 10"))
    with migrating(db_url) as connection:
        define(connection)

        edit_function("zz_sum", *edits)
        assert sums(connection) == 12

        edit_function("zz_sum", *reverted(*edits))
        assert sums(connection) == 2


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (("2 + 2", "3"), "has 0 times, not once: 2 \\+ 2"),
        (("1", "3"), "has [2-9] times, not once: 1"),
    ],
)
def test_a_text_that_is_not_there_exactly_once_changes_nothing(
    db_url: str, edit: tuple[str, str], why: str
) -> None:
    with migrating(db_url) as connection:
        define(connection)

        # Nor does the one before it, which fits.
        with pytest.raises(LookupError, match=why):
            edit_function("zz_sum", ("select", "select 5 *"), edit)

        assert sums(connection) == 2


def test_no_function_and_two_of_a_name_are_refused(db_url: str) -> None:
    with migrating(db_url) as connection:
        with pytest.raises(LookupError, match="no function is called zz_sum"):
            edit_function("zz_sum", ("a", "b"))
        define(connection)
        define(connection, parameters="a integer")

        with pytest.raises(LookupError, match="2 functions are called zz_sum"):
            edit_function("zz_sum", ("1 + 1", "3"))


def test_other_parameters_replace_the_function_unless_it_has_rights_to_lose(db_url: str) -> None:
    more = (("zz_sum()", "zz_sum(a integer)"), ("1 + 1", "1 + a"))
    with migrating(db_url) as connection:
        define(connection)

        edit_function("zz_sum", *more)

        assert sums(connection, "zz_sum(6)") == 7
        [(count,)] = connection.execute(
            "select count(*) from pg_proc where proname = 'zz_sum'"
        ).fetchall()
        assert count == 1
    with migrating(db_url) as connection:
        define(connection)
        connection.execute("revoke execute on function zz_sum() from public")

        with pytest.raises(ValueError, match="rights of its own"):
            edit_function("zz_sum", *more)


def test_what_is_edited_keeps_its_rights_and_its_settings(db_url: str) -> None:
    query = "select prosecdef, proacl::text, proconfig from pg_proc where proname = 'loraplex_erase_tenant'"
    with migrating(db_url) as connection:
        before = connection.execute(query).fetchone()
        assert before is not None
        assert before[0]
        assert "loraplex_app" in before[1]

        edit_function("loraplex_erase_tenant", ("'Deleted tenant'", "'Gone'"))

        assert connection.execute(query).fetchone() == before
