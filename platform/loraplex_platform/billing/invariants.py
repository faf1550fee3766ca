"""What must be true of rollups, adjustments and invoices (I5, I8), as `metering.invariants` runs it.

Each is (name, title, SQL of what breaks it, number). The SQL has that module's parameters.
"""

from __future__ import annotations

from typing import Final

_GROUP = """project_id, key_id, deployment_id, model, adapter_version_id, price_book_id"""
_SUMS_OF_GROUP = (
    "requests",
    "billed_requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "absorbed_tokens",
    "amount_pico",
    "absorbed_pico",
)
_SUMS = ", ".join(f"sum({name}) as {name}" for name in _SUMS_OF_GROUP)
_NEGATED = ", ".join(f"-{name}" for name in _SUMS_OF_GROUP)

# Marked days are on their way, and those of dropped months stay as they were rolled up. All tenants' days
# are made together (day by day, by `loraplex_usage_of`, a month of a thousand tenants takes ten times as
# long), from the requests of a few hours after the other, so that nothing grows with the books but what is
# rolled up of them.
_ROLLUPS = f"""
with chunks as (
    -- Wide enough for the whole of the first day, in all zones.
    select loraplex_uuid7_floor(greatest(at, 'epoch')) as first_id,
        loraplex_uuid7_floor(greatest(at + interval '6 hours', 'epoch')) as end_id
    from generate_series(
        greatest(cast(:since_time as timestamptz), coalesce((
            select to_timestamp(('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint
                / 1000.0)
            from requests order by id limit 1
        ), now())) - interval '30 hours', now() + interval '1 day', interval '6 hours'
    ) as at
), parts as (
    select p.* from chunks c cross join lateral (
        select r.tenant_id, (r.admitted_at at time zone loraplex_zone_of(r.tenant_id))::date as day,
            l.project_id, l.key_id, l.deployment_id, r.model, l.adapter_version_id,
            l.price_book_id, count(*) as requests,
            count(*) filter (where l.account = 'revenue') as billed_requests,
            coalesce(sum(l.prompt_tokens) filter (where l.account = 'revenue'), 0)
                as prompt_tokens,
            coalesce(sum(l.cached_tokens) filter (where l.account = 'revenue'), 0)
                as cached_tokens,
            coalesce(sum(l.completion_tokens) filter (where l.account = 'revenue'), 0)
                as completion_tokens,
            -- One by one, from an index of few: joined, it is the planner's guess how few.
            coalesce(sum((
                select sum(a.absorbed) from attempts a where a.absorbed > 0
                    and a.request_id = r.id and a.tenant_id = r.tenant_id
            )), 0) as absorbed_tokens,
            coalesce(sum(l.amount_pico) filter (where l.account = 'revenue'), 0) as amount_pico,
            coalesce(sum(l.amount_pico) filter (where l.account = 'absorbed'), 0)
                as absorbed_pico
        from requests r
        join ledger l on l.entry_id = r.id and l.entry_id >= c.first_id and l.entry_id < c.end_id
            -- `is true`: as another condition to join by it would let the planner expect next to none.
            and l.kind = 'usage' and (l.tenant_id = r.tenant_id) is true
        where r.kind = 'user' and r.state = 'settled' and r.id >= c.first_id and r.id < c.end_id
        group by r.tenant_id, 2, l.project_id, l.key_id, l.deployment_id, r.model,
            l.adapter_version_id, l.price_book_id
    ) p
), live as (
    select tenant_id, day, {_GROUP}, {_SUMS} from parts group by tenant_id, day, {_GROUP}
), differing as materialized (
    -- What is the same on both sides comes to nothing, and no group is there twice on one of them.
    select tenant_id, day from (
        select 1 as found, * from live
        union all
        select -1, tenant_id, day, {_GROUP}, {_NEGATED} from usage_daily
        where day >= cast(cast(:since_time as timestamptz) as date) - 1
    ) both_sides
    group by tenant_id, day, {_GROUP}
    having sum(found) <> 0 or {" or ".join(f"sum({name}) <> 0" for name in _SUMS_OF_GROUP)}
)
select t.slug || ' ' || d.day as id, count(*) || ' rows of the day differ from the ledger' as detail
from differing d join tenants t on t.id = d.tenant_id
where d.day >= (cast(:since_time as timestamptz) at time zone t.billing_tz)::date
    and not loraplex_is_dropped(d.day) and not exists (
        select from rollup_dirty m where m.tenant_id = d.tenant_id and m.day = d.day)
group by t.slug, d.day
"""  # noqa: S608 # names are ours

# Days that have been over for a day: until then the worker may not have come to them.
_HOURS = """
with days as (
    select e.tenant_id, cast(series.day as date) as day
    from (select tenant_id, min(at) as first_at from deployment_events group by tenant_id) e
    join tenants t on t.id = e.tenant_id
    cross join lateral generate_series(
        cast(cast(greatest(e.first_at, cast(:since_time as timestamptz))
            at time zone t.billing_tz as date) as timestamp),
        cast(cast(now() at time zone t.billing_tz as date) - 2 as timestamp), interval '1 day'
    ) as series (day)
    where exists (select from price_items i join price_books b on b.id = i.price_book_id
        where i.price_class = 'adapter_hour' and b.status <> 'draft')
    union
    select l.tenant_id, l.day from ledger l
    where l.kind = 'hours' and l.entry_id >= :ledger_since
), made as (
    select days.tenant_id, days.day, o.* from days
    cross join lateral loraplex_adapter_hours_of(days.tenant_id, days.day) o
), booked as (
    select l.tenant_id, l.day, l.adapter_version_id, l.price_book_id,
        sum(l.seconds) as seconds, sum(l.amount_pico) as amount_pico
    from days join ledger l on l.kind = 'hours' and l.tenant_id = days.tenant_id
        and l.day = days.day
    group by l.tenant_id, l.day, l.adapter_version_id, l.price_book_id
)
select 'ver_' || replace(adapter_version_id::text, '-', '') || ' ' || day as id,
    'deployed for ' || coalesce(m.seconds, 0) || ' s, booked are ' || coalesce(b.seconds, 0)
    || ' s; ' || coalesce(m.amount_pico, 0) || ' pico-USD, booked are '
    || coalesce(b.amount_pico, 0) as detail
from made m full join booked b using (tenant_id, day, adapter_version_id, price_book_id)
where (coalesce(m.seconds, 0), coalesce(m.amount_pico, 0))
    <> (coalesce(b.seconds, 0), coalesce(b.amount_pico, 0))
"""

_REVERSALS = """
select 'adj_' || replace(l.entry_id::text, '-', '') as id, case
        when r.reversal_id is null then 'reverses nothing'
        else 'is ' || l.amount_pico || ', what it reverses ' || coalesce(o.amount_pico::text, 'gone')
    end as detail
from ledger l
left join ledger_reversals r on r.reversal_id = l.entry_id
left join ledger o on o.entry_id = r.entry_id and o.kind = r.kind and o.seq = r.seq
    and o.tenant_id = l.tenant_id
where l.kind = 'reversal' and l.entry_id >= :ledger_since
    and l.amount_pico is distinct from - o.amount_pico
"""

# Half to even, as `money.to_cents`: numeric's own round goes away from zero.
_INVOICES = """
with lines as (
    select invoice_id, count(*) as count, sum(amount_pico) as amount_pico,
        coalesce(sum(amount_cents) filter (where section <> 'adjustment'), 0) as subtotal_cents,
        coalesce(sum(amount_cents) filter (where section = 'adjustment'), 0) as adjustments_cents,
        bool_and(amount_cents = case when abs(mod(amount_pico, 10000000000)) = 5000000000
            then 2 * round(amount_pico / 20000000000)
            else round(amount_pico / 10000000000) end) as is_rounded
    from invoice_lines group by invoice_id
)
select i.number as id, case when not l.is_rounded then 'a line is not rounded half to even'
    else 'its totals are not the sums of its lines' end as detail
from invoices i left join lines l on l.invoice_id = i.id
where i.status <> 'draft' and i.issued_at >= :since_time and (
    l.is_rounded and (l.amount_pico, l.subtotal_cents, l.adjustments_cents)
        = (i.exact_pico, i.subtotal_cents, i.adjustments_cents)) is not true
"""

# Of a tenant's newest final invoice: all that was used before its end is invoiced, once, but for what
# settled after it was computed. Within the minute before, a settle may have been under way.
_LEDGER = """
with newest as (
    select distinct on (i.tenant_id) i.* from invoices i
    where i.kind = 'invoice' and i.status = 'final'
    order by i.tenant_id, i.period_start desc
), sums as (
    select n.tenant_id, n.number, (
        select coalesce(sum(l.amount_pico), 0) from invoices i
        join invoice_lines l on l.invoice_id = i.id
        where i.tenant_id = n.tenant_id and i.kind = 'invoice' and i.status = 'final'
            and l.section in ('usage', 'earlier')
    ) as invoiced, (
        select coalesce(sum(u.amount_pico), 0) from usage_daily u
        where u.tenant_id = n.tenant_id
            and u.day < (n.period_end at time zone n.billing_tz)::date
            and not exists (
                select from rollup_dirty d where d.tenant_id = u.tenant_id and d.day = u.day)
    ) + (
        select coalesce(sum(f.amount_pico), 0)
        from (select distinct tenant_id, day from rollup_dirty) d
        cross join lateral loraplex_usage_of(d.tenant_id, d.day) f
        where d.tenant_id = n.tenant_id
            and d.day < (n.period_end at time zone n.billing_tz)::date
    ) + (
        select coalesce(sum(h.amount_pico), 0) from ledger h
        where h.kind = 'hours' and h.tenant_id = n.tenant_id
            and h.day < (n.period_end at time zone n.billing_tz)::date
            and h.occurred_at < n.computed_at - interval '1 minute'
    ) as used, (
        -- Corrections go either way: of what was booked about then this says nothing, but the next
        -- invoice's check does. Also a little later: who computes an invoice waits for a booking first.
        select coalesce(sum(abs(h.amount_pico)), 0) from ledger h
        where h.kind = 'hours' and h.tenant_id = n.tenant_id
            and h.day < (n.period_end at time zone n.billing_tz)::date
            and h.occurred_at between n.computed_at - interval '1 minute'
                and n.computed_at + interval '1 minute'
    ) as unsure, (
        select coalesce(sum(l.amount_pico), 0)
        from requests r join ledger l on l.entry_id = r.id and l.kind = 'usage'
        where r.tenant_id = n.tenant_id and l.account = 'revenue' and r.kind = 'user'
            and r.id < loraplex_uuid7_floor(n.period_end + interval '10 minutes')
            and r.admitted_at < n.period_end and r.settled_at >= n.computed_at - interval '1 minute'
    ) as late
    from newest n where n.issued_at >= :since_time
)
select s.number as id, 'invoiced ' || s.invoiced || ' pico-USD, used ' || s.used
    || ', of which late at most ' || s.late as detail
from sums s where s.invoiced not between s.used - s.late - s.unsure and s.used + s.unsure
"""

_ADJUSTMENTS = """
select 'adj_' || replace(x.entry_id::text, '-', '') as id, case when count(*) > 1
    then 'is on ' || count(*) || ' invoices' else 'is not what the ledger says' end as detail
from invoices i
join invoice_lines x on x.invoice_id = i.id and x.entry_id is not null
left join ledger l on l.entry_id = x.entry_id and l.kind = x.entry_kind and l.seq = x.entry_seq
    and l.tenant_id = i.tenant_id
where i.kind = 'invoice' and i.status = 'final' and i.issued_at >= :since_time
group by x.entry_id, x.entry_kind, x.entry_seq
having count(*) > 1 or bool_or(l.amount_pico is distinct from x.amount_pico)
"""

# What is carried forward is brought forward once, by the next final invoice; a credit note mirrors the
# one that it voids. So dues add up to the totals that stand and the credit that is left.
_CREDIT = """
with chain as (
    select i.*, coalesce(lag(i.carried_forward_cents) over (
        partition by i.tenant_id order by i.period_start), 0) as carried_to_it_cents
    from invoices i where i.kind = 'invoice' and i.status = 'final'
)
select c.number as id, 'brings forward ' || c.brought_forward_cents || ' cents, '
    || c.carried_to_it_cents || ' were carried to it' as detail
from chain c
where c.issued_at >= :since_time and c.brought_forward_cents <> c.carried_to_it_cents
union all
select coalesce(n.number, i.number), case when n.number is null then 'is void without a credit note'
    else 'is no mirror of ' || coalesce(i.number, 'any void invoice') end
from (select * from invoices where kind = 'credit_note' and status = 'final') n
full join (select * from invoices where kind = 'invoice' and status = 'void') i
    on i.id = n.corrects_id and i.tenant_id = n.tenant_id
where coalesce(n.issued_at, i.voided_at) >= :since_time and (
    (n.total_cents, n.brought_forward_cents, n.carried_forward_cents, n.due_cents, n.exact_pico)
    = (-i.total_cents, -i.brought_forward_cents, -i.carried_forward_cents, -i.due_cents,
        -i.exact_pico)) is not true
"""

_NUMBERS = """
select s.series as id, 'the last number is ' || s.last_number || ', there are ' || found.count
    || ' up to ' || coalesce(found.last, 0) as detail
from invoice_series s
cross join lateral (
    select count(*) as count, max(substring(i.number from length(s.series) + 2)::bigint) as last
    from invoices i where i.number ~ ('^' || s.series || '-[0-9]+$')
) as found
where (found.count, found.last) is distinct from (s.last_number, s.last_number)
"""

RULES: Final = (
    (
        "hours_equal_the_history",
        "Each day's adapter-hours on the ledger are what the history of deployments comes to",
        _HOURS,
        "I1",
    ),
    (
        "rollups_equal_the_ledger",
        "Every rolled up day is what the ledger says of it",
        _ROLLUPS,
        "I5",
    ),
    (
        "reversals_take_back_what_was",
        "Every reversal takes back one line of the same tenant, to the pico-dollar",
        _REVERSALS,
        "I8",
    ),
    (
        "invoices_add_up",
        "Every invoice is the sum of its lines, each rounded once",
        _INVOICES,
        "I8",
    ),
    (
        "invoices_equal_the_ledger",
        "All usage before the end of a tenant's newest invoice is invoiced, exactly once",
        _LEDGER,
        "I8",
    ),
    (
        "adjustments_are_invoiced_once",
        "No credit, debit or reversal is on two invoices, or with another amount",
        _ADJUSTMENTS,
        "I8",
    ),
    (
        "credit_is_carried_forward_once",
        "Each invoice brings forward what the one before carried; a credit note undoes exactly its own",
        _CREDIT,
        "I8",
    ),
    ("invoice_numbers_have_no_gap", "The numbers of each series have no gap", _NUMBERS, "I8"),
)
