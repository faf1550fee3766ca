"""SQL of limits, of what is used of them, and of refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from loraplex_platform.db import Adapter, ApiKey, Deployment, Limit, Project, Refusal, Tenant
from loraplex_platform.quotas.records import ScopeKind

# A rolling period's buckets are its 24ths; the 25th back may still be partly in it.
_USE = text("""
select l.id, coalesce(sum(q.committed), 0) as committed, coalesce(sum(q.held), 0) as held,
    case l.period when 'rolling' then now() - make_interval(secs => l.window_s)
        else p.period_start end as period_start,
    case l.period when 'rolling' then null else p.period_end end as period_end
from limits l
cross join lateral loraplex_period(l.period, l.window_s, coalesce(
    (select t.billing_tz from tenants t where t.id = l.tenant_id), 'UTC'), now()) p
left join quota_windows q on q.scope_kind = l.scope_kind and q.scope_id = l.scope_id
    and q.metric = l.metric and q.period = l.period and q.window_s = l.window_s
    and case l.period
        when 'rolling' then q.period_start > now() - make_interval(secs => l.window_s / 24 * 25)
        else q.period_start <= now() and (q.period_end is null or q.period_end > now()) end
where l.id = any(cast(:ids as uuid[])) and l.period in ('day', 'month', 'total', 'rolling')
group by l.id, p.period_start, p.period_end
""")
_NOTE_USE = text("select loraplex_note_use(:limit_id)")
_LOCK = text("select loraplex_lock_limits(cast(:tenant_id as uuid))")
_OLD_WINDOWS = text("""
delete from quota_windows
where held = 0 and period_end < now() - case period
    when 'rolling' then make_interval(secs => window_s * 2) else interval '400 days' end
""")
_OWNERS: dict[ScopeKind, tuple[InstrumentedAttribute[UUID], InstrumentedAttribute[Any]]] = {
    "tenant": (Tenant.id, Tenant.id),
    "project": (Project.id, Project.tenant_id),
    "key": (ApiKey.id, ApiKey.tenant_id),
    "adapter": (Adapter.id, Adapter.tenant_id),
    "deployment": (Deployment.id, Deployment.tenant_id),
}
REFUSALS_KEPT = timedelta(days=14)
OPENING_AT_MOST = timedelta(hours=1)
# A refusal is written within a second or two; its request's id has a gateway's clock in it.
_REFUSAL_SKEW = timedelta(seconds=615)


@dataclass(frozen=True, slots=True)
class Use:
    """Of a quota in its period of now, in its metric's unit."""

    committed: int
    held: int
    period_start: datetime
    period_end: datetime | None


def limits_of(tenant_id: UUID | None) -> Select[Limit]:
    """A tenant's limits; None: everybody's, and the platform's."""
    statement = select(Limit).where(~Limit.is_opening)
    return statement if tenant_id is None else statement.where(Limit.tenant_id == tenant_id)


def named(statement: Select[Limit], search: str, tenant_id: UUID | None) -> Select[Limit]:
    """Only limits of things whose name holds this, or on what is called so; `tenant_id`: whose they are."""
    piece = search.strip()
    names: tuple[tuple[Any, tuple[InstrumentedAttribute[str], ...]], ...] = (
        (Tenant.id, (Tenant.slug, Tenant.name)),
        (Project.id, (Project.name,)),
        (ApiKey.id, (ApiKey.name, ApiKey.public_id)),
        (Adapter.id, (Adapter.name,)),
        (Deployment.id, (Deployment.public_name,)),
    )
    owners = (None, Project.tenant_id, ApiKey.tenant_id, Adapter.tenant_id, Deployment.tenant_id)
    found: list[ColumnElement[bool]] = [
        Limit.metric.icontains(piece, autoescape=True),
        Limit.scope_kind.icontains(piece, autoescape=True),
    ]
    for (id_column, columns), owner in zip(names, owners, strict=True):
        held = or_(*(column.icontains(piece, autoescape=True) for column in columns))
        thing = select(id_column).where(id_column == Limit.scope_id, held)
        if tenant_id is not None and owner is not None:
            thing = thing.where(owner == tenant_id)
        found.append(thing.exists())
    return statement.where(or_(*found))


async def find_limit(
    session: AsyncSession, limit_id: UUID, *, is_locked: bool = False
) -> Limit | None:
    """By id."""
    statement = select(Limit).where(Limit.id == limit_id, ~Limit.is_opening)
    if is_locked:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    return await session.scalar(statement)


async def find_owner(
    session: AsyncSession, kind: ScopeKind, scope_id: UUID
) -> tuple[bool, UUID | None]:
    """Whether there is such a thing, and whose it is; None: the platform's."""
    id_column, owner_column = _OWNERS[kind]
    row = (await session.execute(select(owner_column).where(id_column == scope_id))).first()
    return (False, None) if row is None else (True, row[0])


async def insert_limit(session: AsyncSession, values: dict[str, Any]) -> bool:
    """False: there is one of that scope, metric, period, kind and time already."""
    statement = insert(Limit).values(values).on_conflict_do_nothing().returning(Limit.id)
    return (await session.execute(statement)).first() is not None


async def note_use(session: AsyncSession, limit_id: UUID) -> None:
    """Keep what is used of it at this moment."""
    await session.execute(_NOTE_USE, {"limit_id": limit_id})


async def wait_for_admissions(session: AsyncSession, tenant_id: UUID | None) -> None:
    """Until the end of this transaction nobody is admitted by the limits as they were."""
    await session.execute(_LOCK, {"tenant_id": tenant_id})


async def update_limit(session: AsyncSession, limit_id: UUID, values: dict[str, Any]) -> None:
    """Change what may change, and note what is used by now."""
    await session.execute(
        update(Limit)
        .where(Limit.id == limit_id)
        .values(**values, row_version=Limit.row_version + 1)
        .execution_options(synchronize_session=False)
    )
    await note_use(session, limit_id)


async def delete_limit(session: AsyncSession, limit_id: UUID) -> None:
    """Its windows stay: requests in flight hold them."""
    await session.execute(delete(Limit).where(Limit.id == limit_id))


async def uses_of(session: AsyncSession, limit_ids: Iterable[UUID]) -> dict[UUID, Use]:
    """Of those that are quotas."""
    rows = await session.execute(_USE, {"ids": list(limit_ids)})
    return {
        row.id: Use(int(row.committed), int(row.held), row.period_start, row.period_end)
        for row in rows
    }


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant | None:
    """The tenant, until the end of the transaction."""
    statement = select(Tenant).where(Tenant.id == tenant_id).with_for_update()
    return await session.scalar(statement.execution_options(populate_existing=True))


async def update_scheduling(session: AsyncSession, tenant_id: UUID, values: dict[str, Any]) -> None:
    """Set what engines are told of the tenant; the database makes its version grow."""
    await session.execute(
        update(Tenant)
        .where(Tenant.id == tenant_id)
        .values(values)
        .execution_options(synchronize_session=False)
    )


async def find_refusal(
    session: AsyncSession, request_id: UUID, made_at: datetime
) -> Refusal | None:
    """The refusal that names this request."""
    statement = (
        select(Refusal)
        .where(
            Refusal.at.between(made_at - _REFUSAL_SKEW, made_at + _REFUSAL_SKEW),
            Refusal.request_ids.contains([request_id]),
        )
        .limit(1)
    )
    return await session.scalar(statement)


async def find_limits(session: AsyncSession, limit_ids: Sequence[UUID]) -> Sequence[Limit]:
    """Those that there still are."""
    return (await session.scalars(select(Limit).where(Limit.id.in_(limit_ids)))).all()


async def purge(session: AsyncSession) -> None:
    """Delete windows and refusals that nobody will ask for any more, and quotas whose opening was
    broken off."""
    await session.execute(_OLD_WINDOWS)
    await session.execute(
        delete(Limit).where(Limit.is_opening, Limit.created_at < func.now() - OPENING_AT_MOST)
    )
    await session.execute(delete(Refusal).where(Refusal.at < func.now() - REFUSALS_KEPT))
