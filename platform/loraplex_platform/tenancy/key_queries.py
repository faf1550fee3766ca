"""SQL of API keys. Every query takes the tenant's id; the MACs of secrets are written, never read here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Select, Uuid, any_, delete, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    ApiKey,
    ApiKeySecret,
    BaseModel,
    Deployment,
    KeyModelGrant,
    Membership,
)
from loraplex_platform.ids import uuid7


def keys_of(tenant_id: UUID) -> Select[ApiKey]:
    """The tenant's keys."""
    return select(ApiKey).where(ApiKey.tenant_id == tenant_id)


def listed_keys(tenant_id: UUID, project_id: UUID | None, status: str | None) -> Select[ApiKey]:
    """The tenant's keys, or only those of a project, or in a state."""
    statement = keys_of(tenant_id)
    if project_id is not None:
        statement = statement.where(ApiKey.project_id == project_id)
    if status is not None:
        statement = statement.where(ApiKey.status == status)
    return statement


def found_keys(
    tenant_id: UUID,
    project_id: UUID | None,
    status: str | None,
    *,
    search: str,
    before: UUID | None,
    most: int,
) -> Select[ApiKey]:
    """Those of them with `search` in the name or the public id: the newest `most` that are older than `before`.

    The database's function only says which (migration 0021); that they are the tenant's is asked again here,
    and by the policy of whoever asks.
    """
    found = select(
        func.loraplex_find_keys(tenant_id, search, before, project_id, status, most)
    ).scalar_subquery()
    # An array: a set would be joined to all of the tenant's keys if the planner liked.
    return listed_keys(tenant_id, project_id, status).where(
        ApiKey.id == any_(func.array(found, type_=ARRAY(Uuid)))
    )


async def find_key(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> ApiKey | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(keys_of(tenant_id).where(ApiKey.id == key_id))


async def lock_key(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> ApiKey | None:
    """The same, as it is now, and nobody else's to change until the transaction ends."""
    statement = keys_of(tenant_id).where(ApiKey.id == key_id).with_for_update(key_share=True)
    return await session.scalar(statement, execution_options={"populate_existing": True})


async def update_key(
    session: AsyncSession, tenant_id: UUID, key_id: UUID, values: dict[str, Any]
) -> None:
    """Set columns, as a new version: every cached copy is out of date."""
    statement = (
        update(ApiKey)
        .where(ApiKey.tenant_id == tenant_id, ApiKey.id == key_id)
        .values(**values, version=ApiKey.version + 1)
    )
    await session.execute(statement)


async def prolong_key(
    session: AsyncSession, tenant_id: UUID, key_id: UUID, expires_at: datetime
) -> bool:
    """Move a live key's end; False if it is over or revoked."""
    statement = (
        update(ApiKey)
        .where(
            ApiKey.tenant_id == tenant_id,
            ApiKey.id == key_id,
            ApiKey.status == "active",
            ApiKey.expires_at > func.now(),
        )
        .values(expires_at=expires_at, version=ApiKey.version + 1)
        .returning(ApiKey.id)
    )
    return (await session.execute(statement)).first() is not None


async def owned_by(session: AsyncSession, tenant_id: UUID, user_id: UUID) -> Sequence[UUID]:
    """Keys of a person that are not revoked, in one order."""
    statement = (
        select(ApiKey.id)
        .where(
            ApiKey.tenant_id == tenant_id,
            ApiKey.owner_user_id == user_id,
            ApiKey.status != "revoked",
        )
        .order_by(ApiKey.id)
    )
    return (await session.scalars(statement)).all()


# ---------------------------------------------------------------------------- secrets


async def insert_secret(session: AsyncSession, key_id: UUID, mac: bytes) -> None:
    """One more secret of a key, by its MAC."""
    session.add(ApiKeySecret(id=uuid7(), key_id=key_id, mac=mac))
    await session.flush()


async def end_secrets(session: AsyncSession, key_id: UUID, grace: timedelta) -> None:
    """End a key's secrets: the newest after `grace`, those that had been replaced before now."""
    secrets = update(ApiKeySecret).where(ApiKeySecret.key_id == key_id)
    await session.execute(
        secrets.where(ApiKeySecret.valid_until > func.now()).values(valid_until=func.now())
    )
    await session.execute(
        secrets.where(ApiKeySecret.valid_until.is_(None)).values(valid_until=func.now() + grace)
    )


# ---------------------------------------------------------------------------- grants


async def grants_of(
    session: AsyncSession, tenant_id: UUID, key_ids: Sequence[UUID]
) -> Mapping[UUID, list[KeyModelGrant]]:
    """Grants by key, in one order; none for a key that may call everything."""
    statement = (
        select(KeyModelGrant)
        .where(KeyModelGrant.tenant_id == tenant_id, KeyModelGrant.key_id.in_(key_ids))
        .order_by(KeyModelGrant.target_kind, KeyModelGrant.target_id)
    )
    found: defaultdict[UUID, list[KeyModelGrant]] = defaultdict(list)
    for grant in await session.scalars(statement):
        found[grant.key_id].append(grant)
    return found


async def replace_grants(
    session: AsyncSession, tenant_id: UUID, key_id: UUID, grants: Sequence[tuple[str, UUID]]
) -> None:
    """Have a key call these, or everything if there are none."""
    await session.execute(
        delete(KeyModelGrant).where(
            KeyModelGrant.tenant_id == tenant_id, KeyModelGrant.key_id == key_id
        )
    )
    session.add_all(
        KeyModelGrant(tenant_id=tenant_id, key_id=key_id, target_kind=kind, target_id=target_id)
        for kind, target_id in grants
    )
    await session.flush()


async def is_grantable(session: AsyncSession, tenant_id: UUID, kind: str, target_id: UUID) -> bool:
    """Whether the tenant may call this at all: its own, or the platform's."""
    if kind == "base":
        return await session.get(BaseModel, target_id) is not None
    if kind == "adapter":
        statement = select(Adapter.id).where(
            Adapter.tenant_id == tenant_id, Adapter.id == target_id
        )
    else:
        statement = select(Deployment.id).where(
            or_(Deployment.tenant_id == tenant_id, Deployment.tenant_id.is_(None)),
            Deployment.id == target_id,
        )
    return await session.scalar(statement) is not None


async def share_member(session: AsyncSession, tenant_id: UUID, user_id: UUID) -> bool:
    """Whether a user belongs to the tenant now; if so, they do until the transaction ends."""
    statement = (
        select(Membership.user_id)
        .where(Membership.tenant_id == tenant_id, Membership.user_id == user_id)
        .with_for_update(read=True, key_share=True)
    )
    return await session.scalar(statement) is not None


# ---------------------------------------------------------------------------- use

# At most once a minute per key. Rows that somebody changes are left to the next round: nothing of the
# control API ever waits for this.
_NOTE_USES = text("""
with used as (
    select id, at from unnest(cast(:ids as uuid[]), cast(:times as timestamptz[])) as u (id, at)
), due as (
    select api_keys.id from api_keys join used using (id)
    where last_used_at is null or last_used_at < used.at - make_interval(secs => :every_s)
    order by api_keys.id for no key update of api_keys skip locked
)
update api_keys set last_used_at = used.at
from due join used using (id) where api_keys.id = due.id
""")


async def note_uses(
    session: AsyncSession, uses: Mapping[UUID, datetime], *, every_s: float
) -> None:
    """Keys of all tenants and when they were last used; not a change, so the version stays."""
    parameters = {"ids": list(uses), "times": list(uses.values()), "every_s": every_s}
    await session.execute(_NOTE_USES, parameters)
