"""SQL of pins. A tenant's take its id; the worker's look at all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Select, delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import AdapterVersion, Deployment, DeploymentRevision, EngineBuild, Pin


@dataclass(frozen=True, slots=True)
class PinFacts:
    """A pin and what it names."""

    pin: Pin
    deployment: Deployment
    revision: DeploymentRevision
    version: AdapterVersion | None
    build: EngineBuild | None


def pins_of(tenant_id: UUID) -> Select[Pin]:
    """The tenant's, also those that have expired."""
    return select(Pin).where(Pin.tenant_id == tenant_id)


async def find(
    session: AsyncSession, tenant_id: UUID, deployment_id: UUID, *, for_update: bool = False
) -> Pin | None:
    """The tenant's of that deployment."""
    statement = pins_of(tenant_id).where(Pin.deployment_id == deployment_id)
    if for_update:
        statement = statement.with_for_update()
    return await session.scalar(statement.execution_options(populate_existing=True))


async def facts_of(session: AsyncSession, pins: Sequence[Pin]) -> list[PinFacts]:
    """Each with what it names, in the given order; one query."""
    rows = (
        (
            await session.execute(
                select(Pin, Deployment, DeploymentRevision, AdapterVersion, EngineBuild)
                .join(Deployment, Deployment.id == Pin.deployment_id)
                .join(
                    DeploymentRevision,
                    (DeploymentRevision.id == Pin.revision_id)
                    & (DeploymentRevision.deployment_id == Pin.deployment_id),
                )
                .outerjoin(
                    AdapterVersion,
                    (AdapterVersion.id == DeploymentRevision.adapter_version_id)
                    & (AdapterVersion.tenant_id == DeploymentRevision.tenant_id),
                )
                .outerjoin(EngineBuild, EngineBuild.id == DeploymentRevision.engine_build_id)
                .where(
                    or_(
                        *(
                            (Pin.tenant_id == pin.tenant_id)
                            & (Pin.deployment_id == pin.deployment_id)
                            for pin in pins
                        )
                    )
                )
            )
        ).all()
        if pins
        else []
    )
    by_key = {(row[0].tenant_id, row[0].deployment_id): PinFacts(*row) for row in rows}
    return [by_key[pin.tenant_id, pin.deployment_id] for pin in pins]


async def remove(session: AsyncSession, tenant_id: UUID, deployment_id: UUID) -> bool:
    """Whether there was one."""
    row = await session.execute(
        delete(Pin)
        .where(Pin.tenant_id == tenant_id, Pin.deployment_id == deployment_id)
        .returning(Pin.deployment_id)
    )
    return row.first() is not None


async def claim_ending(session: AsyncSession, within: timedelta, limit: int) -> Sequence[Pin]:
    """Pins of any tenant that end within so long, or have, and nobody was told; locked, nobody else's."""
    return (
        await session.scalars(
            select(Pin)
            .join(Deployment, Deployment.id == Pin.deployment_id)
            .where(
                Pin.expired_at.is_(None),
                Pin.until <= func.now() + within,
                Deployment.archived_at.is_(None),
            )
            .order_by(Pin.until)
            .limit(limit)
            .with_for_update(of=Pin, skip_locked=True)
        )
    ).all()


async def count_live(session: AsyncSession) -> int:
    """Pins of all tenants that hold now."""
    statement = (
        select(func.count())
        .select_from(Pin)
        .where(Pin.expired_at.is_(None), or_(Pin.until.is_(None), Pin.until > func.now()))
    )
    return int((await session.execute(statement)).scalar_one())
