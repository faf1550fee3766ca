"""SQL of the data plane. Everything a tenant owns is asked for with the tenant's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
    Gateway,
    Pin,
    Replica,
    Tenant,
)
from loraplex_platform.db.base import Json
from loraplex_platform.db.batched_calls import one_item
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.gateway.builds import ANY_BUILD, BuildRule
from loraplex_platform.gateway.revision_params import (
    NO_PARAMS,
    InvalidRevisionError,
    RevisionParams,
    params_of,
)
from loraplex_platform.rollouts.assignment import StickyBy

_FALLBACK_SEEN_WITHIN = timedelta(days=1)
_MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class Revision:
    """Immutable: what answers.

    Attributes:
        deployment_id, tenant_id: whose it is; no tenant: the platform's.
        fingerprint: of the one engine build that runs it; None: any of the base does.
        fault: why it cannot be used, if it cannot.
    """

    id: UUID
    deployment_id: UUID
    tenant_id: UUID | None
    base_model_id: UUID
    base_model: str
    adapter_version_id: UUID | None = None
    adapter_digest: str | None = None
    adapter_id: UUID | None = None
    params: RevisionParams = NO_PARAMS
    fingerprint: str | None = None
    fault: InvalidRevisionError | None = None


class KnownRevisions:
    """What a gateway has read of revisions: they never change, so each is read once.

    Args:
        most: how many are kept; whoever was read first goes first.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._known: dict[UUID, Revision] = {}

    async def find(self, sessions: SessionFactory, ids: Sequence[UUID]) -> list[Revision]:
        """Those that there are, in no order."""
        found = [self._known[id_] for id_ in ids if id_ in self._known]
        if len(found) == len(ids):
            return found
        unknown = [id_ for id_ in ids if id_ not in self._known]
        read = [
            _revision(row) for row in await sessions.calls.rows(_FIND_REVISIONS, {"ids": unknown})
        ]
        for revision in read:
            self._known[revision.id] = revision
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return found + read


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
        is_pinned: the revision is the tenant's pin, which no rollout moves.
        rollout: the deployment's active one.
        failed_builds: of rollouts of this deployment that were given up; not asked for where the revision
            names its build.
    """

    public_name: str
    deployment_id: UUID
    revision: Revision
    is_pinned: bool = False
    rollout: ActiveRollout | None = None
    failed_builds: tuple[str, ...] = ()

    @property
    def base_model(self) -> str:
        """Its public name."""
        return self.revision.base_model

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


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as lists show it. `owner`: the tenant's slug, or "loraplex"."""

    public_name: str
    deployment_id: UUID
    created_at: datetime
    owner: str
    base_model_id: UUID
    adapter_id: UUID | None


# Many at a time: every request asks this. The tenant's own deployment goes before the platform's. Of a
# rollout that was given up the build would come back as any other of the base, in the moment in which a
# gate aborts it: so the last few are told too.
_FIND_MODELS: Final = """
select asked.item, found.*
from jsonb_to_recordset(%(batch)s::jsonb)
    as asked (item integer, tenant_id uuid, base_model text, public_name text)
left join lateral (
    select d.id, d.tenant_id, coalesce(p.revision_id, d.current_revision_id),
        p.revision_id is not null,
        array(
            select f.canary_revision_id from rollouts f
            where f.deployment_id = d.id and f.state in ('aborted', 'rolled_back')
            order by f.id desc limit 16
        ),
        r.id, r.step, r.state, r.weight_bp, r.shadow_bp, r.score_bp, r.sticky_by, r.salt,
        r.canary_revision_id
    from deployments d
    join base_models b on b.id = d.base_model_id and b.name = asked.base_model
    left join pins p on p.tenant_id = asked.tenant_id and p.deployment_id = d.id
        and p.expired_at is null and (p.until is null or p.until > now())
    left join rollouts r on r.deployment_id = d.id
        and r.state in ('evaluating', 'shadow', 'canary')
    where d.public_name = asked.public_name and d.archived_at is null
        and (d.tenant_id = asked.tenant_id or d.tenant_id is null)
    order by d.tenant_id is null limit 1
) as found on true
"""
# An adapter is its revision's own tenant's.
_FIND_REVISIONS: Final = """
select r.id, r.deployment_id, r.tenant_id, r.base_model_id, b.name, r.adapter_version_id,
    r.adapter_digest, v.adapter_id, r.params, e.fingerprint
from deployment_revisions r
join base_models b on b.id = r.base_model_id
left join adapter_versions v on v.id = r.adapter_version_id and v.tenant_id = r.tenant_id
left join engine_builds e on e.id = r.engine_build_id
where r.id = any(%(ids)s)
"""


async def find_model(
    sessions: SessionFactory,
    tenant_id: UUID,
    base_model: str,
    public_name: str,
    *,
    known: KnownRevisions | None = None,
) -> ServedModel | None:
    """The tenant's deployment of that name, else the platform's: one statement, and one more for revisions
    that are not `known`.

    Raises:
        InvalidRevisionError: what is stored of a revision that may answer cannot be used.
    """
    if "\0" in public_name:  # Postgres has no such text, so nothing is called that
        return None
    asked = {"tenant_id": tenant_id, "base_model": base_model, "public_name": public_name}
    found = await sessions.batched(_FIND_MODELS).call(asked)
    if found is None:
        found = await sessions.calls.call(_FIND_MODELS, {"batch": one_item(asked)})
    _, deployment_id, owner_id, revision_id, is_pinned, failed, rollout_id, *rollout = found
    if deployment_id is None or revision_id is None:
        return None
    canary_id = rollout[-1]
    ids = {revision_id, canary_id, *failed} - {None} if failed or rollout_id else {revision_id}
    revisions = {
        revision.id: revision
        for revision in await (known or KnownRevisions()).find(sessions, list(ids))
        if (revision.deployment_id, revision.tenant_id, revision.base_model)
        == (deployment_id, owner_id, base_model)
    }
    revision = _usable(revisions.get(revision_id))
    if revision is None:
        return None
    active = None
    if rollout_id is not None and (canary := _usable(revisions.get(canary_id))) is not None:
        step, state, weight_bp, shadow_bp, score_bp, sticky_by, salt, _ = rollout
        active = ActiveRollout(
            rollout_id, step, state, weight_bp, shadow_bp, score_bp, sticky_by, salt, canary
        )
    builds = {revisions[id_].fingerprint for id_ in failed if id_ in revisions}
    return ServedModel(
        public_name=public_name,
        deployment_id=deployment_id,
        revision=revision,
        is_pinned=is_pinned,
        rollout=active,
        failed_builds=tuple(sorted(build for build in builds if build is not None)),
    )


def _usable(revision: Revision | None) -> Revision | None:
    if revision is not None and revision.fault is not None:
        raise InvalidRevisionError(revision.fault.message)
    return revision


def _revision(row: Sequence[Any]) -> Revision:
    """Of a row of `_FIND_REVISIONS`."""
    id_, deployment_id, tenant_id, base_id, base, version_id, digest, adapter_id, stored, build = (
        row
    )
    params, fault = NO_PARAMS, None
    try:
        params = params_of(id_, stored)
    except InvalidRevisionError as error:
        fault = error
    return Revision(
        id=id_,
        deployment_id=deployment_id,
        tenant_id=tenant_id,
        base_model_id=base_id,
        base_model=base,
        adapter_version_id=version_id,
        adapter_digest=digest,
        adapter_id=adapter_id,
        params=params,
        fingerprint=build,
        fault=fault,
    )


async def list_models(
    session: AsyncSession, tenant_id: UUID, base_model: str, public_name: str | None = None
) -> list[ListedModel]:
    """Everything the tenant may call: the platform's first, then by name. A pin's revision goes before the
    current one.

    Args:
        public_name: only what is called that.
    """
    statement = (
        select(
            Deployment.public_name,
            Deployment.id,
            Deployment.created_at,
            func.coalesce(Tenant.slug, "loraplex"),
            BaseModel.id,
            AdapterVersion.adapter_id,
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
        .where(
            or_(Deployment.tenant_id == tenant_id, Deployment.tenant_id.is_(None)),
            Deployment.archived_at.is_(None),
            BaseModel.name == base_model,
        )
        .order_by(Deployment.tenant_id.is_not(None), Deployment.public_name)
    )
    if public_name is not None:
        statement = statement.where(Deployment.public_name == public_name)
    return [ListedModel(*row) for row in (await session.execute(statement)).all()]


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
