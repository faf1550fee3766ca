"""All limits that bind one caller, and how they stand: rates in Redis, quotas in Postgres."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import Select, and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import AdapterVersion, ApiKey, Deployment, DeploymentRevision, Limit
from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.errors import NotFoundError
from loraplex_platform.quotas import queries
from loraplex_platform.quotas.records import LimitScopes, RateLimit
from loraplex_platform.quotas.service import RATE_METRICS
from loraplex_platform.rates.levels import levels_of
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisAwayError

# The order in which a reservation looks at them.
_RANK = case(
    {"key": 1, "project": 2, "tenant": 3, "adapter": 4, "deployment": 5},
    value=Limit.scope_kind,
    else_=6,
)


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit that is in force, in its metric's unit.

    Attributes:
        used, held: None: it is a rate, and Redis did not answer.
        resets_at: when nothing of it is used any more, if nothing else comes; None: never by itself.
    """

    limit: Limit
    used: int | None
    held: int | None
    resets_at: datetime | None

    @property
    def remaining(self) -> int | None:
        """What may still come now; None: see `used`."""
        if self.used is None or self.held is None:
            return None
        most = self.limit.value
        if self.limit.metric in RATE_METRICS and self.limit.metric != "concurrency":
            most = _burst(self.limit)
        return max(0, int(most) - self.used - self.held)


async def standing_of(
    session: AsyncSession,
    redis: DeadlineRedis | None,
    key_id: UUID,
    deployment_id: UUID | None = None,
) -> list[Standing]:
    """What binds a key, and with `deployment_id` also a request of its for that model.

    Shows what the session may see: to a tenant's member none of the limits that tenants share.

    Raises:
        NotFoundError: no such key, or no such deployment for it.
    """
    scopes = await _scopes_of(session, key_id, deployment_id)
    limits = list((await session.scalars(_in_force(scopes))).all())
    uses = await queries.uses_of(session, [limit.id for limit in limits])
    rates = [_rate(limit) for limit in limits if limit.metric in RATE_METRICS]
    levels = None
    if redis is not None:
        try:
            levels = await levels_of(redis, rates)
        except RedisAwayError:
            levels = None
    now = datetime.now(UTC)
    standings = []
    for limit in limits:
        use = uses.get(limit.id)
        if use is not None:
            standings.append(Standing(limit, use.committed, use.held, use.period_end))
        elif levels is None:
            standings.append(Standing(limit, None, None, None))
        else:
            level = levels[limit.id]
            is_held = limit.metric == "concurrency"
            standings.append(
                Standing(
                    limit,
                    0 if is_held else level.used,
                    level.used if is_held else 0,
                    None if level.full_in_s is None else now + timedelta(seconds=level.full_in_s),
                )
            )
    return standings


async def _scopes_of(
    session: AsyncSession, key_id: UUID, deployment_id: UUID | None
) -> LimitScopes:
    row = (
        await session.execute(
            select(ApiKey.tenant_id, ApiKey.project_id).where(ApiKey.id == key_id)
        )
    ).first()
    if row is None:
        raise NotFoundError("No such key.", param="key_id")
    adapter_id = None
    if deployment_id is not None:
        found = (
            await session.execute(
                select(Deployment.id, AdapterVersion.adapter_id)
                .outerjoin(
                    DeploymentRevision, DeploymentRevision.id == Deployment.current_revision_id
                )
                .outerjoin(
                    AdapterVersion, AdapterVersion.id == DeploymentRevision.adapter_version_id
                )
                .where(
                    Deployment.id == deployment_id,
                    or_(Deployment.tenant_id.is_(None), Deployment.tenant_id == row.tenant_id),
                )
            )
        ).first()
        if found is None:
            raise NotFoundError("No such deployment.", param="deployment_id")
        adapter_id = found.adapter_id
    return LimitScopes(
        tenant_id=row.tenant_id,
        key_id=key_id,
        project_id=row.project_id,
        deployment_id=deployment_id,
        adapter_id=adapter_id,
    )


def _in_force(scopes: LimitScopes) -> Select[Limit]:
    ids = {
        "key": scopes.key_id,
        "project": scopes.project_id,
        "tenant": scopes.tenant_id,
        "adapter": scopes.adapter_id,
        "deployment": scopes.deployment_id,
        "platform": NO_SCOPE_ID,
    }
    return (
        queries.limits_of(None)
        .where(
            or_(
                *(
                    and_(Limit.scope_kind == kind, Limit.scope_id == scope_id)
                    for kind, scope_id in ids.items()
                    if scope_id is not None
                )
            ),
            or_(Limit.tenant_id.is_(None), Limit.tenant_id == scopes.tenant_id),
            or_(Limit.valid_from.is_(None), Limit.valid_from <= func.now()),
            or_(Limit.valid_to.is_(None), Limit.valid_to > func.now()),
        )
        .order_by(_RANK, Limit.metric, Limit.period, Limit.window_s, Limit.id)
    )


def _rate(limit: Limit) -> RateLimit:
    return RateLimit(
        limit_id=limit.id,
        scope_kind=limit.scope_kind,  # type: ignore[arg-type] # checked by the table
        scope_id=None if limit.scope_kind == "platform" else limit.scope_id,
        owner_tenant_id=limit.tenant_id,
        metric=limit.metric,  # type: ignore[arg-type] # as above
        value=int(limit.value),
        burst=_burst(limit),
    )


def _burst(limit: Limit) -> int:
    return max(1, int(limit.value) if limit.burst is None else limit.burst)
