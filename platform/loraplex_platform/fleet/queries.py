"""SQL of the fleet page and the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    ApiKey,
    Deployment,
    Gateway,
    LedgerEntry,
    Tenant,
)
from loraplex_platform.ids import uuid7_floor

_GATEWAY_SEEN_S = 60


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there are of what an operator looks after."""

    tenants: int
    keys: int
    adapters: int
    deployments: int
    cost_today_pico: int


async def live_gateways(session: AsyncSession) -> Sequence[Gateway]:
    """Gateways with a heartbeat in the last minute."""
    since = func.now() - timedelta(seconds=_GATEWAY_SEEN_S)
    statement = select(Gateway).where(Gateway.last_seen_at > since).order_by(Gateway.gateway_id)
    return (await session.scalars(statement.limit(1000))).all()


async def count_objects(session: AsyncSession) -> Counts:
    """One round trip for the overview."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    since = uuid7_floor(int(today.timestamp() * 1000))
    active_keys = (
        select(func.count())
        .select_from(ApiKey)
        .where(
            ApiKey.status == "active",
            (ApiKey.expires_at.is_(None)) | (ApiKey.expires_at > func.now()),
        )
    )
    live_deployments = (
        select(func.count())
        .select_from(Deployment)
        .where(Deployment.tenant_id.is_not(None), Deployment.archived_at.is_(None))
    )
    # The entry's id is its request's UUIDv7: a range scan of today's partition.
    cost = select(func.coalesce(func.sum(LedgerEntry.amount_pico), 0)).where(
        LedgerEntry.entry_id >= since, LedgerEntry.account == "revenue"
    )
    row = (
        await session.execute(
            select(
                select(func.count()).select_from(Tenant).scalar_subquery(),
                active_keys.scalar_subquery(),
                select(func.count()).select_from(Adapter).scalar_subquery(),
                live_deployments.scalar_subquery(),
                cost.scalar_subquery(),
            )
        )
    ).one()
    return Counts(row[0], row[1], row[2], row[3], int(row[4]))
