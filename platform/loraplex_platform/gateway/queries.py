"""SQL of the data plane. Everything a tenant owns is asked for with the tenant's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Select,
    Text,
    Uuid,
    func,
    literal,
    literal_column,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex_platform.db import (
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    Gateway,
    Pin,
    Replica,
    Rollout,
    Tenant,
)
from loraplex_platform.db.base import Json
from loraplex_platform.db.batched_calls import one_item
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.gateway.builds import ANY_BUILD, BuildRule
from loraplex_platform.gateway.revision_params import NO_PARAMS, RevisionParams, params_of
from loraplex_platform.rollouts.assignment import StickyBy

_FALLBACK_SEEN_WITHIN = timedelta(days=1)
_MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class Revision:
    """Immutable: what answers. `fingerprint` None: any build of the base does."""

    id: UUID
    base_model_id: UUID
    adapter_version_id: UUID | None
    adapter_digest: str | None
    adapter_id: UUID | None
    params: RevisionParams = NO_PARAMS
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class ActiveRollout:
    """What the data plane needs of a deployment's rollout; as long as one is active, a new build is not for
    requests that are not in it.
    """

    id: UUID
    step: int
    state: Literal["evaluating", "shadow", "canary"]
    weight_bp: int
    shadow_bp: int
    score_bp: int
    sticky_by: StickyBy
    salt: bytes
    canary: Revision


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a public model id stands for right now: one immutable revision, and who might answer instead.

    Attributes:
        owner: the tenant's slug, or "loraplex".
        is_pinned: the revision is the tenant's pin, which no rollout moves.
        rollout: the deployment's active one.
        failed_builds: of rollouts of this deployment that were given up; asked for nothing where the revision
            names its build.
    """

    public_name: str
    base_model: str
    deployment_id: UUID
    created_at: datetime
    owner: str
    revision: Revision
    is_pinned: bool = False
    rollout: ActiveRollout | None = None
    failed_builds: tuple[str, ...] = ()

    def answered_by(self, revision: Revision) -> ServedModel:
        """The same with another revision."""
        return self if revision is self.revision else replace(self, revision=revision)

    @property
    def builds(self) -> BuildRule:
        """Which engine builds may run its revision."""
        if self.revision.fingerprint is not None:
            return BuildRule(only=self.revision.fingerprint)
        tried = None if self.rollout is None else self.rollout.canary.fingerprint
        if tried is None and not self.failed_builds:
            return ANY_BUILD
        return BuildRule(never=tried, rather_not=self.failed_builds)


_CanaryVersion = aliased(AdapterVersion)
_CanaryBuild = aliased(EngineBuild)
_FailedBuild = aliased(EngineBuild)
_CanaryRevision = aliased(DeploymentRevision)
_FailedRevision = aliased(DeploymentRevision)


def _visible(
    tenant_id: UUID | ColumnElement[UUID], base_model: str | ColumnElement[str]
) -> Select[
    str,
    str,
    UUID,
    datetime,
    str,
    UUID,
    UUID,
    UUID | None,
    str | None,
    UUID | None,
    Json,
    str | None,
    bool,
]:
    """The revision that the tenant's pin names while it holds, else the deployment's current one."""
    return (
        select(
            Deployment.public_name,
            BaseModel.name,
            Deployment.id,
            Deployment.created_at,
            func.coalesce(Tenant.slug, "loraplex"),
            DeploymentRevision.id,
            BaseModel.id,
            DeploymentRevision.adapter_version_id,
            DeploymentRevision.adapter_digest,
            AdapterVersion.adapter_id,
            func.nullif(DeploymentRevision.params, literal_column("'{}'::jsonb")),
            EngineBuild.fingerprint,
            Pin.revision_id.is_not(None),
        )
        .select_from(Deployment)
        .outerjoin(
            Pin,
            (Pin.tenant_id == tenant_id)
            & (Pin.deployment_id == Deployment.id)
            & Pin.expired_at.is_(None)
            & or_(Pin.until.is_(None), Pin.until > func.now()),
        )
        .join(
            DeploymentRevision,
            (
                DeploymentRevision.id
                == func.coalesce(Pin.revision_id, Deployment.current_revision_id)
            )
            & (DeploymentRevision.deployment_id == Deployment.id)
            & DeploymentRevision.tenant_id.is_not_distinct_from(Deployment.tenant_id),
        )
        .join(BaseModel, BaseModel.id == DeploymentRevision.base_model_id)
        .outerjoin(Tenant, Tenant.id == Deployment.tenant_id)
        .outerjoin(
            AdapterVersion,
            (AdapterVersion.id == DeploymentRevision.adapter_version_id)
            & (AdapterVersion.tenant_id == DeploymentRevision.tenant_id),
        )
        .outerjoin(EngineBuild, EngineBuild.id == DeploymentRevision.engine_build_id)
        .where(
            or_(Deployment.tenant_id == tenant_id, Deployment.tenant_id.is_(None)),
            Deployment.archived_at.is_(None),
            BaseModel.name == base_model,
        )
    )


def _rollout() -> ColumnElement[Any]:
    """The deployment's active rollout in one value: most have none, and then it costs next to nothing."""
    fields = {
        "id": Rollout.id,
        "step": Rollout.step,
        "state": Rollout.state,
        "weight_bp": Rollout.weight_bp,
        "shadow_bp": Rollout.shadow_bp,
        "score_bp": Rollout.score_bp,
        "sticky_by": Rollout.sticky_by,
        "salt": func.encode(Rollout.salt, "hex"),
        "revision_id": _CanaryRevision.id,
        "base_model_id": _CanaryRevision.base_model_id,
        "adapter_version_id": _CanaryRevision.adapter_version_id,
        "adapter_digest": _CanaryRevision.adapter_digest,
        "adapter_id": _CanaryVersion.adapter_id,
        "params": _CanaryRevision.params,
        "fingerprint": _CanaryBuild.fingerprint,
    }
    pairs = [part for name, column in fields.items() for part in (literal(name), column)]
    return (
        select(func.jsonb_build_object(*pairs))
        .select_from(Rollout)
        .join(
            _CanaryRevision,
            (_CanaryRevision.id == Rollout.canary_revision_id)
            & (_CanaryRevision.deployment_id == Rollout.deployment_id),
        )
        .outerjoin(
            _CanaryVersion,
            (_CanaryVersion.id == _CanaryRevision.adapter_version_id)
            & (_CanaryVersion.tenant_id == _CanaryRevision.tenant_id),
        )
        .outerjoin(_CanaryBuild, _CanaryBuild.id == _CanaryRevision.engine_build_id)
        .where(
            Rollout.deployment_id == Deployment.id,
            Rollout.state.in_(("evaluating", "shadow", "canary")),
        )
        .correlate(Deployment)
        .scalar_subquery()
    )


def _failed_builds() -> ColumnElement[Any]:
    """Builds that were given up here. They would come back as any other of the base otherwise, in the
    moment in which a gate aborts their rollout.
    """
    return (
        select(func.array_agg(_FailedBuild.fingerprint.distinct()))
        .select_from(Rollout)
        .join(_FailedRevision, _FailedRevision.id == Rollout.canary_revision_id)
        .join(_FailedBuild, _FailedBuild.id == _FailedRevision.engine_build_id)
        .where(
            Rollout.deployment_id == Deployment.id,
            Rollout.state.in_(("aborted", "rolled_back")),
            DeploymentRevision.engine_build_id.is_(None),
        )
        .correlate(Deployment, DeploymentRevision)
        .scalar_subquery()
    )


def _compile_find() -> str:
    """As text for the driver, once, for many at a time: every request asks this."""
    found = (
        _visible(
            literal_column("asked.tenant_id", Uuid()), literal_column("asked.base_model", Text())
        )
        .add_columns(_rollout(), _failed_builds())
        .where(Deployment.public_name == literal_column("asked.public_name", Text()))
        .order_by(Deployment.tenant_id.is_(None))
        .limit(literal_column("1"))
    )
    compiled = found.compile(
        dialect=psycopg_dialect(),  # type: ignore[no-untyped-call] # SQLAlchemy's
        compile_kwargs={"literal_binds": True},
    )
    return f"""
        select asked.item, found.*
        from jsonb_to_recordset(%(batch)s::jsonb)
            as asked (item integer, tenant_id uuid, base_model text, public_name text)
        left join lateral ({compiled}) as found on true
    """  # noqa: S608 # SQLAlchemy's text


_FIND_MODELS = _compile_find()


async def find_model(
    sessions: SessionFactory, tenant_id: UUID, base_model: str, public_name: str
) -> ServedModel | None:
    """The tenant's deployment of that name, else the platform's.

    Raises:
        InvalidRevisionError: what is stored of its revision cannot be used.
    """
    if "\0" in public_name:  # Postgres has no such text, so nothing is called that
        return None
    asked = {"tenant_id": tenant_id, "base_model": base_model, "public_name": public_name}
    found = await sessions.batched(_FIND_MODELS).call(asked)
    if found is None:
        found = await sessions.calls.call(_FIND_MODELS, {"batch": one_item(asked)})
    if found[1] is None:
        return None
    *model, rollout, failed_builds = found[1:]
    return _served(
        model,
        None if rollout is None else _active(rollout),
        tuple(sorted(failed_builds or ())),
    )


def _served(
    row: Sequence[Any],
    rollout: ActiveRollout | None = None,
    failed_builds: tuple[str, ...] = (),
) -> ServedModel:
    """Of a row of `_visible`."""
    name, base_model, deployment_id, created_at, owner, *revision, is_pinned = row
    revision_id, base_model_id, version_id, digest, adapter_id, params, fingerprint = revision
    return ServedModel(
        public_name=name,
        base_model=base_model,
        deployment_id=deployment_id,
        created_at=created_at,
        owner=owner,
        revision=Revision(
            id=revision_id,
            base_model_id=base_model_id,
            adapter_version_id=version_id,
            adapter_digest=digest,
            adapter_id=adapter_id,
            params=params_of(revision_id, params),
            fingerprint=fingerprint,
        ),
        is_pinned=is_pinned,
        rollout=rollout,
        failed_builds=failed_builds,
    )


def _active(row: Json) -> ActiveRollout:
    """Of a row of `_rollout`."""

    def id_of(name: str) -> UUID | None:
        return None if row[name] is None else UUID(row[name])

    revision_id = UUID(row["revision_id"])
    return ActiveRollout(
        id=UUID(row["id"]),
        step=row["step"],
        state=row["state"],
        weight_bp=row["weight_bp"],
        shadow_bp=row["shadow_bp"],
        score_bp=row["score_bp"],
        sticky_by=row["sticky_by"],
        salt=bytes.fromhex(row["salt"]),
        canary=Revision(
            id=revision_id,
            base_model_id=UUID(row["base_model_id"]),
            adapter_version_id=id_of("adapter_version_id"),
            adapter_digest=row["adapter_digest"],
            adapter_id=id_of("adapter_id"),
            params=params_of(revision_id, row["params"]),
            fingerprint=row["fingerprint"],
        ),
    )


async def list_models(session: AsyncSession, tenant_id: UUID, base_model: str) -> list[ServedModel]:
    """Everything the tenant may call: the platform's first, then by name."""
    statement = _visible(tenant_id, base_model).order_by(
        Deployment.tenant_id.is_not(None), Deployment.public_name
    )
    rows = (await session.execute(statement)).all()
    return [_served(row) for row in rows]


async def note_stable_logprob(
    sessions: SessionFactory, request_id: UUID, mean_logprob: float
) -> None:
    """Of a request's answer, under its rollout's stable revision."""
    await sessions.calls.call(
        "update requests set stable_logprob = %(mean)s::real where id = %(id)s returning id",
        {"id": request_id, "mean": mean_logprob},
    )


async def mirrored_replicas(session: AsyncSession) -> Sequence[Json]:
    """Records of replicas seen within a day: whether one still lives, its connection tells."""
    statement = (
        select(Replica.record)
        .where(Replica.last_seen_at > func.now() - _FALLBACK_SEEN_WITHIN)
        .order_by(Replica.last_seen_at.desc())
        .limit(_MAX_REPLICAS)
    )
    return (await session.scalars(statement)).all()


async def note_gateway(session: AsyncSession, gateway_id: str, started_at: datetime) -> None:
    """This gateway's heartbeat."""
    statement = insert(Gateway).values(
        gateway_id=gateway_id, started_at=started_at, last_seen_at=func.now()
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[Gateway.gateway_id],
            set_={"started_at": started_at, "last_seen_at": func.now()},
        )
    )


async def count_gateways(session: AsyncSession, gone_s: float) -> int:
    """Gateways with a heartbeat in the last `gone_s` seconds."""
    statement = (
        select(func.count())
        .select_from(Gateway)
        .where(Gateway.last_seen_at > func.now() - timedelta(seconds=gone_s))
    )
    return (await session.execute(statement)).scalar_one()
