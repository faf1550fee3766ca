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
the ledger, in pieces of a second or so. Whoever dies in between leaves a limit that `is_opening`: it
refuses nothing, nobody sees it, and the next who sets the same quota, or `queries.purge`, removes it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError
from loraplex_platform.ids import uuid7, uuid7_floor

# An id has its maker's clock in it, which may be ten minutes off (metering.records).
_SKEW = timedelta(minutes=11)
# A piece of the ledger is of so much time at first, and then of so much that it takes about a second.
_FIRST_PIECE = timedelta(minutes=15)
_LONGEST_PIECE = timedelta(days=64)
_PIECE_S = 1.0


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
with marked as materialized (
    select distinct day from rollup_dirty
    where tenant_id = :tenant_id and day between :first_day and :last_day
)
select coalesce(sum({amount}), 0) as used, (select array_agg(day) from marked) as marked
from usage_daily u
where u.tenant_id = :tenant_id and u.day between :first_day and :last_day and {scope}
    and not exists (select from marked where marked.day = u.day)
"""
_OF_DAY = """
select coalesce(sum({amount}), 0) from loraplex_usage_of(:tenant_id, :day) u where {scope}
"""
_OF_LEDGER = """
select w.id, sum({amount}) as used
from ledger l
left join requests r on r.id = l.entry_id and r.id >= :first_id and r.id < :end_id
left join adapter_versions v on r.id is null and v.id = l.adapter_version_id
cross join lateral (
    -- Of a request that retention has dropped the id says when it was.
    select coalesce(r.admitted_at, to_timestamp(
        ('x' || left(replace(l.entry_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0)) as at
) admitted
join quota_windows w on w.id = any(cast(:window_ids as bigint[])) and admitted.at >= w.period_start
    and (w.period_end is null or admitted.at < w.period_end)
where l.kind = 'usage' and l.account = 'revenue' and {scope}
    and l.entry_id >= :first_id and l.entry_id < :end_id
    and admitted.at >= :from_at and coalesce(r.windows @> array[w.id], false) is false
group by w.id
"""
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
    from_at = opening.first_at
    if opening.what.tenant_id is not None and opening.what.period != "rolling":
        # One window, of whole days of one tenant.
        days = (await session.execute(_WHOLE_DAYS, _parameters(opening))).one_or_none()
        if days is not None:
            [window_id] = opening.window_ids
            used[window_id] = await _count_days(session, opening, days.first_day, days.last_day)
            from_at = days.over_at
    if from_at.timestamp() <= 0:
        first_entry = await session.scalar(_FIRST_ENTRY)
        if first_entry is None:
            return dict(used)
        first_s = (first_entry.int >> 80) / 1000
        from_at = datetime.fromtimestamp(first_s, UTC) - _SKEW
    await _count_ledger(session, opening, from_at, used)
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


async def _count_days(session: AsyncSession, opening: Opening, first: object, last: object) -> int:
    what = opening.what
    filled = {"amount": _ROLLED_UP[what.metric], "scope": _scope(what, "u")}
    parameters = _parameters(opening) | {"first_day": first, "last_day": last}
    statement = text(_OF_ROLLUPS.format(**filled))
    row = (await session.execute(statement, _wanted(statement, parameters))).one()
    used = int(row.used)
    live = text(_OF_DAY.format(**filled))
    for day in row.marked or ():
        used += int(await session.scalar(live, _wanted(live, parameters | {"day": day})) or 0)
    return used


async def _count_ledger(
    session: AsyncSession, opening: Opening, from_at: datetime, used: Counter[int]
) -> None:
    """Add what was admitted from `from_at` on."""
    what = opening.what
    scope = _scope(what, "l")
    if what.tenant_id is not None:
        scope += " and l.tenant_id = :tenant_id"
    statement = text(_OF_LEDGER.format(amount=_BOOKED[what.metric], scope=scope))
    at, end = from_at - _SKEW, opening.opened_at + _SKEW
    piece = _FIRST_PIECE
    while at < end:
        until = min(at + piece, end)
        parameters = _parameters(opening) | {
            "from_at": from_at,
            "first_id": uuid7_floor(max(0, int(at.timestamp() * 1000))),
            "end_id": uuid7_floor(max(0, int(until.timestamp() * 1000))),
        }
        began_s = time.monotonic()
        for row in await session.execute(statement, _wanted(statement, parameters)):
            used[row.id] += int(row.used)
        took_s = time.monotonic() - began_s
        at = until
        if took_s < _PIECE_S / 2:
            piece = min(2 * piece, _LONGEST_PIECE)
        elif took_s > 2 * _PIECE_S:
            piece = max(piece / 2, _FIRST_PIECE)


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
