"""Usage reports: what tenants consumed and what it cost, by time and by whatever they group by.

Days and months are the tenant's own, in its billing time zone, and come from the rollups, so that a
report costs the same over five million requests as over five; buckets that have changed since they
were rolled up are computed live, so that it is never stale. Minutes and hours come from the requests
themselves and cover little time; they alone know the deployment's revision. Both read settled requests and their ledger rows, so that a report
and a bill cannot differ. A request counts when it was admitted. Probes are the platform's own and in
no report. Pages are cut by key, not by offset: a deep page costs what the first one costs.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.billing.adapter_hours import HOURS_SOURCE
from loraplex_platform.billing.rollups import USAGE_SOURCE
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.ids import uuid7_floor
from loraplex_platform.metering.records import MAX_CLOCK_SKEW_S

BucketWidth = Literal["1m", "1h", "1d", "1mo"]
GroupBy = Literal[
    "tenant_id",
    "project_id",
    "key_id",
    "model",
    "deployment_id",
    "adapter_version_id",
    "price_book_id",
    "revision_id",
]
GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)
MAX_ROWS = 1000
# Of a file, in which nobody sees pages: each is summed anew, so few and large ones, which still fit in memory.
FILE_ROWS = 20_000

# Widths that are read from requests, and how much time they may cover.
SHORT_WIDTHS: dict[BucketWidth, tuple[timedelta, timedelta]] = {
    "1m": (timedelta(minutes=1), timedelta(days=2)),
    "1h": (timedelta(hours=1), timedelta(days=8)),
}
# The id's time is the gateway's clock, admitted_at the database's.
_CLOCK_SLACK = timedelta(seconds=MAX_CLOCK_SKEW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Only what has these; None: whatever it has."""

    tenant_id: UUID | None = None
    project_id: UUID | None = None
    key_id: UUID | None = None
    model: str | None = None
    deployment_id: UUID | None = None
    adapter_version_id: UUID | None = None
    price_book_id: UUID | None = None
    revision_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """What to report: `start` inclusive, `end` exclusive, both with a zone.

    Days and months are whole: one that the range cuts is in the report as a whole. `page` is the
    `next_page` of the answer before; groups not asked for come back as None.
    """

    start: datetime
    end: datetime
    bucket_width: BucketWidth = "1d"
    group_by: tuple[GroupBy, ...] = ()
    only: UsageFilter = UsageFilter()
    limit: int = MAX_ROWS
    page: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One bucket and group. `requests` counts settled ones; tokens are the billed ones, except
    `absorbed_tokens`: output tokens that the platform paid for. `adapter_seconds`: for which adapter
    versions were deployed, in days that are over; minutes and hours have none.

    `start` and `end` are in the tenant's zone where the row is of one tenant; a row of several, each
    with days of its own, has those of the date in UTC. `date` is that day or month, as text; None for
    shorter buckets.
    """

    start: datetime
    end: datetime
    date: str | None
    tenant_id: UUID | None
    tenant: str | None  # the slug
    project_id: UUID | None
    key_id: UUID | None
    model: str | None
    deployment_id: UUID | None
    adapter_version_id: UUID | None
    price_book_id: UUID | None
    revision_id: UUID | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    absorbed_tokens: int
    adapter_seconds: int
    cost_pico: int


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Rows by time, then group. `next_page` None: there are no more.

    `final_until`: what was admitted before can no longer change; later numbers are right now, but
    more may come to them. It says nothing of adapter-hours, which are booked when a day is over. `zone`: of days and months; None: each tenant's own.
    """

    rows: list[UsageRow]
    next_page: str | None
    final_until: datetime
    zone: str | None


# What was admitted before can no longer change: nothing of it is open. Open ones are few, and have an
# index of their own.
_STATUS = text("""
select least(cast(:end as timestamptz), now(), (
    select min(admitted_at) from requests
    where state = 'reserved' and kind = 'user'
        and (cast(:tenant as uuid) is null or tenant_id = cast(:tenant as uuid))
)) as final_until, (
    select billing_tz from tenants where id = cast(:tenant as uuid)
) as zone
""")

_SUMS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "absorbed_tokens",
    "adapter_seconds",
)

# Rows of days; `at` is the bucket's date, as midnight of UTC.
_DAILY_LINES = """
{source}, with_hours as (
    select source.*, 0 as adapter_seconds from source union all {hours}
), spans as materialized (
    select tenants.id, spans.*
    from tenants, lateral (select
        cast(cast(:start as timestamptz) at time zone billing_tz as date) as first_day,
        cast((cast(:end as timestamptz) - interval '1 microsecond') at time zone billing_tz as date)
            as last_day
    ) as spans
    where cast(:tenant as uuid) is null or tenants.id = cast(:tenant as uuid)
), lines as (
    select source.*, cast({bucket} as timestamp) at time zone 'UTC' as at, amount_pico as cost_pico
    from with_hours as source join spans on spans.id = source.tenant_id and {range}
)
"""
_BUCKETS = {
    "1d": ("day", "source.day between spans.first_day and spans.last_day"),
    "1mo": (
        "date_trunc('month', cast(day as timestamp))",
        "date_trunc('month', cast(source.day as timestamp)) between"
        " date_trunc('month', cast(spans.first_day as timestamp))"
        " and cast(spans.last_day as timestamp)",
    ),
}

_SHORT_LINES = """
lines as (
    select
        date_bin(cast(:width as interval), requests.admitted_at, timestamptz 'epoch') as at,
        requests.tenant_id, ledger.project_id, ledger.key_id, requests.model, ledger.deployment_id,
        ledger.adapter_version_id, ledger.price_book_id,
        coalesce(ledger.revision_id, requests.revision_id) as revision_id, 1 as requests,
        case when ledger.account = 'revenue' then ledger.prompt_tokens else 0 end as prompt_tokens,
        case when ledger.account = 'revenue' then ledger.cached_tokens else 0 end as cached_tokens,
        case when ledger.account = 'revenue' then ledger.completion_tokens else 0 end
            as completion_tokens,
        case when ledger.account = 'revenue' then ledger.amount_pico else 0 end as cost_pico,
        coalesce(absorbed.tokens, 0) as absorbed_tokens, 0 as adapter_seconds
    from requests
    join ledger on ledger.entry_id = requests.id and ledger.kind = 'usage'
        and ledger.entry_id >= :first_id and ledger.entry_id < :last_id
    left join (
        select request_id, sum(absorbed) as tokens from attempts
        where absorbed > 0 and request_id >= :first_id and request_id < :last_id
        group by request_id
    ) as absorbed on absorbed.request_id = requests.id
    where requests.state = 'settled' and requests.kind = 'user'
        and requests.id >= :first_id and requests.id < :last_id
        and requests.admitted_at >= :start and requests.admitted_at < :end
        and (cast(:tenant as uuid) is null or requests.tenant_id = cast(:tenant as uuid))
)
"""

_REPORT = """
with {lines}, buckets as (
    select at, {columns} {sums}, concat({label}) as label
    from lines
    where {condition}
    group by at {groups}
), page as (
    select * from buckets
    where cast(:after_at as timestamptz) is null
        or (at, label collate "C") > (cast(:after_at as timestamptz), cast(:after_label as text))
    order by at, label collate "C"
    limit :limit
)
select page.*, {tenant}, {start} as start, {end} as "end"
from page {tenants}
order by at, label collate "C"
"""


async def report_usage(session: AsyncSession, query: UsageQuery) -> UsagePage:
    """One page of a report.

    Raises:
        InvalidRequestError: the range is empty or too long, the limit or the page is not one of ours.
    """
    if query.start.tzinfo is None or query.end.tzinfo is None or query.start >= query.end:
        raise InvalidRequestError("start_time must lie before end_time.", param="start_time")
    if not 1 <= query.limit <= FILE_ROWS:
        raise InvalidRequestError(f"limit must be between 1 and {FILE_ROWS}.", param="limit")
    after_at, after_label = (None, None) if query.page is None else _parse_page(query.page)
    parameters: dict[str, Any] = {
        "start": query.start,
        "end": query.end,
        "tenant": query.only.tenant_id,
        "after_at": after_at,
        "after_label": after_label,
        "limit": query.limit + 1,
    }
    lines, more = _lines(query)
    # Before the rows: what is settled in between is in them although not final, never the reverse.
    status = (await session.execute(_STATUS, parameters)).one()
    zone = "UTC" if query.bucket_width in SHORT_WIDTHS else status.zone
    statement = text(_statement(query, lines))
    parameters |= more | _conditions(query.only) | {"zone": zone}
    wanted = {name: parameters[name] for name in statement.compile().params}
    found = (await session.execute(statement, wanted)).all()
    rows = [_row(query, row) for row in found[: query.limit]]
    next_page = _format_page(found[query.limit - 1]) if len(found) > query.limit else None
    return UsagePage(rows, next_page, status.final_until, zone)


def _lines(query: UsageQuery) -> tuple[str, dict[str, Any]]:
    """The SQL of what is summed, and its parameters."""
    short = SHORT_WIDTHS.get(query.bucket_width)
    if short is not None:
        width, longest = short
        if query.end - query.start > longest:
            raise InvalidRequestError(
                f"bucket_width: {query.bucket_width} covers at most {longest.days} days; ask for less"
                " time, or for 1d.",
                param="bucket_width",
            )
        return _SHORT_LINES, {
            "width": width,
            "first_id": uuid7_floor(_unix_ms(query.start - _CLOCK_SLACK)),
            "last_id": uuid7_floor(_unix_ms(query.end + _CLOCK_SLACK)),
        }
    if "revision_id" in query.group_by or query.only.revision_id is not None:
        raise InvalidRequestError(
            "revision_id: rollups of days do not keep it; ask for bucket_width 1h, over at most"
            f" {SHORT_WIDTHS['1h'][1].days} days, or for adapter_version_id or price_book_id.",
            param="bucket_width",
        )
    bucket, in_range = _BUCKETS[query.bucket_width]
    # A month is whole, and a zone at most a day from UTC; `spans` has each tenant's own range.
    slack = timedelta(days=32 if query.bucket_width == "1mo" else 1)
    filled = _DAILY_LINES.format(
        source=USAGE_SOURCE, hours=HOURS_SOURCE, bucket=bucket, range=in_range
    )
    return filled, {
        "first_day": (query.start.astimezone(UTC) - slack).date(),
        "last_day": (query.end.astimezone(UTC) + slack).date(),
    }


def _statement(query: UsageQuery, lines: str) -> str:
    # Names come from our own tuples, never from the caller.
    groups = [name for name in GROUPS if name in query.group_by]
    sums = [f"sum({name}) as {name}" for name in (*_SUMS, "cost_pico")]
    label = ", chr(31), ".join(groups) or "''"
    conditions = [f"{name} = :only_{name}" for name in _conditions(query.only, prefix="")]
    by_tenant = "tenant_id" in groups
    own_zone = "tenants.billing_tz, " if by_tenant else ""
    zone = f"coalesce({own_zone}cast(:zone as text), 'UTC')"
    start, end = "at", "at + cast(:width as interval)"
    if query.bucket_width in _BUCKETS:
        step = "1 month" if query.bucket_width == "1mo" else "1 day"
        day = "cast(at at time zone 'UTC' as date)"
        start = f"loraplex_midnight({day}, {zone})"
        end = f"loraplex_midnight(cast({day} + interval '{step}' as date), {zone})"
    return _REPORT.format(
        lines=lines,
        columns="".join(f"{name}, " for name in groups),
        groups="".join(f", {name}" for name in groups),
        sums=", ".join(sums),
        label=label,
        condition=" and ".join(conditions) or "true",
        tenant="tenants.slug as tenant" if by_tenant else "null as tenant",
        tenants="left join tenants on tenants.id = page.tenant_id" if by_tenant else "",
        start=start,
        end=end,
    )


def _conditions(only: UsageFilter, *, prefix: str = "only_") -> dict[str, Any]:
    """What is filtered by, but for the tenant, who is looked up by an index before."""
    values = {item.name: getattr(only, item.name) for item in fields(only)}
    return {
        f"{prefix}{name}": value
        for name, value in values.items()
        if value is not None and name != "tenant_id"
    }


def _row(query: UsageQuery, row: Any) -> UsageRow:  # noqa: ANN401 # a row of _REPORT
    day_format = {"1d": "%Y-%m-%d", "1mo": "%Y-%m"}.get(query.bucket_width)
    values: dict[str, Any] = {name: int(getattr(row, name)) for name in (*_SUMS, "cost_pico")}
    for name in GROUPS:
        values[name] = getattr(row, name) if name in query.group_by else None
    return UsageRow(
        start=row.start,
        end=row.end,
        date=None if day_format is None else row.at.astimezone(UTC).strftime(day_format),
        tenant=row.tenant,
        **values,
    )


def _unix_ms(time: datetime) -> int:
    return max(0, int(time.timestamp() * 1000))


def _format_page(row: Any) -> str:  # noqa: ANN401 # a row of _REPORT
    raw = msgspec.json.encode((row.at.astimezone(UTC), row.label))
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _parse_page(page: str) -> tuple[datetime, str]:
    at: datetime | None
    try:
        raw = base64.urlsafe_b64decode(page + "=" * (-len(page) % 4))
        at, label = msgspec.json.decode(raw, type=tuple[datetime, str])
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        at, label = None, ""
    if at is None or at.tzinfo is None or "\0" in label:
        raise InvalidRequestError("page: pass the next_page of the answer before.", param="page")
    return at, label
