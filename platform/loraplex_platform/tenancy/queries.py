"""SQL of tenants and keys. Every query of something a tenant owns takes the tenant's id."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import Select, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import ApiKey, Tenant


def all_tenants() -> Select[Tenant]:
    """Every tenant."""
    return select(Tenant)


async def find_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant | None:
    """By id."""
    return await session.get(Tenant, tenant_id)


async def find_tenant_by_slug(session: AsyncSession, slug: str) -> Tenant | None:
    """By slug."""
    return await session.scalar(select(Tenant).where(Tenant.slug == slug))


async def insert_tenant(session: AsyncSession, tenant: Tenant) -> bool:
    """False if the slug is taken."""
    statement = (
        insert(Tenant)
        .values(id=tenant.id, slug=tenant.slug, name=tenant.name)
        .on_conflict_do_nothing(index_elements=[Tenant.slug])
        .returning(Tenant.id)
    )
    return (await session.execute(statement)).first() is not None


def keys_of(tenant_id: UUID) -> Select[ApiKey]:
    """The tenant's keys."""
    return select(ApiKey).where(ApiKey.tenant_id == tenant_id)


async def find_key(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> ApiKey | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(keys_of(tenant_id).where(ApiKey.id == key_id))


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


async def revoke_key(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> bool:
    """Revoke; False if there is no such active key. The version bump outdates every cached copy."""
    statement = (
        update(ApiKey)
        .where(ApiKey.tenant_id == tenant_id, ApiKey.id == key_id, ApiKey.status == "active")
        .values(status="revoked", revoked_at=func.now(), version=ApiKey.version + 1)
        .returning(ApiKey.id)
    )
    return (await session.execute(statement)).first() is not None
