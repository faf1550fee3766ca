"""SQL of base models, adapters, versions and deployments. A tenant's things take its id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Select, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    Tenant,
)
from loraplex_platform.ids import uuid7
from loraplex_platform.registry.base_model import BaseModelFacts

# More versions than this of one adapter are not listed with it.
MAX_VERSIONS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class DeployedRevision:
    """A deployment with what it currently stands for."""

    deployment: Deployment
    revision: DeploymentRevision
    base_model: BaseModel
    adapter: Adapter | None


async def lock_name(session: AsyncSession, *parts: str) -> None:
    """Serialise writers of one name until the transaction ends, also before the row exists."""
    await session.execute(
        text("select pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": ":".join(parts)}
    )


# ---------------------------------------------------------------------------- base models


def all_base_models() -> Select[BaseModel]:
    """Every base model."""
    return select(BaseModel)


async def ensure_base_model(session: AsyncSession, facts: BaseModelFacts) -> BaseModel:
    """The row of this exact model, inserted if it is new."""
    await session.execute(
        insert(BaseModel)
        .values(
            id=uuid7(),
            name=facts.name,
            revision=facts.revision,
            tokenizer_sha256=facts.tokenizer_sha256,
            chat_template_sha256=facts.chat_template_sha256,
            license=facts.license,
            architecture=facts.architecture,
        )
        .on_conflict_do_nothing(index_elements=[BaseModel.name, BaseModel.revision])
    )
    return (
        await session.scalars(
            select(BaseModel).where(
                BaseModel.name == facts.name, BaseModel.revision == facts.revision
            )
        )
    ).one()


# ---------------------------------------------------------------------------- adapters


def adapters_of(tenant_id: UUID) -> Select[Adapter]:
    """The tenant's adapters."""
    return select(Adapter).where(Adapter.tenant_id == tenant_id)


async def find_adapter(session: AsyncSession, tenant_id: UUID, adapter_id: UUID) -> Adapter | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(adapters_of(tenant_id).where(Adapter.id == adapter_id))


async def find_adapter_by_name(session: AsyncSession, tenant_id: UUID, name: str) -> Adapter | None:
    """By name."""
    return await session.scalar(adapters_of(tenant_id).where(Adapter.name == name))


async def versions_of(
    session: AsyncSession, tenant_id: UUID, adapter_ids: Sequence[UUID]
) -> dict[UUID, list[AdapterVersion]]:
    """Versions by adapter, newest first, at most `MAX_VERSIONS_SHOWN` each."""
    place = func.row_number().over(
        partition_by=AdapterVersion.adapter_id, order_by=AdapterVersion.version.desc()
    )
    ranked = (
        select(AdapterVersion.id, place.label("place"))
        .where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.adapter_id.in_(adapter_ids))
        .subquery()
    )
    rows = await session.scalars(
        select(AdapterVersion)
        .join(ranked, ranked.c.id == AdapterVersion.id)
        .where(ranked.c.place <= MAX_VERSIONS_SHOWN)
        .order_by(AdapterVersion.version.desc())
    )
    found: dict[UUID, list[AdapterVersion]] = {adapter_id: [] for adapter_id in adapter_ids}
    for version in rows:
        found[version.adapter_id].append(version)
    return found


async def find_version_by_digest(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID, digest: str
) -> AdapterVersion | None:
    """The version of an adapter that has this content."""
    return await session.scalar(
        select(AdapterVersion).where(
            AdapterVersion.tenant_id == tenant_id,
            AdapterVersion.adapter_id == adapter_id,
            AdapterVersion.digest == digest,
        )
    )


async def digests_in_use(session: AsyncSession, digests: Sequence[str]) -> set[str]:
    """Those that some version of any tenant has: the platform's own look at its store.

    A deleted tenant's versions are names in old bills, and hold nothing.
    """
    statement = (
        select(AdapterVersion.digest)
        .join(Tenant, Tenant.id == AdapterVersion.tenant_id)
        .where(AdapterVersion.digest.in_(digests), Tenant.erased_at.is_(None))
    )
    return set((await session.scalars(statement)).all())


async def find_version(
    session: AsyncSession, tenant_id: UUID, version_id: UUID
) -> AdapterVersion | None:
    """By id, only if the tenant owns it."""
    return await session.scalar(
        select(AdapterVersion).where(
            AdapterVersion.tenant_id == tenant_id, AdapterVersion.id == version_id
        )
    )


async def last_version_number(session: AsyncSession, tenant_id: UUID, adapter_id: UUID) -> int:
    """0 if there is none."""
    statement = select(func.coalesce(func.max(AdapterVersion.version), 0)).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.adapter_id == adapter_id
    )
    return int((await session.execute(statement)).scalar_one())


# ---------------------------------------------------------------------------- deployments


def live_deployments(tenant_id: UUID) -> Select[Deployment]:
    """The tenant's deployments that are not archived."""
    return select(Deployment).where(
        Deployment.tenant_id == tenant_id, Deployment.archived_at.is_(None)
    )


async def find_deployment(session: AsyncSession, tenant_id: UUID, name: str) -> Deployment | None:
    """The live deployment of that name."""
    return await session.scalar(live_deployments(tenant_id).where(Deployment.public_name == name))


async def find_platform_deployment(session: AsyncSession, name: str) -> Deployment | None:
    """The platform's own live deployment of that name."""
    return await session.scalar(
        select(Deployment).where(
            Deployment.tenant_id.is_(None),
            Deployment.public_name == name,
            Deployment.archived_at.is_(None),
        )
    )


async def resolve(
    session: AsyncSession, deployments: Sequence[Deployment]
) -> list[DeployedRevision]:
    """Each deployment with its current revision, in the given order; two queries."""
    revision_ids = [d.current_revision_id for d in deployments if d.current_revision_id]
    rows = (
        await session.execute(
            select(DeploymentRevision, BaseModel, Adapter)
            .join(BaseModel, BaseModel.id == DeploymentRevision.base_model_id)
            .outerjoin(
                AdapterVersion,
                (AdapterVersion.id == DeploymentRevision.adapter_version_id)
                & (AdapterVersion.tenant_id == DeploymentRevision.tenant_id),
            )
            .outerjoin(
                Adapter,
                (Adapter.id == AdapterVersion.adapter_id)
                & (Adapter.tenant_id == AdapterVersion.tenant_id),
            )
            .where(DeploymentRevision.id.in_(revision_ids))
        )
    ).all()
    by_id: dict[UUID, tuple[DeploymentRevision, BaseModel, Adapter | None]] = {
        row[0].id: (row[0], row[1], row[2]) for row in rows
    }
    return [
        DeployedRevision(deployment, *by_id[deployment.current_revision_id])
        for deployment in deployments
        if deployment.current_revision_id is not None
    ]


async def last_revision_number(session: AsyncSession, deployment_id: UUID) -> int:
    """0 if there is none."""
    statement = select(func.coalesce(func.max(DeploymentRevision.number), 0)).where(
        DeploymentRevision.deployment_id == deployment_id
    )
    return int((await session.execute(statement)).scalar_one())


async def point_at(session: AsyncSession, deployment_id: UUID, **values: Any) -> None:  # noqa: ANN401
    """Change a deployment's row; `updated_at` follows."""
    await session.execute(
        update(Deployment)
        .where(Deployment.id == deployment_id)
        .values(updated_at=func.now(), **values)
    )
