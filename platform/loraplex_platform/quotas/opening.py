"""Making the windows of a new quota exact without anybody waiting for it.

What has been used of a period may be millions of lines, and admissions must not stop for as long as
they take to read. So a quota is set in three steps:

| step | transaction | admissions of the scope's tenant |
|---|---|---|
| open: new windows, which all requests hold from now on, also those in flight | its own | wait, for milliseconds |
| count: what the ledger has of requests that do not hold them | the caller's | go on |
| close: add that to what has been used since, and put the limit in force | the caller's, at its end | wait, for milliseconds |

Between the first and the last step the windows count, but no limit reads them. What is counted in the
second cannot change meanwhile: such a request is over. Whole days come from the rollups, the rest from
the ledger. What one statement reads is bounded by a number of rows, however many a tenant has in whatever
time: none comes near the statement timeout. Whoever dies in between leaves a limit that `is_opening`: it
refuses nothing, nobody sees it, and the next who sets the same quota, or `queries.purge`, removes it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError
from loraplex_platform.ids import unix_s_of, uuid7, uuid7_floor

# An id has its maker's clock in it, which may be ten minutes off (metering.records).
_SKEW = timedelta(minutes=11)
# A piece of the ledger is of so many lines at first, and then of about so many that it takes as long as
# this, far from the statement timeout: where the last one was found in memory, the next may be on a disk.
FIRST_LINES = 5_000
MOST_LINES = 100_000
_PIECE_S = 0.5
# A piece of the rollups is of as many days as have so many rows, or of one.
ROLLUP_ROWS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a window counts, of whom, and how long."""

    tenant_id: UUID | None  # None: everybody's requests
    scope_kind: str
    scope_id: UUID
    metric: str
    period: str
    window_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Windows that count but are not complete.

    Attributes:
        limit_id: of the limit that stands for them until they are.
        first_at: when the first of them begins.
        held_since: no request that was admitted before holds them.
    """

    what: Counted
    limit_id: UUID
    window_ids: list[int]
    first_at: datetime
    opened_at: datetime
    held_since: datetime


_SAME = """scope_kind = :scope_kind and scope_id = :scope_id and metric = :metric
    and period = :period and window_s = :window_s"""
_LOCK = text("""
select pg_advisory_xact_lock(hashtextextended(concat_ws(' ', cast(:scope_kind as text),
    cast(:scope_id as text), cast(:metric as text), cast(:period as text),
    cast(:window_s as text)), 7157))
""")
_IS_COUNTED = text(
    f"select exists(select from limits where not is_opening and {_SAME})"  # noqa: S608 # ours
)
_OPEN = """
select window_ids, first_at, opened_at, held_since from loraplex_open_quota(%(limit_id)s,
    %(tenant_id)s, %(scope_kind)s, %(scope_id)s, %(metric)s, %(period)s, %(window_s)s::integer)
"""
_CLOSE = text("delete from limits where id = :limit_id and is_opening returning id")
# Buckets of one limit, and so only their time tells them apart in the order of all locks.
_LOCK_WINDOWS = text("""
select id from quota_windows where id = any(cast(:window_ids as bigint[]))
order by period_start for update
""")
_ADD = text("""
update quota_windows q set committed = q.committed + c.used
from unnest(cast(:window_ids as bigint[]), cast(:used as numeric[])) as c (window_id, used)
where q.id = c.window_id
""")

# Days of the tenant whose requests hold none of the windows, and the moment at which they are over.
_WHOLE_DAYS = text("""
select first_day, last_day, loraplex_midnight(last_day + 1, billing_tz) as over_at from (
    select t.billing_tz,
        cast(cast(:first_at as timestamptz) at time zone t.billing_tz as date) as first_day,
        cast(cast(:held_since as timestamptz) at time zone t.billing_tz as date) - 1 as last_day
    from tenants t where t.id = :tenant_id
) days where first_day <= last_day
""")
# One statement: a day that is marked between two would be in both sums, or in neither.
_OF_ROLLUPS = """
with piece as materialized (
    select coalesce((
        select u.day from usage_daily u
        where u.tenant_id = :tenant_id and u.day between :first_day and :last_day
        order by u.day, u.row_no offset :most limit 1
    ), cast(:last_day as date)) as last_day
), marked as materialized (
    -- Day by day: a mark is of a request, and there may be any number of a day's.
    select d.day from piece, lateral (
        select cast(:first_day as date) + n as day
        from generate_series(0, piece.last_day - cast(:first_day as date)) n
    ) d
    where exists (
        select from rollup_dirty m where m.tenant_id = :tenant_id and m.day = d.day)
)
select piece.last_day, (select array_agg(day) from marked) as marked, (
    select coalesce(sum({amount}), 0) from usage_daily u
    where u.tenant_id = :tenant_id and u.day between :first_day and piece.last_day and {scope}
        and not exists (select from marked where marked.day = u.day)
) as used
from piece
"""
# As in `loraplex_usage_of`: wide enough for a midnight that comes twice, what decides is the date.
_DAY = text(
    """
select t.billing_tz,
    loraplex_midnight(:day, t.billing_tz) - interval '4 hours' as first_at,
    loraplex_midnight(:day + 1, t.billing_tz) + interval '4 hours' as end_at
from tenants t where t.id = :tenant_id
""".replace(":day", "cast(:day as date)")
)
_WINDOWS = text("""
select id, period_start, period_end from quota_windows
where id = any(cast(:window_ids as bigint[])) order by period_start
""")
# Taken in their order from an index, so many and no more, before anything is asked of them. Ties, for a
# request may have more lines than one, and the next piece begins behind its last.
_LINES = """
with lines as materialized (
    select l.* from ledger l
    where {whose} and l.entry_id >= :first_id and l.entry_id < :end_id
    order by l.entry_id fetch first (cast(:most as bigint)) rows with ties
)"""
_PIECE = """
select (select count(*) from lines) as num_lines,
    (select entry_id from lines order by entry_id desc limit 1) as last_id, """
_OF_ONE_WINDOW = (
    _LINES
    + _PIECE
    + """array[cast(:window_id as bigint)] as window_ids, array[coalesce(sum({amount}), 0)] as used
from lines l
where l.kind = 'usage' and l.account = 'revenue' and {scope}
"""
)
_OF_THEIR_REQUESTS = (
    _LINES  # noqa: S608 # ours
    + """, of_windows as (
    select w.id, sum({amount}) as used
    from lines l
    -- One by one (`offset`): joined in one go, as many would be read as there are in their time.
    left join lateral (
        select r.id, r.admitted_at, r.adapter_id, r.windows from requests r
        where r.id = l.entry_id offset 0
    ) r on true
    left join adapter_versions v on r.id is null and v.id = l.adapter_version_id
    cross join lateral (
        -- Of a request that retention has dropped the id says when it was.
        select coalesce(r.admitted_at, to_timestamp(
            ('x' || left(replace(l.entry_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0)) as at
    ) admitted
    join quota_windows w on w.id = any(cast(:window_ids as bigint[]))
        and admitted.at >= w.period_start and (w.period_end is null or admitted.at < w.period_end)
    where l.kind = 'usage' and l.account = 'revenue' and {scope} and {when}
        and coalesce(r.windows @> array[w.id], false) is false
    group by w.id
)"""
    + _PIECE
    + """(select array_agg(id order by id) from of_windows) as window_ids,
    (select array_agg(used order by id) from of_windows) as used
"""
)
# So that an index gives the first so many in their order: whatever a planner thinks of a limit or of
# where rows lie, it must not read all there are and sort them. JIT takes longer than a piece.
_IN_ORDER = text("""
select set_config('plan_cache_mode', 'force_custom_plan', true),
    set_config('enable_sort', 'off', true), set_config('jit', 'off', true)
""")
_FIRST_ENTRY = text("select entry_id from ledger order by entry_id limit 1")

_ROLLED_UP: Mapping[str, str] = {
    "requests": "u.billed_requests",
    "tokens_in": "u.prompt_tokens",
    "tokens_out": "u.completion_tokens",
    "tokens_total": "u.prompt_tokens + u.completion_tokens",
    "cost": "u.amount_pico",
}
_BOOKED: Mapping[str, str] = {
    "requests": "1",
    "tokens_in": "l.prompt_tokens",
    "tokens_out": "l.completion_tokens",
    "tokens_total": "l.prompt_tokens + l.completion_tokens",
    "cost": "l.amount_pico",
}
_SCOPES: Mapping[str, str] = {
    "platform": "true",
    "tenant": "true",  # the tenant is asked for in any case
    "project": "{row}.project_id = :scope_id",
    "key": "{row}.key_id = :scope_id",
    "deployment": "{row}.deployment_id = :scope_id",
}


async def lock(session: AsyncSession, what: Counted) -> None:
    """Until the end of the transaction nobody else sets or removes a quota that counts this."""
    await session.execute(_LOCK, _same(what))


async def is_counted(session: AsyncSession, what: Counted) -> bool:
    """Whether another limit counts it already, so that its windows are right as they are."""
    return bool(await session.scalar(_IS_COUNTED, _same(what)))


async def open_windows(sessions: SessionFactory, what: Counted) -> Opening:
    """Make windows that count from now on. To be done while `lock` is held.

    Raises:
        DatabaseUnavailableError: admissions under way did not end in time, or the database is down.
    """
    limit_id = uuid7()
    row = await sessions.calls.call(_OPEN, asdict(what) | {"limit_id": limit_id})
    window_ids, first_at, opened_at, held_since = row
    return Opening(
        what=what,
        limit_id=limit_id,
        window_ids=window_ids,
        first_at=first_at,
        opened_at=opened_at,
        held_since=held_since,
    )


async def count(session: AsyncSession, opening: Opening) -> dict[int, int]:
    """By window, what requests that do not hold it have used in its period."""
    used: Counter[int] = Counter()
    await session.execute(_IN_ORDER)
    from_at = opening.first_at
    if opening.what.tenant_id is not None and opening.what.period != "rolling":
        # One window, of whole days of one tenant.
        days = (await session.execute(_WHOLE_DAYS, _parameters(opening))).one_or_none()
        if days is not None:
            await _count_days(session, opening, days.first_day, days.last_day, used)
            from_at = days.over_at
    if from_at.timestamp() <= 0:
        first_entry = await session.scalar(_FIRST_ENTRY)
        if first_entry is None:
            return dict(used)
        from_at = datetime.fromtimestamp(unix_s_of(first_entry), UTC) - _SKEW
    windows = (await session.execute(_WINDOWS, {"window_ids": opening.window_ids})).all()
    for lines in _stretches(opening, windows, from_at):
        await _count_ledger(session, opening, lines, used)
    return dict(used)


async def close(session: AsyncSession, opening: Opening, used: Mapping[int, int]) -> None:
    """Complete the windows, of which a limit may make use then. Admissions have to wait meanwhile.

    Raises:
        ConflictError: it took so long that somebody has tidied up.
    """
    if (await session.execute(_CLOSE, {"limit_id": opening.limit_id})).first() is None:
        raise ConflictError("Counting what has been used took too long; set the limit again.")
    await session.execute(_LOCK_WINDOWS, {"window_ids": list(used)})
    await session.execute(_ADD, {"window_ids": list(used), "used": list(used.values())})


async def _count_days(
    session: AsyncSession, opening: Opening, first: date, last: date, used: Counter[int]
) -> None:
    what = opening.what
    [window_id] = opening.window_ids
    statement = text(_OF_ROLLUPS.format(amount=_ROLLED_UP[what.metric], scope=_scope(what, "u")))
    marked: list[date] = []
    while first <= last:
        parameters = _parameters(opening) | {
            "first_day": first,
            "last_day": last,
            "most": ROLLUP_ROWS,
        }
        row = (await session.execute(statement, _wanted(statement, parameters))).one()
        used[window_id] += int(row.used)
        marked += row.marked or ()
        first = row.last_day + timedelta(days=1)
    for day in marked:
        of_tenant = {"day": day, "tenant_id": what.tenant_id}
        found = (await session.execute(_DAY, of_tenant)).one()
        await _count_ledger(
            session,
            opening,
            _Lines(
                first_at=found.first_at,
                end_at=found.end_at,
                when="cast(admitted.at at time zone :zone as date) = :day",
                parameters={"day": day, "zone": found.billing_tz},
            ),
            used,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Of the ledger.

    Attributes:
        first_at, end_at: no id of theirs has a time outside of these.
        window_id: in whose period all of them are, and which none of their requests holds; None: their
            requests say so one by one.
        when: another condition on `admitted.at`, in SQL with `parameters`.
    """

    first_at: datetime
    end_at: datetime
    window_id: int | None = None
    when: str = "true"
    parameters: dict[str, Any] = field(default_factory=dict)


def _stretches(
    opening: Opening, windows: Sequence[Row[Any]], from_at: datetime
) -> Iterator[_Lines]:
    """What was admitted from then on. Only near where a period begins or ends, and of the last minutes,
    need requests be asked: elsewhere their ids, which are lines', say all there is to know."""
    at, end_at = from_at - _SKEW, opening.opened_at + _SKEW
    bounds = {from_at, *(w.period_start for w in windows), *(w.period_end for w in windows)}
    unsure = [
        (bound - _SKEW, bound + _SKEW) for bound in bounds if bound is not None and bound >= from_at
    ]
    if opening.what.scope_kind == "adapter":  # which no line names
        unsure.append((at, end_at))
    for unsure_at, sure_at in sorted([*unsure, (opening.held_since, end_at)]):
        begin, end = min(max(unsure_at, at), end_at), min(sure_at, end_at)
        for window in windows:
            is_within = window.period_start <= at and (
                window.period_end is None or window.period_end >= begin
            )
            if at < begin and is_within:
                yield _Lines(first_at=at, end_at=begin, window_id=window.id)
        if begin < end:
            yield _Lines(
                first_at=begin,
                end_at=end,
                when="admitted.at >= :from_at",
                parameters={"from_at": from_at},
            )
            at = end


async def _count_ledger(
    session: AsyncSession, opening: Opening, lines: _Lines, used: Counter[int]
) -> None:
    what = opening.what
    statement = text(
        (_OF_THEIR_REQUESTS if lines.window_id is None else _OF_ONE_WINDOW).format(
            amount=_BOOKED[what.metric],
            scope=_scope(what, "l"),
            whose="true" if what.tenant_id is None else "l.tenant_id = :tenant_id",
            when=lines.when,
        )
    )
    most = FIRST_LINES
    parameters = _parameters(opening) | {"window_id": lines.window_id} | lines.parameters
    parameters |= {"first_id": _id_at(lines.first_at), "end_id": _id_at(lines.end_at)}
    while True:
        began_s = time.monotonic()
        row = (
            await session.execute(statement, _wanted(statement, parameters | {"most": most}))
        ).one()
        took_s = time.monotonic() - began_s
        for window_id, amount in zip(row.window_ids or (), row.used or (), strict=True):
            used[window_id] += int(amount)
        if row.num_lines < most:
            return
        parameters["first_id"] = UUID(int=row.last_id.int + 1)
        if took_s < _PIECE_S / 2:
            most = min(2 * most, MOST_LINES)
        elif took_s > 2 * _PIECE_S:
            most = max(most // 4, 1)


def _id_at(at: datetime) -> UUID:
    return uuid7_floor(max(0, int(at.timestamp() * 1000)))


def _scope(what: Counted, row: str) -> str:
    if what.scope_kind != "adapter":
        return _SCOPES[what.scope_kind].format(row=row)
    if row == "l":
        return "coalesce(r.adapter_id, v.adapter_id) = :scope_id"
    return "u.adapter_version_id in (select id from adapter_versions where adapter_id = :scope_id)"


def _same(what: Counted) -> dict[str, Any]:
    return {name: value for name, value in asdict(what).items() if name != "tenant_id"}


def _parameters(opening: Opening) -> dict[str, Any]:
    return {
        "tenant_id": opening.what.tenant_id,
        "scope_id": opening.what.scope_id,
        "window_ids": opening.window_ids,
        "first_at": opening.first_at,
        "held_since": opening.held_since,
    }


def _wanted(statement: Any, parameters: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401 # a TextClause
    return {name: parameters[name] for name in statement.compile().params}
