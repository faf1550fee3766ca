"""Settled requests by the million, made in SQL: for a month of bills and for reports over a year of them.

What `add_traffic` writes is what reserve and settle would have: request, attempt and ledger row, at the
prices of the book that was in force. Every number is a hash of the row's own, so that a run repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg

from tests.support.billing import Model
from tests.support.metering import Customer


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, and the model that it asks; None: the base."""

    customer: Customer
    model: Model | None


_CALLERS = """
create temporary table callers (
    n integer primary key, tenant_id uuid, key_id uuid, deployment_id uuid, adapter_version_id uuid,
    model text
)
"""

# One price lookup for each caller and book, by the product's own function.
_PRICES = """
create temporary table prices as
select c.n, b.id as book_id, b.effective_from, b.effective_to, p.*
from callers c cross join price_books b
cross join lateral loraplex_entry_prices(b.id, c.adapter_version_id, c.deployment_id) p
where b.status <> 'draft'
"""

_ROWS = """
create temporary table made as
select drawn.*, c.tenant_id, c.key_id, c.deployment_id, c.adapter_version_id, c.model,
    p.book_id, drawn.fresh * p.input + drawn.cached * p.cached_input
        + drawn.completion * p.output::numeric + p.request as amount_pico
from (
    select hashed.*, prompt - cached as fresh,
        (lpad(to_hex(floor(extract(epoch from at) * 1000)::bigint), 12, '0') || '7'
            || substr(hash, 1, 3) || '8' || substr(hash, 4, 15))::uuid as id
    from (
        select g, md5(g || ':' || %(seed)s) as hash, 1 + g %% %(num_callers)s as n,
            %(start)s::timestamptz + (%(end)s::timestamptz - %(start)s::timestamptz)
                * (abs(hashint8extended(g, 1)) %% 1000000000 / 1000000000.0) as at,
            1 + abs(hashint8extended(g, 2)) %% 3000 as prompt,
            case when abs(hashint8extended(g, 3)) %% 3 = 0
                then abs(hashint8extended(g, 4)) %% (1 + abs(hashint8extended(g, 2)) %% 3000)
                else 0 end as cached,
            abs(hashint8extended(g, 5)) %% 900 as completion,
            abs(hashint8extended(g, 6)) %% 25 = 0 as is_fault,
            abs(hashint8extended(g, 7)) %% 100 = 0 as is_probe
        from generate_series(1::bigint, %(rows)s) as g
    ) as hashed
) as drawn
join callers c using (n)
join prices p on p.n = drawn.n and p.effective_from <= drawn.at
    and (p.effective_to is null or p.effective_to > drawn.at)
"""

_INSERTS = (
    """
    insert into requests (id, tenant_id, key_id, deployment_id, adapter_version_id, price_book_id,
        kind, state, endpoint, model, is_stream, owner, lease_until, admitted_at, settled_at,
        est_prompt_tokens, est_completion_tokens, est_pico, prompt_tokens, cached_tokens,
        completion_tokens)
    select id, tenant_id, case when not is_probe then key_id end, deployment_id,
        adapter_version_id, book_id, case when is_probe then 'probe' else 'user' end, 'settled',
        'chat.completions', model, false, 'gw-1', at, at, at, prompt, completion, amount_pico,
        prompt, cached, case when is_fault or is_probe then 0 else completion end
    from made
    """,
    """
    insert into attempts (request_id, attempt, tenant_id, outcome, source, prompt_tokens,
        cached_tokens, generated, billed, absorbed, discarded_past_stop, discarded_past_abort)
    select id, 1, tenant_id, case when is_fault then 'fault' else 'completed' end, 'observed',
        prompt, cached, completion, case when is_fault or is_probe then 0 else completion end,
        case when is_fault or is_probe then completion else 0 end, 0, 0
    from made
    """,
    """
    insert into ledger (entry_id, kind, tenant_id, account, key_id, deployment_id,
        adapter_version_id, price_book_id, prompt_tokens, cached_tokens, completion_tokens,
        amount_pico, occurred_at)
    select id, 'usage', tenant_id, case when is_fault or is_probe then 'absorbed' else 'revenue' end,
        case when not is_probe then key_id end, deployment_id, adapter_version_id, book_id, prompt,
        cached, completion, amount_pico, at
    from made
    """,
)
_MARK_DAYS = """
insert into rollup_dirty (tenant_id, day)
select distinct m.tenant_id, (m.at at time zone t.billing_tz)::date
from made m join tenants t on t.id = m.tenant_id
"""
_MARK_REQUESTS = """
insert into rollup_dirty (tenant_id, day, entry_id)
select m.tenant_id, (m.at at time zone t.billing_tz)::date, m.id
from made m join tenants t on t.id = m.tenant_id
"""


def add_traffic(
    url: str,
    callers: Sequence[Caller],
    *,
    rows: int,
    start: datetime,
    end: datetime,
    seed: int = 0,
    marks_requests: bool = False,
) -> None:
    """Settled requests between two times, spread evenly over callers; their days are marked as
    changed, or (`marks_requests`) each request is, as a settle does."""
    with psycopg.connect(url) as owner:
        owner.execute("set session_replication_role = replica")
        owner.execute(_CALLERS)
        for number, caller in enumerate(callers, start=1):
            owner.execute(
                "insert into callers values (%s, %s, %s, %s, %s, %s)", _row(number, caller)
            )
        owner.execute(_PRICES)
        owner.execute("analyze callers")
        owner.execute("analyze prices")
        owner.execute(
            _ROWS,
            {
                "seed": seed,
                "num_callers": len(callers),
                "rows": rows,
                "start": start,
                "end": end,
            },
        )
        for statement in _INSERTS:
            owner.execute(statement)
        owner.execute(_MARK_REQUESTS if marks_requests else _MARK_DAYS)
        owner.execute("drop table made, prices, callers")
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("analyze requests, ledger, attempts, rollup_dirty")


def _row(number: int, caller: Caller) -> tuple[int, UUID, UUID, UUID | None, UUID | None, str]:
    model = caller.model
    return (
        number,
        caller.customer.tenant_id,
        caller.customer.key_id,
        None if model is None else model.deployment_id,
        None if model is None else model.adapter_version_id,
        "smollm2-135m" if model is None else model.name,
    )
