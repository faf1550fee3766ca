"""Keys by a piece of their name, and the audit log by its fields: the right rows, nobody else's, by an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
import pytest
from loraplex_platform.audit.log_queries import AuditFilter, entries
from loraplex_platform.db import ApiKey, AuditLog, migrate
from loraplex_platform.db.tenant_scope import enter_tenants
from loraplex_platform.tenancy.key_queries import found_keys
from sqlalchemy import select, text
from sqlalchemy.dialects import postgresql

from tests.support.metering import add_customer
from tests.support.postgres import database_settings

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database
    from sqlalchemy.ext.asyncio import AsyncSession

    from tests.support.postgres import PostgresServer

NUM_KEYS = 1300  # the function walks the newest thousand, and asks the index for the rest
_KEYS = """
insert into api_keys (id, tenant_id, name, public_id, last4, status, revoked_at)
select ('01a00000-0000-7000-8000-' || lpad(to_hex(2 * n + %(odd)s), 12, '0'))::uuid, %(tenant)s,
    case when n %% 500 = 7 then 'Größe_' || n when n < 50 then 'OLD 100%%' else 'key ' || n end,
    %(odd)s || lpad(to_hex(n * 7919), 9, 'x'), '0000', case when n %% 3 = 0 then 'revoked' else 'active' end,
    case when n %% 3 = 0 then now() end
from generate_series(1, %(count)s) n
"""
_AUDIT = """
insert into audit_log (id, actor_kind, actor_id, request_id, action, object_kind, object_id, tenant_id, detail,
    chain, seq, prev_hash, hash)
select gen_random_uuid(), 'user', 'usr_' || n %% 40, 'req_' || n,
    case n when 7 then 'key.revoke' else 'key_create' end, case n when 7 then 'adapter' else 'api_key' end,
    'obj_' || n, %(tenant)s, '{}', %(tenant)s, n, '\\x00', '\\x00'
from generate_series(1, 3000) n
"""


@dataclass(frozen=True, slots=True)
class World:
    db: Database
    mine: UUID
    theirs: UUID


@pytest.fixture
async def world(db: Database, db_url: str) -> World:
    mine, theirs = [(await add_customer(db, slug)).tenant_id for slug in ("acme", "globex")]
    with psycopg.connect(db_url) as owner:
        owner.execute("set session_replication_role = replica")  # chains of hashes take a minute
        for odd, tenant in enumerate((mine, theirs)):
            owner.execute(_AUDIT, {"tenant": tenant})
            owner.execute(_KEYS, {"tenant": tenant, "odd": odd, "count": NUM_KEYS})
    with psycopg.connect(db_url, autocommit=True) as owner:
        owner.execute("vacuum analyze api_keys, audit_log")
    return World(db, mine, theirs)


async def _found(
    session: AsyncSession,
    tenant: UUID,
    search: str,
    *,
    before: UUID | None = None,
    status: str | None = None,
    most: int = 20,
) -> Sequence[UUID]:
    statement = found_keys(tenant, None, status, search=search, before=before, most=most)
    rows = await session.scalars(statement.order_by(ApiKey.id.desc()).limit(most))
    return [key.id for key in rows]


SEARCHES = (
    "key",
    "KEY 17",
    "größe",
    "SSE",
    "e_",
    "100%",
    "%",
    "\\",
    "y",
    "7919",
    "no such",
    "old 1",
)


async def test_pages_of_a_search_are_all_keys_that_hold_it_newest_first(world: World) -> None:
    async with world.db.sessions() as session:
        result = await session.execute(
            select(ApiKey.id, ApiKey.name, ApiKey.public_id, ApiKey.status)
            .where(ApiKey.tenant_id == world.mine)
            .order_by(ApiKey.id.desc())
        )
        every = result.all()
        for search, status in product(SEARCHES, (None, "active")):
            expected = [
                id_
                for id_, name, public_id, its_status in every
                if (search.lower() in name.lower() or search.lower() in public_id.lower())
                and status in (None, its_status)
            ]
            found: list[UUID] = []
            while page := await _found(
                session,
                world.mine,
                search,
                status=status,
                before=found[-1] if found else None,
                most=400,
            ):
                found += page

            assert found == expected, (search, status)


async def test_a_tenants_transaction_finds_no_other_tenants_keys(world: World) -> None:
    names_any = text("select loraplex_find_keys(:tenant, 'key', null, null, null, 20)")
    async with world.db.sessions() as session:
        assert len(await _found(session, world.theirs, "key")) == 20
        await enter_tenants(session, [world.mine])

        assert len(await _found(session, world.mine, "key")) == 20
        assert await _found(session, world.theirs, "key") == []
        # Not by the function itself, either.
        assert (await session.scalars(names_any, {"tenant": world.theirs})).all() == []
    async with world.db.sessions() as session:
        await enter_tenants(session, [])

        assert (await session.scalars(names_any, {"tenant": world.mine})).all() == []


def test_what_few_keys_have_is_found_by_the_index(world: World, db_url: str) -> None:
    with psycopg.connect(db_url) as owner:
        plan = owner.execute(
            "explain select id from api_keys where loraplex_key_pieces(tenant_id, name, public_id)"
            ' collate "C" @> loraplex_searched_pieces(%s, %s)',
            [world.mine, "größe"],
        ).fetchall()

    assert any("ix_api_keys_pieces" in line for (line,) in plan), plan


AUDIT_FILTERS = (
    ({"action": "key.revoke"}, "action_id", 1),
    ({"action": "key.*"}, "action_id", 1),
    ({"action": "nothing.*"}, "action_id", 0),
    ({"actor_id": "nobody"}, "actor_id_id", 0),
    ({"object_kind": "adapter"}, "object_kind_id", 1),
    ({"object_id": "obj_7"}, "object_id_id", 1),
    ({"request_id": "req_7"}, "request_id_id", 1),
)


async def test_a_member_finds_audit_entries_by_an_index(world: World) -> None:
    for wanted, index, count in AUDIT_FILTERS:
        statement = entries(AuditFilter(tenant_ids=[world.mine], **wanted))  # type: ignore[arg-type]
        statement = statement.order_by(AuditLog.id.desc()).limit(101)
        asked = statement.compile(
            dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}
        )
        async with world.db.sessions() as session:
            await enter_tenants(session, [world.mine])
            plan = "\n".join((await session.scalars(text(f"explain {asked}"))).all())
            found = (await session.scalars(statement)).all()

        assert f"ix_audit_log_{index}" in plan, plan
        assert [one.tenant_id for one in found] == [world.mine] * count


def test_indexes_of_lists_that_were_left_half_built_are_built_again(
    postgres_server: PostgresServer,
) -> None:
    with postgres_server.clone() as url:
        settings = database_settings(url)
        migrate.downgrade(settings, "0021")
        with psycopg.connect(url, autocommit=True) as owner:
            # As a concurrent build leaves it that was cut: there, by its name, and used by nobody.
            owner.execute("create index ix_audit_log_action_id on audit_log (at)")
            owner.execute("create index ix_api_keys_pieces on api_keys (name)")

        migrate.upgrade(settings)

        with psycopg.connect(url) as owner:
            built = owner.execute(
                "select indexdef from pg_indexes where indexname in"
                " ('ix_audit_log_action_id', 'ix_api_keys_pieces') order by indexname"
            ).fetchall()
        migrate.compare_with_models(settings)
    assert "gin (loraplex_key_pieces" in built[0][0]
    assert '(action COLLATE "C", id)' in built[1][0]
