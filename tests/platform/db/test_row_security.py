"""A tenant's transaction sees that tenant, whatever its queries forget: kept by Postgres itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from loraplex_platform.db import (
    ApiKey,
    ApiKeySecret,
    Deployment,
    Invitation,
    Membership,
    Project,
    Tenant,
    User,
)
from loraplex_platform.db.tenant_scope import enter_tenants, leave_tenants
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service as metering
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import ProgrammingError

from tests.support.metering import Customer, add_customer, reservation, settlement

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database
    from sqlalchemy.ext.asyncio import AsyncSession


@dataclass(frozen=True, slots=True)
class World:
    """Two tenants with the same kinds of rows, and the database they share."""

    db: Database
    mine: Customer
    theirs: Customer

    @asynccontextmanager
    async def as_mine(self) -> AsyncIterator[AsyncSession]:
        async with self.db.sessions() as session:
            await enter_tenants(session, [self.mine.tenant_id])
            yield session


@pytest.fixture
async def world(db: Database) -> World:
    customers = [await add_customer(db, slug) for slug in ("acme", "globex")]
    for customer in customers:
        wanted = reservation(customer)
        await metering.reserve(db.sessions, wanted)
        await metering.settle(db.sessions, settlement(wanted.request_id))
        tenant_id = customer.tenant_id
        user = User(id=uuid7(), email=f"{tenant_id.hex}@example.com", password_hash="h")
        async with db.transaction() as session:
            session.add(user)
            await session.flush()
            session.add(Membership(tenant_id=tenant_id, user_id=user.id, role="owner"))
            session.add(Project(id=uuid7(), tenant_id=tenant_id, name="p"))
            session.add(
                Invitation(
                    id=uuid7(),
                    tenant_id=tenant_id,
                    email="a@example.com",
                    role="viewer",
                    token_mac=tenant_id.bytes,
                    expires_at=func.now(),
                )
            )
    return World(db, *customers)


def guarded_tables(db_url: str) -> dict[str, tuple[bool, set[str]]]:
    """Tables with a tenant_id: whether row-level security is on, and the roles of their policies."""
    query = """
        select c.relname, c.relrowsecurity,
            array(select unnest(roles)::text from pg_policies p where p.tablename = c.relname)
        from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attname = 'tenant_id'
        where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and not c.relispartition
    """
    with psycopg.connect(db_url) as connection:
        rows = connection.execute(query).fetchall()
    return {name: (is_on, set(roles)) for name, is_on, roles in rows}


def test_every_table_with_a_tenant_is_guarded(db_url: str) -> None:
    tables = guarded_tables(db_url)

    assert {"api_keys", "requests", "ledger", "memberships", "audit_log"} <= set(tables)
    unguarded = {
        name
        for name, (is_on, roles) in tables.items()
        if not is_on or not {"loraplex_app", "loraplex_tenant"} <= roles
    }
    assert unguarded == set(), "call loraplex_guard_tenant_table in the table's migration"


def test_the_tenants_role_reads_nothing_that_has_no_policy(db_url: str) -> None:
    query = """
        select c.relname from pg_class c
        where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
            and not c.relrowsecurity
            and has_any_column_privilege('loraplex_tenant', c.oid, 'select')
    """
    with psycopg.connect(db_url) as connection:
        rows = connection.execute(query).fetchall()

    # They are about nobody.
    public = {"base_models", "engine_builds", "dropped_months", "shared_limits_version"}
    assert {name for (name,) in rows} == public


async def test_a_query_without_a_predicate_finds_no_foreign_row(world: World, db_url: str) -> None:
    seen = {}
    async with world.as_mine() as session:
        for table in guarded_tables(db_url):
            rows = await session.execute(text(f"select tenant_id from {table}"))
            seen[table] = [tenant_id for (tenant_id,) in rows]

    assert world.mine.tenant_id in seen["api_keys"]
    for table in ("api_keys", "requests", "ledger", "attempts", "projects", "memberships"):
        assert seen[table], table  # it is not empty because it sees nothing at all
    for table, tenant_ids in seen.items():
        assert set(tenant_ids) <= {world.mine.tenant_id, None}, table
        assert None not in tenant_ids or table.startswith("deployment"), table


async def test_tables_without_a_tenant_id_show_what_belongs_to_the_tenant(world: World) -> None:
    async with world.as_mine() as session:
        tenants = (await session.scalars(select(Tenant.id))).all()
        secrets = (await session.scalars(select(ApiKeySecret.key_id))).all()
        emails = (await session.scalars(select(User.email))).all()

    assert tenants == [world.mine.tenant_id]
    assert secrets == [world.mine.key_id]
    assert emails == [f"{world.mine.tenant_id.hex}@example.com"]


@pytest.mark.parametrize(
    "query",
    [
        "select mac from api_key_secrets",
        "select password_hash from users",
        "select token_mac from sessions",
        "select * from idempotency",
        "select * from price_items",
        "update ledger set amount_pico = 0",
        "delete from audit_log",
        "update tenants set status = 'active'",
        "update tenants set slug = 'x'",
        "delete from api_keys",
        "select payload from outbox",
        "update users set email = 'x'",
    ],
)
async def test_the_tenants_role_may_not(world: World, query: str) -> None:
    async with world.as_mine() as session:
        with pytest.raises(ProgrammingError, match="permission denied"):
            await session.execute(text(query))


async def test_foreign_rows_can_be_neither_made_nor_changed(world: World) -> None:
    async with world.as_mine() as session:
        statement = update(ApiKey).values(name="mine now").returning(ApiKey.tenant_id)
        changed = (await session.scalars(statement)).all()
        await session.commit()
    assert changed == [world.mine.tenant_id]

    def foreign() -> list[Any]:
        theirs = world.theirs.tenant_id
        return [
            Project(id=uuid7(), tenant_id=theirs, name="x"),
            Membership(tenant_id=theirs, user_id=uuid7(), role="owner"),
            ApiKey(id=uuid7(), tenant_id=theirs, name="x", public_id="x", last4="x"),
            Deployment(id=uuid7(), tenant_id=None, public_name="x", base_model_id=uuid7()),
        ]

    for row in foreign():
        async with world.as_mine() as session:
            session.add(row)
            with pytest.raises(ProgrammingError, match="row-level security"):
                await session.flush()
    async with world.as_mine() as session:
        with pytest.raises(ProgrammingError, match="row-level security"):
            await session.execute(
                text("update projects set tenant_id = :id"), {"id": world.theirs.tenant_id}
            )


async def test_a_secret_is_not_added_to_a_foreign_key(world: World) -> None:
    async with world.as_mine() as session:
        session.add(ApiKeySecret(id=uuid7(), key_id=world.theirs.key_id, mac=b"forged"))
        with pytest.raises(ProgrammingError, match="row-level security"):
            await session.flush()


async def test_a_role_without_its_tenants_sees_nothing(world: World, db_url: str) -> None:
    for ids in (None, [], [uuid7()]):
        async with world.db.sessions() as session:
            if ids is None:
                await session.execute(text("select set_config('role', 'loraplex_tenant', true)"))
            else:
                await enter_tenants(session, ids)
            for table in guarded_tables(db_url):
                if not table.startswith("deployment"):
                    count = await session.scalar(text(f"select count(*) from {table}"))
                    assert count == 0, table


async def test_nothing_is_carried_to_the_next_user_of_the_connection(world: World) -> None:
    async def visible() -> tuple[int, str]:
        async with world.db.sessions() as session:
            tenants = await session.scalar(select(func.count()).select_from(Tenant))
            role = await session.scalar(text("select current_user::text"))
            return int(tenants or 0), str(role)

    for ending in ("commit", "rollback", "crash"):
        try:
            async with world.as_mine() as session:
                assert await session.scalar(select(func.count()).select_from(Tenant)) == 1
                if ending == "crash":
                    raise RuntimeError
                await (session.commit() if ending == "commit" else session.rollback())
                assert await session.scalar(select(func.count()).select_from(Tenant)) == 2
        except RuntimeError:
            pass
        for _ in range(3):
            assert await visible() == (2, "loraplex_app")


async def test_a_request_goes_back_to_the_platforms_role_before_it_keeps_its_reply(
    world: World,
) -> None:
    async with world.db.sessions() as session:
        before = await enter_tenants(session, [world.mine.tenant_id])
        await leave_tenants(session, before)
        assert await session.scalar(text("select current_user::text")) == "loraplex_app"
        assert await session.scalar(select(func.count()).select_from(Tenant)) == 2


async def test_the_platform_sees_all_because_a_policy_says_so(db_url: str, world: World) -> None:
    with psycopg.connect(db_url) as connection:
        connection.execute("drop policy platform on api_keys")
        try:
            connection.execute("set role loraplex_app")
            rows = connection.execute("select id from api_keys").fetchall()
        finally:
            connection.rollback()

    assert rows == []


async def test_policies_cost_the_platform_no_index(db_url: str, world: World) -> None:
    """The gateway's look-up of a key stays one by its unique index."""
    with psycopg.connect(db_url) as connection:
        connection.execute("set role loraplex_app")
        connection.execute("set local enable_seqscan = off")
        rows = connection.execute("explain select * from api_keys where public_id = 'x'").fetchall()

    plan = "\n".join(row[0] for row in rows)
    assert "uq_api_keys_public_id" in plan
    assert "Filter" not in plan
