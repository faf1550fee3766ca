"""Revisions, pins and rollouts as the control API leaves them, straight into the tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    Pin,
    Rollout,
)
from loraplex_platform.db.session import Database
from loraplex_platform.ids import uuid7
from loraplex_platform.rollouts.assignment import StickyBy
from sqlalchemy import func, select, update

SALT = b"of this rollout "


async def add_adapter(
    db: Database, tenant_id: UUID, base_id: UUID, name: str, digest: str
) -> tuple[UUID, UUID]:
    """An adapter with one version; the ids of both."""
    adapter = Adapter(id=uuid7(), tenant_id=tenant_id, name=name, base_model_id=base_id)
    version = AdapterVersion(
        id=uuid7(),
        tenant_id=tenant_id,
        adapter_id=adapter.id,
        version=1,
        digest=digest,
        status="ready",
        size_bytes=1,
        rank=8,
        target_modules=["q_proj"],
        report={},
    )
    async with db.transaction() as session:
        session.add(adapter)
        await session.flush()
        session.add(version)
    return adapter.id, version.id


async def add_revision(db: Database, deployment_id: UUID, **changes: Any) -> UUID:
    """One more revision of a deployment: its current one but for the changes. It does not answer yet."""
    async with db.transaction() as session:
        deployment = await session.get_one(Deployment, deployment_id)
        current = await session.get_one(DeploymentRevision, deployment.current_revision_id)
        number = await session.scalar(
            select(func.max(DeploymentRevision.number)).where(
                DeploymentRevision.deployment_id == deployment_id
            )
        )
        values: dict[str, Any] = {
            "base_model_id": current.base_model_id,
            "adapter_version_id": current.adapter_version_id,
            "adapter_digest": current.adapter_digest,
            "params": current.params,
        }
        revision = DeploymentRevision(
            id=uuid7(),
            deployment_id=deployment_id,
            tenant_id=current.tenant_id,
            number=(number or 0) + 1,
            sha256="0" * 64,
            created_at=datetime.now(UTC),
            **values | changes,
        )
        session.add(revision)
    return revision.id


async def current_revision(db: Database, deployment_id: UUID) -> UUID:
    """What answers."""
    async with db.sessions() as session:
        deployment = await session.get_one(Deployment, deployment_id)
    assert deployment.current_revision_id is not None
    return deployment.current_revision_id


async def add_build(db: Database, base_model: str, fingerprint: str) -> UUID:
    """An engine build that was seen."""
    build = EngineBuild(id=uuid7(), fingerprint=fingerprint, base_model=base_model, facts={})
    async with db.transaction() as session:
        session.add(build)
    return build.id


async def add_pin(
    db: Database,
    tenant_id: UUID,
    deployment_id: UUID,
    revision_id: UUID,
    *,
    until: datetime | None = None,
) -> None:
    """A tenant's pin."""
    async with db.transaction() as session:
        session.add(
            Pin(
                tenant_id=tenant_id,
                deployment_id=deployment_id,
                revision_id=revision_id,
                until=until,
                reason="a test",
                created_by="a test",
            )
        )


async def add_rollout(
    db: Database,
    deployment_id: UUID,
    canary_id: UUID,
    *,
    state: str = "canary",
    sticky_by: StickyBy = "user",
    weight_bp: int = 0,
    shadow_bp: int = 0,
    score_bp: int = 0,
    step: int = 1,
) -> UUID:
    """A rollout from what answers to `canary_id`, in the middle of it."""
    async with db.transaction() as session:
        deployment = await session.get_one(Deployment, deployment_id)
        assert deployment.current_revision_id is not None
        rollout = Rollout(
            id=uuid7(),
            tenant_id=deployment.tenant_id,
            deployment_id=deployment_id,
            stable_revision_id=deployment.current_revision_id,
            canary_revision_id=canary_id,
            state=state,
            step=step,
            steps=[],
            sticky_by=sticky_by,
            salt=SALT,
            weight_bp=weight_bp,
            shadow_bp=shadow_bp,
            score_bp=score_bp,
            gate={},
            changes=[],
            created_by="a test",
        )
        session.add(rollout)
    return rollout.id


async def change_rollout(db: Database, rollout_id: UUID, **values: Any) -> None:
    """As the control API or the worker does."""
    async with db.transaction() as session:
        await session.execute(update(Rollout).where(Rollout.id == rollout_id).values(**values))


async def abort_rollout(db: Database, rollout_id: UUID) -> None:
    """Nothing of it counts any more."""
    await change_rollout(
        db, rollout_id, state="aborted", weight_bp=0, shadow_bp=0, ended_at=func.now()
    )
