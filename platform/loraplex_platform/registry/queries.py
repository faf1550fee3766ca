"""SQL of base models, adapters, versions and deployments. A tenant's things take its id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, Select, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    AdapterAlias,
    AdapterAliasEvent,
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    Rollout,
    Tenant,
)
from loraplex_platform.ids import uuid7
from loraplex_platform.registry.base_model import BaseModelFacts

# More versions than this of one adapter are not listed with it.
MAX_VERSIONS_SHOWN = 100


ACTIVE_ROLLOUT_STATES: Final = ("evaluating", "shadow", "canary")
# Each kind by itself: they are few, and each has its index.
_USES = text("""
(select 'deployment' as kind, d.id, d.public_name as name
    from deployments d join deployment_revisions r on r.id = d.current_revision_id
    where d.tenant_id = :tenant and d.archived_at is null and r.adapter_version_id = :version
    order by d.public_name limit :limit)
union all
(select 'pin', d.id, d.public_name
    from pins p join deployment_revisions r on r.id = p.revision_id
    join deployments d on d.id = p.deployment_id
    where p.tenant_id = :tenant and r.adapter_version_id = :version and d.archived_at is null
        and p.expired_at is null and (p.until is null or p.until > now())
    order by d.public_name limit :limit)
union all
(select 'rollout', o.id, d.public_name
    from rollouts o join deployments d on d.id = o.deployment_id
    where o.tenant_id = :tenant and o.state in ('draft', 'evaluating', 'shadow', 'canary')
        and exists (select from deployment_revisions r
            where r.id in (o.stable_revision_id, o.canary_revision_id)
                and r.adapter_version_id = :version)
    order by o.id limit :limit)
union all
(select 'alias', a.adapter_id, a.alias
    from adapter_aliases a
    where a.tenant_id = :tenant and a.version_id = :version
    order by a.alias limit :limit)
union all
(select 'residency', r.version_id, r.reason
    from resident_adapters r
    where r.tenant_id = :tenant and r.version_id = :version limit :limit)
union all
(select 'request', q.id, q.model
    from requests q
    where q.tenant_id = :tenant and q.state = 'reserved' and q.adapter_version_id = :version
    order by q.id limit :limit)
""")
_PRICES = text(
    "select input, output from loraplex_prices(:book, :base_model, :adapter, :deployment)"
)


@dataclass(frozen=True, slots=True)
class RevisionFacts:
    """A revision and what it names."""

    revision: DeploymentRevision
    base_model: BaseModel
    version: AdapterVersion | None
    adapter: Adapter | None
    build: EngineBuild | None


@dataclass(frozen=True, slots=True)
class DeployedRevision:
    """A deployment with what it currently stands for."""

    deployment: Deployment
    facts: RevisionFacts

    @property
    def revision(self) -> DeploymentRevision:
        """The current one."""
        return self.facts.revision


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


async def base_of_adapter(session: AsyncSession, adapter_id: UUID) -> str:
    """The name of the base model that an adapter was uploaded for."""
    statement = (
        select(BaseModel.name)
        .join(Adapter, Adapter.base_model_id == BaseModel.id)
        .where(Adapter.id == adapter_id)
    )
    return (await session.execute(statement)).scalar_one()


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
    session: AsyncSession,
    tenant_id: UUID,
    version_id: UUID,
    *,
    to_use: bool = False,
    to_change: bool = False,
) -> AdapterVersion | None:
    """By id, only if the tenant owns it.

    Args:
        to_use: something will name it: it is not retired until the transaction ends.
        to_change: nothing will name it until the transaction ends.
    """
    statement = select(AdapterVersion).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.id == version_id
    )
    if to_use or to_change:
        statement = statement.with_for_update(read=not to_change)
    return await session.scalar(statement.execution_options(populate_existing=True))


async def last_version_number(session: AsyncSession, tenant_id: UUID, adapter_id: UUID) -> int:
    """0 if there is none."""
    statement = select(func.coalesce(func.max(AdapterVersion.version), 0)).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.adapter_id == adapter_id
    )
    return int((await session.execute(statement)).scalar_one())


# ---------------------------------------------------------------------------- deployments


def live_deployments(tenant_id: UUID | None) -> Select[Deployment]:
    """The tenant's deployments that are not archived; None: the platform's own."""
    owned = (
        Deployment.tenant_id.is_(None) if tenant_id is None else Deployment.tenant_id == tenant_id
    )
    return select(Deployment).where(owned, Deployment.archived_at.is_(None))


async def find_deployment(
    session: AsyncSession, tenant_id: UUID | None, name: str, *, for_update: bool = False
) -> Deployment | None:
    """The live deployment of that name; as it is now, however often it was read before."""
    statement = live_deployments(tenant_id).where(Deployment.public_name == name)
    if for_update:
        statement = statement.with_for_update()
    return await session.scalar(statement.execution_options(populate_existing=True))


def revisions_of(deployment_id: UUID) -> Select[DeploymentRevision]:
    """All of a deployment's."""
    return select(DeploymentRevision).where(DeploymentRevision.deployment_id == deployment_id)


async def find_revision_by_content(
    session: AsyncSession, deployment_id: UUID, sha256: str
) -> DeploymentRevision | None:
    """The first revision that has this content."""
    return await session.scalar(
        revisions_of(deployment_id)
        .where(DeploymentRevision.sha256 == sha256)
        .order_by(DeploymentRevision.number)
        .limit(1)
    )


async def facts_of(
    session: AsyncSession, revisions: Sequence[DeploymentRevision]
) -> list[RevisionFacts]:
    """Each revision with what it names, in the given order; one query."""
    rows = (
        await session.execute(
            select(DeploymentRevision, BaseModel, AdapterVersion, Adapter, EngineBuild)
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
            .outerjoin(EngineBuild, EngineBuild.id == DeploymentRevision.engine_build_id)
            .where(DeploymentRevision.id.in_([revision.id for revision in revisions]))
        )
    ).all()
    by_id = {row[0].id: RevisionFacts(*row) for row in rows}
    return [by_id[revision.id] for revision in revisions]


async def resolve(
    session: AsyncSession, deployments: Sequence[Deployment]
) -> list[DeployedRevision]:
    """Each deployment with its current revision, in the given order; two queries."""
    ids = [d.current_revision_id for d in deployments if d.current_revision_id is not None]
    revisions = await session.scalars(
        select(DeploymentRevision).where(DeploymentRevision.id.in_(ids))
    )
    facts = {item.revision.id: item for item in await facts_of(session, revisions.all())}
    return [
        DeployedRevision(deployment, facts[deployment.current_revision_id])
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
    """Change a deployment's row; `updated_at` and the version that its ETag names follow."""
    await session.execute(
        update(Deployment)
        .where(Deployment.id == deployment_id)
        .values(updated_at=func.now(), row_version=Deployment.row_version + 1, **values)
    )


async def find_active_rollout(session: AsyncSession, deployment_id: UUID) -> Rollout | None:
    """The one that is on its way, of which there is at most one."""
    return await session.scalar(
        select(Rollout).where(
            Rollout.deployment_id == deployment_id, Rollout.state.in_(ACTIVE_ROLLOUT_STATES)
        )
    )


async def has_price(
    session: AsyncSession,
    book_id: UUID,
    base_model_id: UUID,
    adapter_id: UUID | None,
    deployment_id: UUID,
) -> bool:
    """Whether the book says what input and output cost. Only for the platform's role."""
    row = (
        await session.execute(
            _PRICES,
            {
                "book": book_id,
                "base_model": base_model_id,
                "adapter": adapter_id,
                "deployment": deployment_id,
            },
        )
    ).one()
    return row.input is not None and row.output is not None


async def followers_of(session: AsyncSession, adapter_id: UUID, alias: str) -> list[Deployment]:
    """The live deployments that follow an alias, locked, always in one order."""
    statement = (
        select(Deployment)
        .where(
            Deployment.followed_adapter_id == adapter_id,
            Deployment.followed_alias == alias,
            Deployment.archived_at.is_(None),
        )
        .order_by(Deployment.id)
        .with_for_update()
    )
    rows = await session.scalars(statement.execution_options(populate_existing=True))
    return list(rows.all())


# ---------------------------------------------------------------------------- aliases


def aliases_of(tenant_id: UUID, adapter_id: UUID) -> Select[AdapterAlias]:
    """Of one of the tenant's adapters."""
    return select(AdapterAlias).where(
        AdapterAlias.tenant_id == tenant_id, AdapterAlias.adapter_id == adapter_id
    )


async def find_alias(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID, alias: str
) -> AdapterAlias | None:
    """By name, as it is now."""
    statement = aliases_of(tenant_id, adapter_id).where(AdapterAlias.alias == alias)
    return await session.scalar(statement.execution_options(populate_existing=True))


async def alias_page(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID, after: str | None, limit: int
) -> list[tuple[AdapterAlias, AdapterVersion]]:
    """Aliases and what they name, by name, one more than `limit` if there are more."""
    statement = (
        aliases_of(tenant_id, adapter_id)
        .add_columns(AdapterVersion)
        .join(AdapterVersion, AdapterVersion.id == AdapterAlias.version_id)
        .order_by(AdapterAlias.alias)
        .limit(limit + 1)
    )
    if after is not None:
        statement = statement.where(AdapterAlias.alias > after)
    return [(row[0], row[1]) for row in await session.execute(statement)]


async def alias_events(
    session: AsyncSession,
    tenant_id: UUID,
    adapter_id: UUID,
    alias: str,
    before_id: int | None,
    limit: int,
) -> Sequence[AdapterAliasEvent]:
    """Where it pointed, newest first, one more than `limit` if there are more."""
    statement = (
        select(AdapterAliasEvent)
        .where(
            AdapterAliasEvent.tenant_id == tenant_id,
            AdapterAliasEvent.adapter_id == adapter_id,
            AdapterAliasEvent.alias == alias,
        )
        .order_by(AdapterAliasEvent.id.desc())
        .limit(limit + 1)
    )
    if before_id is not None:
        statement = statement.where(AdapterAliasEvent.id < before_id)
    return (await session.scalars(statement)).all()


# ---------------------------------------------------------------------------- what names a version


async def uses_of(session: AsyncSession, version: AdapterVersion, limit: int) -> list[Row[Any]]:
    """Everything that names a version, as (kind, id, name), some of each kind at most."""
    return list(
        (
            await session.execute(
                _USES, {"tenant": version.tenant_id, "version": version.id, "limit": limit}
            )
        ).all()
    )


# ---------------------------------------------------------------------------- engine builds


def all_builds() -> Select[EngineBuild]:
    """Every engine build that was ever seen."""
    return select(EngineBuild)


async def find_build(session: AsyncSession, build_id: UUID) -> EngineBuild | None:
    """By id."""
    return await session.get(EngineBuild, build_id)


async def find_base_models(session: AsyncSession, name: str) -> Sequence[BaseModel]:
    """All revisions of a base model, the newest first."""
    statement = select(BaseModel).where(BaseModel.name == name).order_by(BaseModel.id.desc())
    return (await session.scalars(statement)).all()


async def note_build(
    session: AsyncSession,
    fingerprint: str,
    base_model: str,
    base_model_id: UUID | None,
    facts: Mapping[str, Any],
) -> bool:
    """A replica of this build answers now; whether the build is new. What it was first seen as stays,
    but for weights that were not known then.
    """
    statement = insert(EngineBuild).values(
        id=uuid7(),
        fingerprint=fingerprint,
        base_model=base_model,
        base_model_id=base_model_id,
        facts=dict(facts),
    )
    row = await session.execute(
        statement.on_conflict_do_update(
            index_elements=[EngineBuild.fingerprint],
            set_={
                "last_seen_at": func.now(),
                "base_model_id": func.coalesce(
                    EngineBuild.base_model_id, statement.excluded.base_model_id
                ),
            },
        ).returning(EngineBuild.first_seen_at == EngineBuild.last_seen_at)
    )
    return bool(row.scalar_one())
