"""SQL of desired state: adapters that replicas keep in memory, and builds that revisions want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from sqlalchemy import Row, Select, func, literal, or_, select, union_all
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    Pin,
    ResidentAdapter,
    Rollout,
)

WantedAs = Literal["current", "pin", "stable", "canary"]


@dataclass(frozen=True, slots=True)
class Desired:
    """An adapter that every replica of its base keeps in memory, since when."""

    tenant_id: UUID
    version_id: UUID
    digest: str
    base_model: str
    since: datetime


@dataclass(frozen=True, slots=True)
class WantedBuild:
    """A build that something live names."""

    build: EngineBuild
    wanted_as: WantedAs
    tenant_id: UUID | None
    deployment: str
    revision_id: UUID


async def desired_adapters(session: AsyncSession) -> list[Desired]:
    """Of all tenants. What is retired meanwhile is not desired."""
    statement = (
        select(
            ResidentAdapter.tenant_id,
            ResidentAdapter.version_id,
            ResidentAdapter.digest,
            BaseModel.name,
            ResidentAdapter.created_at,
        )
        .join(
            AdapterVersion,
            (AdapterVersion.id == ResidentAdapter.version_id)
            & (AdapterVersion.tenant_id == ResidentAdapter.tenant_id),
        )
        .join(
            Adapter,
            (Adapter.id == AdapterVersion.adapter_id)
            & (Adapter.tenant_id == AdapterVersion.tenant_id),
        )
        .join(BaseModel, BaseModel.id == Adapter.base_model_id)
        .where(AdapterVersion.status == "ready")
        .order_by(ResidentAdapter.created_at)
    )
    return [Desired(*row) for row in await session.execute(statement)]


async def wanted_builds(session: AsyncSession) -> list[WantedBuild]:
    """What current revisions, live pins and active rollouts name."""
    sides = [
        select(
            literal(side).label("wanted_as"),
            Rollout.tenant_id,
            Rollout.deployment_id,
            getattr(Rollout, f"{side}_revision_id").label("revision_id"),
        ).where(Rollout.state.in_(("evaluating", "shadow", "canary")))
        for side in ("stable", "canary")
    ]
    named = union_all(
        select(
            literal("current").label("wanted_as"),
            Deployment.tenant_id,
            Deployment.id.label("deployment_id"),
            Deployment.current_revision_id.label("revision_id"),
        ),
        select(literal("pin"), Pin.tenant_id, Pin.deployment_id, Pin.revision_id).where(
            Pin.expired_at.is_(None), or_(Pin.until.is_(None), Pin.until > func.now())
        ),
        *sides,
    ).subquery()
    statement = (
        select(
            EngineBuild,
            named.c.wanted_as,
            named.c.tenant_id,
            Deployment.public_name,
            named.c.revision_id,
        )
        .join(DeploymentRevision, DeploymentRevision.id == named.c.revision_id)
        .join(EngineBuild, EngineBuild.id == DeploymentRevision.engine_build_id)
        .join(Deployment, Deployment.id == named.c.deployment_id)
        .where(Deployment.archived_at.is_(None))
        .order_by(EngineBuild.id, Deployment.public_name)
    )
    return [WantedBuild(*row) for row in await session.execute(statement)]


async def base_revisions(session: AsyncSession) -> dict[str, str]:
    """Base model -> the weights that the platform's own deployment of it names."""
    statement = (
        select(Deployment.public_name, BaseModel.revision)
        .join(DeploymentRevision, DeploymentRevision.id == Deployment.current_revision_id)
        .join(BaseModel, BaseModel.id == DeploymentRevision.base_model_id)
        .where(Deployment.tenant_id.is_(None), Deployment.archived_at.is_(None))
    )
    return {row[0]: row[1] for row in await session.execute(statement)}


def residents() -> Select[ResidentAdapter]:
    """All of them."""
    return select(ResidentAdapter)


async def find_version(
    session: AsyncSession, version_id: UUID, *, to_use: bool = False
) -> AdapterVersion | None:
    """Of any tenant: what stays in memory is the operator's word. `to_use`: it is not retired meanwhile."""
    statement = select(AdapterVersion).where(AdapterVersion.id == version_id)
    if to_use:
        statement = statement.with_for_update(read=True)
    return await session.scalar(statement.execution_options(populate_existing=True))


async def find(session: AsyncSession, version_id: UUID) -> ResidentAdapter | None:
    """By the version's id."""
    return await session.scalar(
        residents()
        .where(ResidentAdapter.version_id == version_id)
        .execution_options(populate_existing=True)
    )


async def put(
    session: AsyncSession, version: AdapterVersion, reason: str, created_by: str
) -> ResidentAdapter:
    """Make it desired, or give it another reason."""
    statement = insert(ResidentAdapter).values(
        tenant_id=version.tenant_id,
        version_id=version.id,
        digest=version.digest,
        reason=reason,
        created_by=created_by,
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[ResidentAdapter.tenant_id, ResidentAdapter.version_id],
            set_={"reason": reason},
        )
    )
    found = await find(session, version.id)
    assert found is not None  # noqa: S101 # of this transaction
    return found


async def is_desired(session: AsyncSession, digest: str) -> bool:
    """Whether some version of this content is: of another tenant too, as one copy serves both."""
    return any(item.digest == digest for item in await desired_adapters(session))


async def names_of(
    session: AsyncSession, version_ids: Sequence[UUID]
) -> dict[UUID, Row[UUID, str, int]]:
    """Version id -> (id, adapter's name, number)."""
    statement = (
        select(AdapterVersion.id, Adapter.name, AdapterVersion.version)
        .join(
            Adapter,
            (Adapter.id == AdapterVersion.adapter_id)
            & (Adapter.tenant_id == AdapterVersion.tenant_id),
        )
        .where(AdapterVersion.id.in_(version_ids))
    )
    return {row[0]: row for row in await session.execute(statement)}
