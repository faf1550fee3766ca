"""SQL of tenants and projects. Every query of something a tenant owns takes the tenant's id."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Select, exists, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    ApiKey,
    Invoice,
    LedgerEntry,
    Project,
    Request,
    Tenant,
    UsageDaily,
)


def all_tenants() -> Select[Tenant]:
    """Every tenant; of a member's transaction, theirs."""
    return select(Tenant)


async def find_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant | None:
    """By id."""
    return await session.get(Tenant, tenant_id)


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant | None:
    """By id, as it is now, and nobody else's to change until the transaction ends."""
    statement = select(Tenant).where(Tenant.id == tenant_id).with_for_update(key_share=True)
    return await session.scalar(statement, execution_options={"populate_existing": True})


async def insert_tenant(session: AsyncSession, tenant: Tenant) -> bool:
    """False if the slug is taken."""
    statement = (
        insert(Tenant)
        .values(id=tenant.id, slug=tenant.slug, name=tenant.name, billing_tz=tenant.billing_tz)
        .on_conflict_do_nothing(index_elements=[Tenant.slug])
        .returning(Tenant.id)
    )
    return (await session.execute(statement)).first() is not None


async def lock_limits(session: AsyncSession, tenant_id: UUID) -> None:
    """Until the end of this transaction nobody else changes the tenant's limits, or is admitted."""
    await session.execute(select(func.loraplex_lock_limits(tenant_id)))


async def update_tenant(session: AsyncSession, tenant_id: UUID, values: dict[str, Any]) -> None:
    """Set columns, as a new version."""
    statement = (
        update(Tenant)
        .where(Tenant.id == tenant_id)
        .values(**values, row_version=Tenant.row_version + 1)
    )
    await session.execute(statement)


async def is_zone(session: AsyncSession, name: str) -> bool:
    """Whether the database means by this name what everybody means by it (migration 0003)."""
    return bool(await session.scalar(select(func.loraplex_is_zone(name))))


async def has_requests(session: AsyncSession, tenant_id: UUID) -> bool:
    """Whether anything of the tenant was ever counted in days and months; that outlives its requests."""
    counted = (Request, LedgerEntry, UsageDaily, Invoice)
    statement = select(or_(*(exists().where(table.tenant_id == tenant_id) for table in counted)))
    return bool(await session.scalar(statement))


async def now(session: AsyncSession) -> datetime:
    """The database's time, which is the same for the whole transaction."""
    return (await session.scalars(select(func.now()))).one()


# ---------------------------------------------------------------------------- projects


def projects_of(tenant_id: UUID) -> Select[Project]:
    """The tenant's projects."""
    return select(Project).where(Project.tenant_id == tenant_id)


async def find_project(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> Project | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(projects_of(tenant_id).where(Project.id == project_id))


async def lock_project(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> Project | None:
    """The same, as it is now, and nobody else's to change until the transaction ends."""
    statement = projects_of(tenant_id).where(Project.id == project_id)
    statement = statement.with_for_update(key_share=True)
    return await session.scalar(statement, execution_options={"populate_existing": True})


async def share_project(session: AsyncSession, tenant_id: UUID, project_id: UUID) -> Project | None:
    """The same, and not archived until the transaction ends; others may share it too."""
    statement = projects_of(tenant_id).where(Project.id == project_id).with_for_update(read=True)
    return await session.scalar(statement, execution_options={"populate_existing": True})


async def is_name_taken(
    session: AsyncSession, tenant_id: UUID, name: str, *, except_id: UUID | None = None
) -> bool:
    """Whether another live project of the tenant has this name, whatever its capitals."""
    statement = projects_of(tenant_id).where(
        func.lower(Project.name) == func.lower(name), Project.archived_at.is_(None)
    )
    if except_id is not None:
        statement = statement.where(Project.id != except_id)
    return bool(await session.scalar(select(statement.exists())))


async def count_live_keys(
    session: AsyncSession, tenant_id: UUID | None, project_id: UUID | None = None
) -> int:
    """Keys of a tenant (None: of all) or of a project of it that may still be used."""
    statement = select(func.count()).where(
        ApiKey.status != "revoked",
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > func.now()),
    )
    if tenant_id is not None:
        statement = statement.where(ApiKey.tenant_id == tenant_id)
    if project_id is not None:
        statement = statement.where(ApiKey.project_id == project_id)
    return int(await session.scalar(statement) or 0)


async def count_active_tenants(session: AsyncSession) -> int:
    """Tenants whose requests are answered."""
    statement = select(func.count()).where(Tenant.status == "active")
    return int(await session.scalar(statement) or 0)
