"""Usage reports: what tenants consumed and what it cost, by time and by whatever they group by.

Read from settled requests and their ledger rows, so that a report and a bill cannot differ. Probes
are the platform's own and in no report. A bucket holds the requests admitted in it, in UTC.
Pages are cut by key, not by offset: a deep page costs what the first one costs.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.ids import uuid7_floor
from loraplex_platform.metering.records import MAX_CLOCK_SKEW_S

BucketWidth = Literal["1m", "1h", "1d"]
GroupBy = Literal["tenant_id", "key_id", "model", "adapter_version_id"]
GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)
MAX_ROWS = 1000

_WIDTHS: dict[BucketWidth, timedelta] = {
    "1m": timedelta(minutes=1),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
}
# The id's time is the gateway's clock, admitted_at the database's.
_CLOCK_SLACK = timedelta(seconds=MAX_CLOCK_SKEW_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """What to report: `start` inclusive, `end` exclusive, both with a zone.

    `page` is the `next_page` of the answer before; groups not asked for come back as None.
    """

    start: datetime
    end: datetime
    bucket_width: BucketWidth = "1d"
    group_by: tuple[GroupBy, ...] = ()
    tenant_id: UUID | None = None
    limit: int = MAX_ROWS
    page: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """One bucket and group. `requests` counts settled ones; tokens are the billed ones, except
    `absorbed_tokens`: output tokens that the platform paid for."""

    start: datetime
    end: datetime
    tenant_id: UUID | None
    tenant: str | None  # the slug
    key_id: UUID | None
    model: str | None
    adapter_version_id: UUID | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    absorbed_tokens: int
    cost_pico: int


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Rows by time, then group. `next_page` None: there are no more."""

    rows: list[UsageRow]
    next_page: str | None


_REPORT = text("""
with lines as (
    select
        date_bin(cast(:width as interval), requests.admitted_at, timestamptz 'epoch') as start,
        case when :by_tenant_id then requests.tenant_id end as tenant_id,
        case when :by_key_id then requests.key_id end as key_id,
        case when :by_model then requests.model end as model,
        case when :by_adapter_version_id then requests.adapter_version_id end as adapter_version_id,
        ledger.account = 'revenue' as is_billed, ledger.prompt_tokens, ledger.cached_tokens,
        ledger.completion_tokens, ledger.amount_pico, absorbed.tokens as absorbed_tokens
    from requests
    join ledger on ledger.entry_id = requests.id and ledger.kind = 'usage'
    cross join lateral (
        select coalesce(sum(attempts.absorbed), 0) as tokens
        from attempts where attempts.request_id = requests.id
    ) as absorbed
    where requests.state = 'settled' and requests.kind = 'user'
        and requests.id >= :first_id and requests.id < :last_id
        and requests.admitted_at >= :start and requests.admitted_at < :end
        and (cast(:tenant as uuid) is null or requests.tenant_id = cast(:tenant as uuid))
), buckets as (
    select start, tenant_id, key_id, model, adapter_version_id,
        count(*) as requests,
        coalesce(sum(prompt_tokens) filter (where is_billed), 0) as prompt_tokens,
        coalesce(sum(cached_tokens) filter (where is_billed), 0) as cached_tokens,
        coalesce(sum(completion_tokens) filter (where is_billed), 0) as completion_tokens,
        coalesce(sum(absorbed_tokens), 0) as absorbed_tokens,
        coalesce(sum(amount_pico) filter (where is_billed), 0) as cost_pico,
        concat(tenant_id, chr(31), key_id, chr(31), model, chr(31), adapter_version_id) as label
    from lines
    group by start, tenant_id, key_id, model, adapter_version_id
)
select buckets.*, tenants.slug as tenant
from buckets left join tenants on tenants.id = buckets.tenant_id
where cast(:after_start as timestamptz) is null
    or (buckets.start, buckets.label collate "C")
        > (cast(:after_start as timestamptz), cast(:after_label as text))
order by buckets.start, buckets.label collate "C"
limit :limit
""")


async def report_usage(session: AsyncSession, query: UsageQuery) -> UsagePage:
    """One page of a report.

    Raises:
        InvalidRequestError: the range is empty, the limit or the page is not one of ours.
    """
    if query.start.tzinfo is None or query.end.tzinfo is None or query.start >= query.end:
        raise InvalidRequestError("start_time must lie before end_time.", param="start_time")
    if not 1 <= query.limit <= MAX_ROWS:
        raise InvalidRequestError(f"limit must be between 1 and {MAX_ROWS}.", param="limit")
    after_start, after_label = (None, None) if query.page is None else _parse_page(query.page)
    width = _WIDTHS[query.bucket_width]
    parameters: dict[str, Any] = {
        "width": width,
        "start": query.start,
        "end": query.end,
        "first_id": uuid7_floor(_unix_ms(query.start - _CLOCK_SLACK)),
        "last_id": uuid7_floor(_unix_ms(query.end + _CLOCK_SLACK)),
        "tenant": query.tenant_id,
        "after_start": after_start,
        "after_label": after_label,
        "limit": query.limit + 1,
    } | {f"by_{name}": name in query.group_by for name in GROUPS}
    found = (await session.execute(_REPORT, parameters)).all()
    rows = [
        UsageRow(
            start=row.start,
            end=row.start + width,
            tenant_id=row.tenant_id,
            tenant=row.tenant,
            key_id=row.key_id,
            model=row.model,
            adapter_version_id=row.adapter_version_id,
            requests=int(row.requests),
            prompt_tokens=int(row.prompt_tokens),
            cached_tokens=int(row.cached_tokens),
            completion_tokens=int(row.completion_tokens),
            absorbed_tokens=int(row.absorbed_tokens),
            cost_pico=int(row.cost_pico),
        )
        for row in found[: query.limit]
    ]
    has_more = len(found) > query.limit
    return UsagePage(rows, _format_page(found[query.limit - 1]) if has_more else None)


def _unix_ms(time: datetime) -> int:
    return max(0, int(time.timestamp() * 1000))


def _format_page(row: Any) -> str:  # noqa: ANN401 # a row of _REPORT
    raw = msgspec.json.encode((row.start.astimezone(UTC), row.label))
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _parse_page(page: str) -> tuple[datetime, str]:
    start: datetime | None
    try:
        raw = base64.urlsafe_b64decode(page + "=" * (-len(page) % 4))
        start, label = msgspec.json.decode(raw, type=tuple[datetime, str])
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        start, label = None, ""
    if start is None or start.tzinfo is None or "\0" in label:
        raise InvalidRequestError("page: pass the next_page of the answer before.", param="page")
    return start, label
