"""SQL of the fleet page and the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    ApiKey,
    Deployment,
    Gateway,
    LedgerEntry,
    Request,
    Tenant,
)
from loraplex_platform.ids import uuid7_floor

_GATEWAY_SEEN_S = 60
RECENT = timedelta(minutes=5)
MAX_NAMES = 1000
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there are of what an operator looks after, and today's revenue (UTC)."""

    tenants: int
    keys: int
    adapters: int
    deployments: int
    cost_today_pico: int
    entries_today: int  # rows of the ledger, which that is the sum of


@dataclass(frozen=True, slots=True)
class Recent:
    """What callers have begun in the last `RECENT`."""

    began: int
    failed: int  # of them, on our side


async def live_gateways(session: AsyncSession) -> Sequence[Gateway]:
    """Gateways with a heartbeat in the last minute."""
    since = func.now() - timedelta(seconds=_GATEWAY_SEEN_S)
    statement = select(Gateway).where(Gateway.last_seen_at > since).order_by(Gateway.gateway_id)
    return (await session.scalars(statement.limit(1000))).all()


async def names_of_adapters(session: AsyncSession, digests: Sequence[str]) -> dict[str, list[str]]:
    """Whose version of what each digest is; of the first `MAX_NAMES`."""
    if not digests:
        return {}
    rows = await session.execute(
        select(AdapterVersion.digest, Tenant.slug, Adapter.name, AdapterVersion.version)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == AdapterVersion.tenant_id)
        .where(AdapterVersion.digest.in_(digests[:MAX_NAMES]))
        .order_by(AdapterVersion.id)
        .limit(MAX_NAMES)
    )
    names: dict[str, list[str]] = {}
    for digest, slug, name, version in rows:
        names.setdefault(digest, []).append(f"{slug}/{name} v{version}")
    return names


async def count_objects(session: AsyncSession) -> Counts:
    """All of it in one round trip; takes longer the more there are."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    since = uuid7_floor(int(today.timestamp() * 1000))
    # Two counts, for a condition on both kinds of ends would be checked row by row.
    active = select(func.count()).select_from(ApiKey).where(ApiKey.status == "active")
    over = active.where(ApiKey.expires_at <= func.now())
    live_deployments = (
        select(func.count())
        .select_from(Deployment)
        .where(Deployment.tenant_id.is_not(None), Deployment.archived_at.is_(None))
    )
    # The entry's id is its request's UUIDv7: a range scan of today's partition.
    revenue = (
        select(
            func.coalesce(func.sum(LedgerEntry.amount_pico), 0).label("pico"),
            func.count().label("entries"),
        )
        .where(LedgerEntry.entry_id >= since, LedgerEntry.account == "revenue")
        .subquery()
    )
    row = (
        await session.execute(
            select(
                select(func.count()).select_from(Tenant).scalar_subquery(),
                active.scalar_subquery() - over.scalar_subquery(),
                select(func.count()).select_from(Adapter).scalar_subquery(),
                live_deployments.scalar_subquery(),
                revenue.c.pico,
                revenue.c.entries,
            )
        )
    ).one()
    return Counts(row[0], row[1], row[2], row[3], int(row[4]), row[5])


async def count_recent(session: AsyncSession) -> Recent:
    """Callers' requests of the last `RECENT`."""
    statement = select(
        func.count(),
        func.count().filter(
            (Request.http_status >= _SERVER_ERROR) | (Request.finish_reason == "error")
        ),
    ).where(
        Request.id >= uuid7_floor(int((datetime.now(UTC) - RECENT).timestamp() * 1000)),
        Request.kind == "user",
    )
    row = (await session.execute(statement)).one()
    return Recent(row[0], row[1])
