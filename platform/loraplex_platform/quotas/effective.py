"""Which rates hold for a request: what gateways enforce in Redis, from the table of limits.

Quotas are not here: `loraplex_reserve` reads them in the transaction that admits the request.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from loraplex_platform.db.batched_calls import one_item
from loraplex_platform.db.quotas import NO_SCOPE_ID
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.quotas.records import EffectiveLimits, LimitScopes, RateLimit, RateMetric

# One statement, so that the versions are those of the limits beside them. For many at a time: with
# thousands of tenants every other request asks this. Each sees its own scopes and nothing of others'.
# Written so that rows are found by the six scopes: a tenant may have a limit for each of its many keys.
_RATES = f"""
select asked.item, (select limits_version from tenants where id = asked.tenant_id),
    coalesce((select version from shared_limits_version), 1), rates.found::text
from jsonb_to_recordset(%(batch)s::jsonb) as asked (
    item integer, tenant_id uuid, key_id uuid, project_id uuid, deployment_id uuid, adapter_id uuid)
cross join lateral (
    select json_agg(json_build_object(
        'limit_id', l.id, 'scope_kind', l.scope_kind,
        'scope_id', case when l.scope_kind <> 'platform' then l.scope_id end,
        'owner_tenant_id', l.tenant_id, 'metric', l.metric, 'value', l.value,
        'burst', greatest(1, coalesce(l.burst, l.value)), 'fail_mode', l.fail_mode
    ) order by l.scope_kind, l.metric) as found
    from limits l
    where l.metric in ({", ".join(f"'{metric}'" for metric in get_args(RateMetric))}) and l.is_hard
        and l.scope_id in (asked.tenant_id, asked.key_id, asked.project_id, asked.deployment_id,
            asked.adapter_id, '{NO_SCOPE_ID}')
        and l.scope_id = case l.scope_kind
            when 'key' then asked.key_id when 'project' then asked.project_id
            when 'tenant' then asked.tenant_id when 'adapter' then asked.adapter_id
            when 'deployment' then asked.deployment_id
            else '{NO_SCOPE_ID}' end
        and coalesce(l.tenant_id, asked.tenant_id) = asked.tenant_id
        and (l.valid_from is null or l.valid_from <= now())
        and (l.valid_to is null or l.valid_to > now())
) as rates
"""  # noqa: S608 # our own words
_RATE_LIMITS = msgspec.json.Decoder(tuple[RateLimit, ...])


async def effective_limits(sessions: SessionFactory, scopes: LimitScopes) -> EffectiveLimits:
    """The rates of these scopes that are in force now; of an unknown tenant none, as version 0.

    Raises:
        DatabaseUnavailableError: they are not known.
    """
    asked = {
        "tenant_id": scopes.tenant_id,
        "key_id": scopes.key_id,
        "project_id": scopes.project_id,
        "deployment_id": scopes.deployment_id,
        "adapter_id": scopes.adapter_id,
    }
    row = await sessions.batched(_RATES).call(asked)
    if row is None:
        row = await sessions.calls.call(_RATES, {"batch": one_item(asked)})
    _, version, shared_version, rates = row
    if version is None:
        return EffectiveLimits(version=0)
    return EffectiveLimits(
        version=version,
        shared_version=shared_version,
        rates=() if rates is None else _RATE_LIMITS.decode(rates),
    )
