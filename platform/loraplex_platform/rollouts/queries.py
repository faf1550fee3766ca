"""SQL of rollouts and their events; what both sides of a step did is in `looks.py`. A tenant's take its id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Select, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    Rollout,
    RolloutEvent,
)
from loraplex_platform.db.base import Json
from loraplex_platform.registry import queries as registry

# ---------------------------------------------------------------------------- rollouts


def rollouts_of(tenant_id: UUID | None) -> Select[Rollout]:
    """The tenant's rollouts (None: those of the platform's own deployments)."""
    if tenant_id is None:
        return select(Rollout).where(Rollout.tenant_id.is_(None))
    return select(Rollout).where(Rollout.tenant_id == tenant_id)


def named(statement: Select[Rollout], search: str) -> Select[Rollout]:
    """Only those of deployments whose model id holds this."""
    held = Deployment.public_name.icontains(search.strip(), autoescape=True)
    deployment = select(Deployment.id).where(Deployment.id == Rollout.deployment_id, held)
    return statement.where(deployment.exists())


async def find(
    session: AsyncSession, tenant_id: UUID | None, rollout_id: UUID, *, for_update: bool = False
) -> Rollout | None:
    """By id, only if the owner owns it."""
    statement = rollouts_of(tenant_id).where(Rollout.id == rollout_id)
    if for_update:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    return await session.scalar(statement)


async def last_promoted(session: AsyncSession, deployment_id: UUID) -> UUID | None:
    """The rollout of a deployment that was promoted last, whatever became of it since."""
    return await session.scalar(
        select(RolloutEvent.rollout_id)
        .join(Rollout, Rollout.id == RolloutEvent.rollout_id)
        .where(Rollout.deployment_id == deployment_id, RolloutEvent.kind == "promoted")
        .order_by(RolloutEvent.at.desc(), RolloutEvent.rollout_id.desc())
        .limit(1)
    )


async def lock_as_seen(session: AsyncSession, rollout_id: UUID, row_version: int) -> Rollout | None:
    """The rollout, locked, if nobody has changed it since it was seen."""
    return await session.scalar(
        select(Rollout)
        .where(Rollout.id == rollout_id, Rollout.row_version == row_version)
        .with_for_update()
        .execution_options(populate_existing=True)
    )


# ---------------------------------------------------------------------------- what is compared


@dataclass(frozen=True, slots=True)
class Side:
    """A revision with what a rollout has to know of it."""

    revision: DeploymentRevision
    base_model: BaseModel
    build: EngineBuild | None


async def find_deployment(
    session: AsyncSession, tenant_id: UUID | None, deployment_id: UUID
) -> Deployment | None:
    """The owner's live deployment, by id."""
    return await session.scalar(
        registry.live_deployments(tenant_id).where(Deployment.id == deployment_id)
    )


def _sides() -> Select[DeploymentRevision, BaseModel, EngineBuild]:
    return (
        select(DeploymentRevision, BaseModel, EngineBuild)
        .join(BaseModel, BaseModel.id == DeploymentRevision.base_model_id)
        .outerjoin(EngineBuild, EngineBuild.id == DeploymentRevision.engine_build_id)
    )


async def find_side(
    session: AsyncSession,
    deployment_id: UUID,
    *,
    revision_id: UUID | None = None,
    number: int | None = None,
) -> Side | None:
    """A revision of a deployment by id or number; by neither: the newest."""
    statement = _sides().where(DeploymentRevision.deployment_id == deployment_id)
    if revision_id is not None:
        statement = statement.where(DeploymentRevision.id == revision_id)
    elif number is not None:
        statement = statement.where(DeploymentRevision.number == number)
    statement = statement.order_by(DeploymentRevision.number.desc()).limit(1)
    row = (await session.execute(statement)).one_or_none()
    return None if row is None else Side(*row)


@dataclass(frozen=True, slots=True)
class Named:
    """What people call the parts of a rollout."""

    deployment: str
    stable_number: int
    canary_number: int


async def names_of(session: AsyncSession, rollouts: Sequence[Rollout]) -> dict[UUID, Named]:
    """By rollout; one query."""
    revision_ids = {
        one for row in rollouts for one in (row.stable_revision_id, row.canary_revision_id)
    }
    found = await session.execute(
        select(DeploymentRevision.id, DeploymentRevision.number, Deployment.public_name)
        .join(Deployment, Deployment.id == DeploymentRevision.deployment_id)
        .where(DeploymentRevision.id.in_(revision_ids))
    )
    by_id = {row[0]: (row[1], row[2]) for row in found}
    return {
        row.id: Named(
            by_id[row.stable_revision_id][1],
            by_id[row.stable_revision_id][0],
            by_id[row.canary_revision_id][0],
        )
        for row in rollouts
    }


# ---------------------------------------------------------------------------- events


async def add_event(
    session: AsyncSession, rollout: Rollout, *, kind: str, actor: str, message: str, detail: Json
) -> None:
    """The next event; the caller holds the rollout's row, so that its number is its own."""
    last = await session.scalar(
        select(func.max(RolloutEvent.seq)).where(RolloutEvent.rollout_id == rollout.id)
    )
    session.add(
        RolloutEvent(
            rollout_id=rollout.id,
            seq=(last or 0) + 1,
            tenant_id=rollout.tenant_id,
            kind=kind,
            actor=actor,
            message=message,
            detail=detail,
        )
    )
    await session.flush()


async def events_of(
    session: AsyncSession, rollout_id: UUID, after: int, limit: int
) -> Sequence[RolloutEvent]:
    """Oldest first, of a rollout that the caller has found by its owner."""
    statement = (
        select(RolloutEvent)
        .where(RolloutEvent.rollout_id == rollout_id, RolloutEvent.seq > after)
        .order_by(RolloutEvent.seq)
        .limit(limit)
    )
    return (await session.scalars(statement)).all()


# ---------------------------------------------------------------------------- the worker's

# A look leaves in the verdict how long it is good for.
_CLAIM = text("""
with due as (
    select id from rollouts
    where state in ('evaluating', 'shadow', 'canary')
        and (looked_at is null or looked_at <= now() - make_interval(secs => greatest(
            :least_s, coalesce((verdict ->> 'interval_s')::double precision, 0))))
    order by looked_at nulls first, id
    limit 1
    for update skip locked
)
update rollouts r set looked_at = now() from due where r.id = due.id
returning r.id
""")


async def claim(session: AsyncSession, least_s: float) -> Rollout | None:
    """The rollout that has waited longest for a look; others find it not due for `least_s` from now on."""
    rollout_id = (await session.execute(_CLAIM, {"least_s": least_s})).scalar_one_or_none()
    if rollout_id is None:
        return None
    return await session.get_one(Rollout, rollout_id, populate_existing=True)


async def now_of(session: AsyncSession) -> datetime:
    """The database's time, by which hold times are measured."""
    found: Any = (await session.execute(select(func.now()))).scalar_one()
    assert isinstance(found, datetime)  # noqa: S101 # what now() is
    return found
