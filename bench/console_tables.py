"""The tables behind the console's lists, filled by the server itself: `fill(url, tenant, sizes)`.

Bulk inserts of the owner's with triggers off, as `bench.key_list` and `bench.usage_report` make theirs.
Ids are UUIDv7 by the row's number, as those of things that are made one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self
from uuid import UUID

import psycopg


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many there are of each. Those without a "whose" are the large tenant's."""

    requests: int = 5_000_000  # of a thousand tenants, a quarter the large one's
    keys: int = 400_000
    adapters: int = 10_000  # each with two versions, an alias, a deployment of two revisions
    tenants: int = 10_000  # besides
    members: int = 2_000
    audit: int = 500_000
    limits: int = 5_000
    refusals: int = 100_000
    rollouts: int = 2_000  # each with ten events
    eval_runs: int = 5_000  # of two hundred suites
    eval_results: int = 2_000  # of one run
    deliveries: int = 200_000  # of one webhook
    residents: int = 1_000

    def scaled(self, scale: float) -> Self:
        """All of them times `scale`."""
        return type(self)(
            **{f.name: max(20, int(getattr(self, f.name) * scale)) for f in fields(self)}
        )


# 0x%(kind)s keeps one table's ids from another's.
_ID = """
create function pg_temp.nth(kind integer, n bigint) returns uuid language sql immutable as $$
    select (lpad(to_hex(1700000000000 + n), 12, '0') || '7' || lpad(to_hex(kind), 3, '0') || '8'
        || lpad(to_hex(n), 15, '0'))::uuid
$$
"""
_TENANTS = """
insert into tenants (id, slug, name)
select pg_temp.nth(1, n), 'customer-' || n, 'Customer ' || n || ' Ltd.'
from generate_series(1, %(tenants)s) n
"""
_MEMBERS = """
with made as (
    insert into users (id, email) select pg_temp.nth(2, n), 'member-' || n || '@example.com'
    from generate_series(1, %(members)s) n returning id
)
insert into memberships (tenant_id, user_id, role) select %(mine)s, id, 'developer' from made
"""
_REPORT = """
jsonb_build_object('checks', (
    select jsonb_agg(jsonb_build_object('name', 'check ' || c, 'ok', true, 'detail', repeat('fine ', 8)))
    from generate_series(1, 12) c), 'matched_modules', 96, 'total_modules', 96,
    'parameters', 5000000, 'norms', '{"max": 1}'::jsonb, 'probe', null)
"""
_ADAPTERS = (
    # Those that there are already say nothing of their checks.
    f"update adapter_versions set report = {_REPORT}",
    """
    insert into adapters (id, tenant_id, name, base_model_id)
    select pg_temp.nth(3, n), %(mine)s, 'support-' || n, %(base)s from generate_series(1, %(adapters)s) n
    """,
    f"""
    insert into adapter_versions (id, tenant_id, adapter_id, version, digest, status, size_bytes,
        rank, target_modules, report)
    select pg_temp.nth(4, 2 * n + v), %(mine)s, pg_temp.nth(3, n), v,
        'sha256:' || md5(n || ':' || v) || md5(v || ':' || n), 'ready', 20000000, 16,
        '{{q_proj,k_proj,v_proj,o_proj}}', {_REPORT}
    from generate_series(1, %(adapters)s) n, generate_series(1, 2) v
    """,
    """
    insert into adapter_aliases (adapter_id, alias, tenant_id, version_id)
    select pg_temp.nth(3, n), 'production', %(mine)s, pg_temp.nth(4, 2 * n + 1)
    from generate_series(1, %(adapters)s) n
    """,
    """
    insert into deployments (id, tenant_id, public_name, base_model_id, current_revision_id)
    select pg_temp.nth(5, n), %(mine)s, 'assistant-' || n, %(base)s, pg_temp.nth(6, 2 * n + 2)
    from generate_series(1, %(adapters)s) n
    """,
    """
    insert into deployment_revisions (id, deployment_id, tenant_id, number, base_model_id,
        adapter_version_id, adapter_digest, params, sha256)
    select pg_temp.nth(6, 2 * n + v), pg_temp.nth(5, n), %(mine)s, v, %(base)s, pg_temp.nth(4, 2 * n + v),
        'sha256:' || md5(n || ':' || v) || md5(v || ':' || n), '{}', md5(n || ':' || v)
    from generate_series(1, %(adapters)s) n, generate_series(1, 2) v
    """,
    """
    insert into resident_adapters (tenant_id, version_id, digest, reason, created_by)
    select tenant_id, id, digest, 'often asked', 'bench' from adapter_versions
    where tenant_id = %(mine)s and version = 1 order by id limit %(residents)s
    """,
)
_AUDIT = """
insert into audit_log (id, actor_kind, actor_id, request_id, action, object_kind, object_id, tenant_id,
    detail, chain, seq, prev_hash, hash, at)
select pg_temp.nth(7, n), 'user', 'usr_' || md5((n %% 50)::text), 'req_' || md5(n::text),
    (array['key.create', 'key.revoke', 'adapter.upload', 'deployment.update'])[1 + n %% 4],
    (array['api_key', 'api_key', 'adapter', 'deployment'])[1 + n %% 4], 'obj_' || md5((n / 7)::text),
    case when n %% 2 = 0 then %(mine)s::uuid else pg_temp.nth(1, 1 + n %% %(tenants)s) end, '{}',
    case when n %% 2 = 0 then %(mine)s::uuid else pg_temp.nth(1, 1 + n %% %(tenants)s) end, n,
    decode(md5(n::text), 'hex'), decode(md5(n::text || 'x'), 'hex'),
    to_timestamp(1700000000 + n / 1000.0)
from generate_series(1, %(audit)s) n
"""
_INVOICES = """
insert into invoices (id, tenant_id, kind, status, number, period_start, period_end, billing_tz, issuer,
    customer, exact_pico, subtotal_cents, adjustments_cents, tax_cents, total_cents, due_cents, issued_at)
select pg_temp.nth(8, 3 * t.n + m), t.id, 'invoice', 'final', 'INV-' || t.n || '-' || m,
    date_trunc('month', now()) - make_interval(months => m),
    date_trunc('month', now()) - make_interval(months => m - 1), 'UTC', '{"name": "Host"}',
    '{"name": "Customer"}', 1000000000000, 100, 0, 0, 100, 100, now()
from (select id, row_number() over (order by id) as n from tenants) t, generate_series(1, 3) m
"""
_LIMITS = """
insert into limits (id, tenant_id, scope_kind, scope_id, metric, period, value)
select pg_temp.nth(9, row_number() over (order by id)), tenant_id, 'key', id, 'cost', 'month',
    1000000000000
from (select id, tenant_id from api_keys where tenant_id = %(mine)s order by id limit %(limits)s) k
"""
_REFUSALS = """
insert into refusals (id, at, tenant_id, code, reason, count, request_ids)
select pg_temp.nth(10, n), now() - n * interval '10 seconds', %(mine)s, 'rate_limit_exceeded',
    'too many', 1, array[pg_temp.nth(11, n)]
from generate_series(1, %(refusals)s) n
"""
_ROLLOUTS = """
insert into rollouts (id, tenant_id, deployment_id, stable_revision_id, canary_revision_id, state, steps,
    sticky_by, salt, gate, changes, created_by, started_at, ended_at)
select pg_temp.nth(12, n), %(mine)s, pg_temp.nth(5, 1 + n %% %(adapters)s),
    pg_temp.nth(6, 2 * (1 + n %% %(adapters)s) + 1), pg_temp.nth(6, 2 * (1 + n %% %(adapters)s) + 2),
    case when n %% 3 = 0 then 'aborted' else 'promoted' end, '[]', 'key', '\\x00',
    '{"gates": {}, "promotion": "automatic", "warnings": []}', '{adapter}',
    'bench', now(), now()
from generate_series(1, %(rollouts)s) n
"""
_ROLLOUT_EVENTS = """
insert into rollout_events (rollout_id, seq, tenant_id, kind, actor, message, detail)
select pg_temp.nth(12, n), s, %(mine)s, 'step', 'system', 'on to the next step', '{}'
from generate_series(1, %(rollouts)s) n, generate_series(1, 10) s
"""
_EVALS = (
    """
    insert into eval_suites (id, tenant_id, name, kind)
    select pg_temp.nth(13, n), %(mine)s, 'suite-' || n, 'checks' from generate_series(1, 200) n
    """,
    """
    insert into eval_suite_versions (id, tenant_id, suite_id, number, sha256, num_cases, content)
    select pg_temp.nth(14, n), %(mine)s, pg_temp.nth(13, n), 1, md5(n::text), %(eval_results)s, ''
    from generate_series(1, 200) n
    """,
    """
    insert into eval_runs (id, tenant_id, suite_version_id, deployment_id, revision_id, options, state,
        num_cases, started_at, ended_at, score)
    select pg_temp.nth(15, n), %(mine)s, pg_temp.nth(14, 1 + n %% 200), pg_temp.nth(5, 1),
        pg_temp.nth(6, 3), '{}', case when n %% 5 = 0 then 'failed' else 'passed' end,
        %(eval_results)s, now(), now(), 0.9
    from generate_series(1, %(eval_runs)s) n
    """,
    """
    insert into eval_results (id, run_id, tenant_id, case_index, case_id, status, reason, checks)
    select pg_temp.nth(16, n), pg_temp.nth(15, %(eval_runs)s), %(mine)s, n, 'case-' || n, 'pass', '',
        '{}'
    from generate_series(1, %(eval_results)s) n
    """,
)
_WEBHOOKS = (
    """
    insert into webhooks (id, tenant_id, url, topics, secret_box, secret_key_id)
    select pg_temp.nth(17, n), %(mine)s, 'https://hooks.example.com/' || n, '{alert}', '\\x00', 'k'
    from generate_series(1, 20) n
    """,
    """
    insert into webhook_deliveries (id, webhook_id, tenant_id, topic, dedupe_key, payload, occurred_at,
        status, give_up_at, delivered_at)
    select pg_temp.nth(18, n), pg_temp.nth(17, 20), %(mine)s, 'alert', n::text, '{"kind": "quota"}', now(),
        'delivered', now(), now()
    from generate_series(1, %(deliveries)s) n
    """,
)
# In this order, for some name what others made.
_STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tenants", (_TENANTS,)),
    ("members", (_MEMBERS,)),
    ("adapters and deployments", _ADAPTERS),
    ("audit log", (_AUDIT,)),
    ("invoices", (_INVOICES,)),
    ("limits", (_LIMITS,)),
    ("refusals", (_REFUSALS,)),
    ("rollouts", (_ROLLOUTS, _ROLLOUT_EVENTS)),
    ("evals", _EVALS),
    ("webhooks", _WEBHOOKS),
)


def fill(
    url: str, tenant_id: UUID, base_model_id: UUID, sizes: Sizes, tell: Callable[[str], None]
) -> None:
    """Everything but requests and keys, which are there already; analyzed.

    Args:
        url: the owner's.
        tenant_id: whose most of it is.
        base_model_id: of every adapter.
        tell: what has been filled, and how long that took.
    """
    values = {f.name: getattr(sizes, f.name) for f in fields(sizes)}
    values |= {"mine": tenant_id, "base": base_model_id}
    with psycopg.connect(url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute(_ID)
        for title, statements in _STEPS:
            began_s = time.perf_counter()
            for statement in statements:
                owner.execute(statement, values)
            tell(f"{title} filled in {time.perf_counter() - began_s:.0f} s")
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("vacuum analyze")
