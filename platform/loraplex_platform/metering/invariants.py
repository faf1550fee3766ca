"""What must always be true of the books, as SQL: shown in the console, run after every chaos test.

The identity: tokens that engines generated = billed + absorbed + discarded, by reason. The left side
is the engines' own journals (`engine_usage`), the right side what gateways and the sweeper settled
(`attempts`); the two travel on different roads, so a gateway that miscounts is found out.

Two things are in flight at any moment and are counted apart instead of as errors: requests that are
still reserved (`pending_requests`), and settled attempts whose journal entry the worker has not read
yet (`unlanded`). For those the gateway's own count stands in, so the identity proves nothing about
them: `attempts_are_confirmed` fails when that lasts. When an engine was lost, what the gateway had
seen stands in for its journal; should the journal turn up later, what it has more goes to the
attempt's own class (a fault: absorbed; past a stop string, past an abort: discarded).

Each rule carries the number under which the design speaks of it (I1 to I10). Months whose requests
retention has dropped are left out of what compares with requests; the ledger itself is never dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.billing import invariants as billing
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.ids import format_id, uuid7_floor

MAX_OFFENDERS = 10
# How late the sweeper and the journal puller may be before it is a finding.
SWEEP_SLACK_S = 30.0
LANDING_SLACK_S = 60.0


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the books. `offenders`: ids that break it, a few at most."""

    name: str
    title: str
    ok: bool
    detail: str
    offenders: list[str] = field(default_factory=list)
    code: str = ""  # I1 to I10, or nothing


# A check that is not one SQL statement, such as one that asks Redis too.
ExtraCheck = Callable[[AsyncSession], Awaitable[Check]]


@dataclass(frozen=True, slots=True)
class Identity:
    """generated - (billed + absorbed + discarded) = difference, in tokens."""

    generated: int
    billed: int
    absorbed: int
    discarded_past_stop: int
    discarded_past_abort: int
    pending_requests: int
    unlanded: int

    @property
    def difference(self) -> int:
        """Zero, or somebody miscounted."""
        settled = self.billed + self.absorbed
        return self.generated - settled - self.discarded_past_stop - self.discarded_past_abort


@dataclass(frozen=True, slots=True)
class InvariantReport:
    """All checks, from one snapshot of the database."""

    checked_at: datetime
    identity: Identity
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)


_IDENTITY = text("""
with both_sides as (
    select a.request_id is not null as is_settled, e.request_id is not null as is_landed,
        coalesce(a.source, '') = 'observed' as is_observed, a.outcome, r.state,
        coalesce(e.completion_tokens, a.generated) as generated,
        a.billed, a.absorbed, a.discarded_past_stop, a.discarded_past_abort,
        case when a.source = 'observed'
            then greatest(coalesce(e.completion_tokens, 0) - a.generated, 0) else 0 end as extra
    from (select * from attempts where request_id >= :since) a
    full join (select * from engine_usage where request_id >= :since) e
        using (request_id, attempt)
    left join requests r on r.id = request_id
)
select
    coalesce(sum(generated) filter (where is_settled or state is distinct from 'reserved'), 0),
    coalesce(sum(billed), 0),
    coalesce(sum(absorbed), 0) + coalesce(sum(extra) filter (where outcome in ('fault', 'lost')), 0),
    coalesce(sum(discarded_past_stop), 0)
        + coalesce(sum(extra) filter (where outcome = 'completed'), 0),
    coalesce(sum(discarded_past_abort), 0)
        + coalesce(sum(extra) filter (where outcome = 'aborted'), 0),
    (select count(*) from requests where state = 'reserved' and id >= :since),
    count(*) filter (where is_settled and not is_landed and not is_observed)
from both_sides
""")

# The first id of what retention has left.
_FIRST_KEPT = text("""
select loraplex_uuid7_floor((max(month) + interval '1 month') at time zone 'UTC') from dropped_months
""")


@dataclass(frozen=True, slots=True)
class _Rule:
    """`sql` selects what breaks the rule: columns `id` (uuid of a request, or text) and `detail`.

    It may use the parameters of `check_invariants`: `:since` (id of the first request looked at),
    `:ledger_since` (the same for what the ledger alone proves), `:since_time`, `:stale_s`,
    `:landing_s`, `:is_serving`.
    """

    name: str
    title: str
    sql: str
    code: str = ""


_RULES = (
    _Rule(
        "settled_has_one_ledger_row",
        "Every settled request has exactly one usage row in the ledger, and no other request has one",
        """
        select coalesce(r.id, l.entry_id) as id,
            case when l.entry_id is null then 'settled without a ledger row'
                when r.id is null then 'a ledger row without a request'
                else 'a ledger row of a request that is ' || r.state end as detail
        from (select * from requests where id >= :since) r
        full join (select * from ledger where kind = 'usage' and entry_id >= :since) l
            on l.entry_id = r.id
        where (r.state = 'settled') is distinct from (l.entry_id is not null)
        """,
        code="I1",
    ),
    _Rule(
        "amount_is_tokens_times_price",
        "Every ledger row costs exactly its tokens times the prices at admission",
        """
        select l.entry_id as id, 'amount ' || l.amount_pico || ' pico-USD' as detail
        from ledger l
        left join lateral loraplex_entry_prices(
            l.price_book_id, l.adapter_version_id, l.deployment_id) p on true
        where l.kind in ('usage', 'late') and l.entry_id >= :ledger_since
            and l.amount_pico is distinct from (
                cast(l.prompt_tokens - l.cached_tokens as numeric) * p.input
                + cast(l.cached_tokens as numeric) * p.cached_input
                + cast(l.completion_tokens as numeric) * p.output
                + case l.kind when 'usage' then p.request else 0 end)
        """,
        code="I1",
    ),
    _Rule(
        "ledger_equals_attempts",
        "The ledger charges each attempt's prompt, cached and output tokens, and faults to nobody, by its"
        " request's price book and of its revision",
        """
        select l.entry_id as id, l.account || ': ledger ' || l.prompt_tokens || ' ('
            || l.cached_tokens || ' cached)+' || l.completion_tokens || ', attempt '
            || coalesce(a.prompt_tokens || ' (' || a.cached_tokens || ' cached)+' || a.billed
                || ' billed, ' || a.absorbed || ' absorbed', 'unknown') as detail
        from ledger l
        join requests r on r.id = l.entry_id
        left join attempts a on a.request_id = l.entry_id
            and a.attempt = case l.kind when 'late' then l.seq else r.attempt end
        where l.kind in ('usage', 'late') and l.entry_id >= :since and (
            l.tenant_id = r.tenant_id and l.price_book_id = r.price_book_id
            -- Rows of older releases do not say.
            and (l.revision_id is null or l.revision_id is not distinct from r.revision_id)
            and l.prompt_tokens = a.prompt_tokens and l.cached_tokens = a.cached_tokens
            and case l.account
                when 'revenue' then l.completion_tokens = a.billed and l.kind = 'usage'
                    and r.kind = 'user' and a.outcome in ('completed', 'aborted')
                when 'absorbed' then l.completion_tokens = a.absorbed and a.billed = 0
                else false
            end) is not true
        union all
        select a.request_id, 'an earlier attempt was billed ' || a.billed
        from attempts a join requests r on r.id = a.request_id
        where a.request_id >= :since and a.attempt <> r.attempt and a.billed > 0
        """,
        code="I1",
    ),
    _Rule(
        "revisions_book_bills",
        "Whatever a revision answers that names a price book is billed by it",
        """
        select r.id, 'is billed by ' || b.name || ', its revision names ' || o.name as detail
        from deployment_revisions v
        join requests r on r.revision_id = v.id and r.price_book_id <> v.price_book_id
        join price_books b on b.id = r.price_book_id
        join price_books o on o.id = v.price_book_id
        where r.id >= :since
        """,
        code="I1",
    ),
    _Rule(
        "no_stale_reservation",
        "No reservation is older than its lease and grace: the sweeper keeps up",
        """
        select id, 'lease ended ' || round(extract(epoch from now() - lease_until)) || ' s ago'
            as detail
        from requests
        where state = 'reserved' and lease_until < now() - make_interval(secs => :stale_s)
        """,
        code="I3",
    ),
    _Rule(
        "journals_agree",
        "Engines' journals and settled attempts agree, token for token",
        """
        select e.request_id as id, 'engine ' || e.prompt_tokens || ' (' || e.cached_tokens
            || ' cached)+' || e.completion_tokens || ', settled ' || a.prompt_tokens || ' ('
            || a.cached_tokens || ' cached)+' || a.generated || ' (' || a.source || ')' as detail
        from engine_usage e join attempts a using (request_id, attempt)
        where request_id >= :since and (a.tenant_id <> e.tenant_id or case a.source
            when 'observed' then e.completion_tokens < a.generated
            else (e.completion_tokens, e.prompt_tokens, e.cached_tokens)
                <> (a.generated, a.prompt_tokens, a.cached_tokens) end)
        """,
        code="I4",
    ),
    _Rule(
        "journal_has_request",
        "Everything an engine worked on was reserved by the same tenant, and is settled or pending",
        """
        select e.request_id as id, 'engine generated ' || e.completion_tokens || ', request is '
            || coalesce(r.state, 'unknown') as detail
        from engine_usage e
        left join requests r on r.id = e.request_id and r.tenant_id = e.tenant_id
        left join attempts a on a.request_id = e.request_id and a.attempt = e.attempt
        where e.request_id >= :since
            and (r.id is null or (r.state <> 'reserved' and a.request_id is null))
        """,
        code="I4",
    ),
    _Rule(
        "attempts_are_confirmed",
        f"Every settled attempt is confirmed by its engine's journal within {LANDING_SLACK_S:g} s",
        # Whatever has become of the replica: a journal that nobody can read confirms nothing.
        """
        select a.request_id as id, 'not in the journal of ' || coalesce(a.replica_id, 'any replica')
            || ' ' || round(extract(epoch from now() - a.recorded_at)) || ' s later' as detail
        from attempts a
        left join engine_usage e using (request_id, attempt)
        where a.request_id >= :since and e.request_id is null and a.source <> 'observed'
            and a.recorded_at < now() - make_interval(secs => :landing_s)
        """,
        code="I4",
    ),
    _Rule(
        "books_are_append_only",
        "Neither the runtime role nor this process's login can change ledger, attempts, journals"
        " and audit log",
        # Of other processes' logins each speaks for itself: `db.migrate.check` warns at their start.
        # The role is what a process sets for itself, and may reset; its login is what it cannot shed.
        """
        select name as id, privilege || ' is granted to loraplex_app' as detail
        from unnest(array['ledger', 'attempts', 'engine_usage', 'audit_log', 'dropped_months'])
            as name,
            unnest(array['UPDATE', 'DELETE', 'TRUNCATE']) as privilege
        where to_regrole('loraplex_app') is not null
            and has_table_privilege('loraplex_app', name, privilege)
        union all
        select 'audit_heads', privilege || ' is granted to loraplex_app'
        from unnest(array['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) as privilege
        where to_regrole('loraplex_app') is not null
            and has_table_privilege('loraplex_app', 'audit_heads', privilege)
        union all
        select session_user::text, 'serves, and may become the owner of ' || relname || ': '
            || 'see `loraplex migrate --help`'
        from pg_class
        where :is_serving and oid = to_regclass('ledger')
            and pg_has_role(session_user, relowner, 'MEMBER')
        """,
    ),
    _Rule(
        "partitions_are_ahead",
        "The partitions of this month and the next exist, and no row had to go to a default partition",
        """
        select parent || suffix as id, 'is missing' as detail
        from unnest(array['requests', 'ledger', 'attempts', 'engine_usage']) as parent,
            unnest(array[
                to_char(now() at time zone 'UTC', '"_y"YYYY"m"MM'),
                to_char((now() at time zone 'UTC') + interval '1 month', '"_y"YYYY"m"MM')
            ]) as suffix
        where to_regclass(parent || suffix) is null
        -- Whoever serves may read it as a part of the whole only, which is long: it is looked at if
        -- the part has any pages.
        union all select 'requests_default', 'has rows' where
            case when pg_relation_size(to_regclass('requests_default')) > 0 then exists (
                select from requests where tableoid = to_regclass('requests_default')) end
        union all select 'ledger_default', 'has rows' where
            case when pg_relation_size(to_regclass('ledger_default')) > 0 then exists (
                select from ledger where tableoid = to_regclass('ledger_default')) end
        """,
    ),
    _Rule(
        "windows_equal_the_books",
        "Every quota has used what the ledger says, and holds what requests in flight have reserved",
        # Without a limit a window does not count; set again, it is counted anew.
        """
        select 'window ' || q.id as id, q.scope_kind || ' ' || q.metric || ' per ' || q.period
            || ': used ' || q.committed || ', the ledger says ' || books.used || '; held ' || q.held
            || ', reserved are ' || books.held as detail
        from quota_windows q
        cross join lateral (select loraplex_ledger_sum(q) as used, loraplex_held_sum(q) as held) books
        where q.period_start >= :since_time
            and (q.period_end is null or q.period_end > now() - make_interval(secs => q.window_s))
            and exists (select from limits l
                where not l.is_opening and l.scope_kind = q.scope_kind and l.scope_id = q.scope_id
                    and l.metric = q.metric and l.period = q.period and l.window_s = q.window_s)
            and (q.committed, q.held) is distinct from (books.used, books.held)
        union all
        select 'window ' || q.id, 'has ended and holds ' || q.held || ', reserved are '
            || loraplex_held_sum(q)
        from quota_windows q
        where q.period_end <= now() and q.held > 0 and q.held <> loraplex_held_sum(q)
        """,
        code="I2",
    ),
    _Rule(
        "hard_quotas_are_kept",
        "No hard quota has used more than its value, or than had been used when it was set",
        """
        select 'lim_' || replace(l.id::text, '-', '') as id, l.scope_kind || ' ' || l.metric
            || ' per ' || l.period || ': ' || used.total || ' of ' || l.value as detail
        from limits l
        cross join lateral (
            select sum(q.committed + q.held) as total, min(q.period_start) as period_start
            from quota_windows q
            where q.scope_kind = l.scope_kind and q.scope_id = l.scope_id
                and q.metric = l.metric and q.period = l.period and q.window_s = l.window_s
                and case l.period when 'rolling'
                    then q.period_start > now() - make_interval(secs => l.window_s / 24 * 25)
                    else q.period_start <= now() and (q.period_end is null or q.period_end > now()) end
        ) used
        where l.is_hard and l.valid_from is null and l.valid_to is null
            and used.total > case when used.period_start < l.changed_at
                then greatest(l.value, l.used_then) else l.value end
        """,
        code="I7",
    ),
    _Rule(
        "model_ids_are_unambiguous",
        "Every live model id stands for one revision, of its own deployment and its own tenant",
        """
        select 'dep_' || replace(d.id::text, '-', '') as id, d.public_name || case
                when r.id is null then ': no revision answers'
                when r.tenant_id is distinct from d.tenant_id then ': its revision is another tenant''s'
                else ': another live one has this name' end as detail
        from deployments d
        left join deployment_revisions r on r.id = d.current_revision_id and r.deployment_id = d.id
        where d.archived_at is null and (r.id is null or r.tenant_id is distinct from d.tenant_id
            or exists (select from deployments o where o.id <> d.id and o.archived_at is null
                and o.public_name = d.public_name and o.tenant_id is not distinct from d.tenant_id))
        """,
        code="I9",
    ),
    _Rule(
        "audit_chain_is_unbroken",
        "Every audit row is linked to the one before it, and the newest to its chain's head",
        # With `since`, rows before it are taken as read; the ends of all chains are looked at anyway.
        """
        select 'aud_' || replace(a.id::text, '-', '') as id, case
                when a.hash is null then 'was never linked: the chain''s trigger was off'
                when a.hash is distinct from loraplex_audit_digest(a) then 'was changed'
                when h.chain is null then 'has no head'
                when a.seq < h.first_seq then 'should be gone: it is older than what is kept'
                else 'does not follow the row before it' end as detail
        from audit_log a
        left join audit_heads h on h.chain = a.chain
        left join audit_log p on p.chain = a.chain and p.seq = a.seq - 1
        where (a.at >= :since_time or a.hash is null) and (
            a.hash is null or a.hash is distinct from loraplex_audit_digest(a) or h.chain is null
            or a.seq < h.first_seq or a.prev_hash is distinct from
                case when a.seq = h.first_seq then h.first_prev_hash else p.hash end)
        union all
        select 'chain ' || h.chain, 'ends at row ' || coalesce(max(n.seq), 0) || ', its head says '
            || h.seq || ': rows are missing, or were added past the head'
        from audit_heads h
        left join lateral (select seq, hash from audit_log where chain = h.chain
            order by seq desc nulls last limit 1) n on true
        where h.seq >= h.first_seq
        group by h.chain
        having (max(n.seq), (array_agg(n.hash))[1]) is distinct from (h.seq, h.hash)
        """,
        code="I10",
    ),
    *(_Rule(name, title, sql, code) for name, title, sql, code in billing.RULES),
)


async def check_invariants(
    sessions: SessionFactory,
    *,
    since: datetime | None = None,
    lease_grace_s: float = 5.0,
    is_serving: bool = True,
    extra: Sequence[ExtraCheck] = (),
) -> InvariantReport:
    """Run every check on one snapshot.

    Args:
        since: look only at requests made from then on; None: at all of them.
        lease_grace_s: the worker's setting: how long after its lease a request is left alone.
        is_serving: whether this login serves, and so must not be able to change the books.
        extra: more checks, of other sources than the database alone.
    """
    first_id = uuid7_floor(0 if since is None else int(since.timestamp() * 1000))
    parameters: dict[str, Any] = {
        "ledger_since": first_id,
        "since_time": since or datetime.fromtimestamp(0, UTC),
        "stale_s": lease_grace_s + SWEEP_SLACK_S,
        "landing_s": LANDING_SLACK_S,
        "is_serving": is_serving,
    }
    async with sessions() as session:
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        checked_at = (await session.execute(text("select now()"))).scalar_one()
        kept = (await session.execute(_FIRST_KEPT)).scalar_one_or_none()
        parameters["since"] = first_id if kept is None else max(first_id, kept)
        row = (await session.execute(_IDENTITY, {"since": parameters["since"]})).one()
        identity = Identity(*(int(value) for value in row))
        checks = [_identity_check(identity)]
        checks += [await _run(session, rule, parameters) for rule in _RULES]
        checks += [await check(session) for check in extra]
    return InvariantReport(checked_at, identity, checks)


def _identity_check(identity: Identity) -> Check:
    difference = identity.difference
    return Check(
        name="identity",
        title="Tokens generated by engines = billed + absorbed + discarded",
        ok=difference == 0,
        detail=f"{identity.generated} = {identity.billed} billed + {identity.absorbed} absorbed"
        f" + {identity.discarded_past_stop} past a stop + {identity.discarded_past_abort} past an"
        f" abort, difference {difference}",
    )


async def _run(session: AsyncSession, rule: _Rule, parameters: dict[str, Any]) -> Check:
    statement = text(f"{rule.sql} limit {MAX_OFFENDERS + 1}")
    wanted = {name: parameters[name] for name in statement.compile().params}
    rows = (await session.execute(statement, wanted)).all()
    shown = rows[:MAX_OFFENDERS]
    count = f"more than {MAX_OFFENDERS}" if len(rows) > MAX_OFFENDERS else str(len(rows))
    return Check(
        name=rule.name,
        title=rule.title,
        ok=not rows,
        detail="holds" if not rows else f"{count} broken; for example {shown[0].detail}",
        offenders=[_label(row.id) for row in shown],
        code=rule.code,
    )


def _label(value: UUID | str) -> str:
    return format_id("request", value) if isinstance(value, UUID) else value
