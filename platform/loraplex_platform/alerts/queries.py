"""SQL of alerts: read only, a trigger writes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import Alert, Tenant


@dataclass(frozen=True, slots=True)
class AlertFilter:
    """Which alerts. `tenant_ids` None: everybody's, and the platform's own."""

    tenant_ids: Collection[UUID] | None = None
    kind: str | None = None
    start: datetime | None = None  # inclusive
    end: datetime | None = None  # exclusive


def alerts(wanted: AlertFilter) -> Select[Alert]:
    """Those of the filter, in no order."""
    statement = select(Alert)
    if wanted.tenant_ids is not None:
        statement = statement.where(Alert.tenant_id.in_(wanted.tenant_ids))
    if wanted.kind is not None:
        statement = statement.where(Alert.kind == wanted.kind)
    if wanted.start is not None:
        statement = statement.where(Alert.at >= wanted.start)
    if wanted.end is not None:
        statement = statement.where(Alert.at < wanted.end)
    return statement


async def zones_of(session: AsyncSession, rows: Sequence[Alert]) -> dict[UUID, str]:
    """The time zones of the alerts' tenants."""
    ids = {row.tenant_id for row in rows if row.tenant_id is not None}
    if not ids:
        return {}
    found = await session.execute(select(Tenant.id, Tenant.billing_tz).where(Tenant.id.in_(ids)))
    return {row[0]: row[1] for row in found}
