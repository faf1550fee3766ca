"""Which rates hold for a request: what gateways enforce in Redis, from the table of limits.

Quotas are not here: `loraplex_reserve` reads them in the transaction that admits the request.
"""

from __future__ import annotations

from typing import get_args

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.quotas.records import EffectiveLimits, LimitScopes, RateLimit, RateMetric

# One statement, so that the versions are those of the limits beside them.
_RATES = text("""
select t.limits_version,
    coalesce((select s.version from shared_limits_version s), 1) as shared_version, l.id, l.scope_kind, l.scope_id, l.tenant_id, l.metric, l.value, l.burst,
    l.fail_mode
from tenants t
left join limits l on l.metric = any(cast(:metrics as varchar[])) and l.is_hard
    and l.scope_id = any(cast(:scope_ids as uuid[]))
    and l.scope_id = case l.scope_kind
        when 'key' then cast(:key_id as uuid) when 'project' then cast(:project_id as uuid)
        when 'tenant' then t.id when 'adapter' then cast(:adapter_id as uuid)
        when 'deployment' then cast(:deployment_id as uuid)
        else cast(:no_scope_id as uuid) end
    and (l.tenant_id is null or l.tenant_id = t.id)
    and (l.valid_from is null or l.valid_from <= now())
    and (l.valid_to is null or l.valid_to > now())
where t.id = :tenant_id
order by l.scope_kind, l.metric
""")


async def effective_limits(session: AsyncSession, scopes: LimitScopes) -> EffectiveLimits:
    """The rates of these scopes that are in force now; of an unknown tenant none, as version 0."""
    scope_ids = [
        scopes.tenant_id,
        scopes.key_id,
        scopes.project_id,
        scopes.deployment_id,
        scopes.adapter_id,
        NO_SCOPE_ID,
    ]
    parameters = {
        "metrics": list(get_args(RateMetric)),
        "scope_ids": [scope_id for scope_id in scope_ids if scope_id is not None],
        "tenant_id": scopes.tenant_id,
        "key_id": scopes.key_id,
        "project_id": scopes.project_id,
        "deployment_id": scopes.deployment_id,
        "adapter_id": scopes.adapter_id,
        "no_scope_id": NO_SCOPE_ID,
    }
    rows = (await session.execute(_RATES, parameters)).all()
    rates = tuple(
        RateLimit(
            limit_id=row.id,
            scope_kind=row.scope_kind,
            scope_id=None if row.scope_kind == "platform" else row.scope_id,
            owner_tenant_id=row.tenant_id,
            metric=row.metric,
            value=int(row.value),
            burst=max(1, int(row.value) if row.burst is None else row.burst),
            fail_mode=row.fail_mode,
        )
        for row in rows
        if row.id is not None
    )
    if not rows:
        return EffectiveLimits(version=0)
    first = rows[0]
    return EffectiveLimits(
        version=first.limits_version, shared_version=first.shared_version, rates=rates
    )
