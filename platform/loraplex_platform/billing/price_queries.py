"""SQL of price books: drafts, periods, and what another book would have cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import date, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, Select, case, delete, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from loraplex_platform.billing.rollups import USAGE_SOURCE
from loraplex_platform.db import Adapter, BaseModel, Deployment, PriceBook, PriceItem

MAX_UNPRICED = 100

_IDS: dict[str, InstrumentedAttribute[UUID]] = {
    "base_model": BaseModel.id,
    "adapter": Adapter.id,
    "deployment": Deployment.id,
}

_KIND_ORDER = case(
    {"any_base": 1, "any_adapter": 2, "base_model": 3, "adapter": 4, "deployment": 5},
    value=PriceItem.target_kind,
)
_CLASS_ORDER = case(
    {"input": 1, "cached_input": 2, "output": 3, "request": 4, "adapter_hour": 5},
    value=PriceItem.price_class,
)

_BOOK_NOW = text("select loraplex_book_at(now())")

# A revision that names a book of its own hangs on no other.
_UNPRICED = text("""
select d.public_name
from deployments d
join deployment_revisions r on r.id = d.current_revision_id
left join adapter_versions v on v.id = r.adapter_version_id
cross join lateral loraplex_prices(:book, d.base_model_id, v.adapter_id, d.id) p
where d.archived_at is null and coalesce(r.price_book_id, :book) = :book
    and (p.input is null or p.output is null)
order by d.public_name, d.id limit :limit
""")

# Prices are looked up once per tenant and target, not once per row.
# Hours are made again from the history of deployments, also where they cost nothing; of days that are over.
_PREVIEW = text(f"""
with {USAGE_SOURCE}, spans as materialized (
    select t.id as tenant_id, t.billing_tz,
        cast(cast(:start as timestamptz) at time zone t.billing_tz as date) as first_day,
        least(cast((cast(:end as timestamptz) - interval '1 microsecond')
            at time zone t.billing_tz as date), cast(now() at time zone t.billing_tz as date) - 1)
            as last_day
    from tenants t where cast(:tenant as uuid) is null or t.id = cast(:tenant as uuid)
), hours as (
    select s.tenant_id, coalesce(sum(loraplex_half_even(deployed.seconds * loraplex_hour_price(
        :book, a.base_model_id, a.id), 3600)), 0) as preview_pico
    from spans s
    cross join lateral generate_series(cast(s.first_day as timestamp),
        cast(s.last_day as timestamp), interval '1 day') as series (day)
    cross join lateral (
        select d.adapter_version_id, (
            select floor(sum(extract(epoch from upper(r)) - extract(epoch from lower(r))))
            from unnest(d.spans) as r) as seconds
        from loraplex_deployed(s.tenant_id,
            loraplex_midnight(cast(series.day as date), s.billing_tz),
            loraplex_midnight(cast(series.day as date) + 1, s.billing_tz)) d
    ) as deployed
    join adapter_versions v on v.id = deployed.adapter_version_id
    join adapters a on a.id = v.adapter_id
    where exists (select from deployment_events e where e.tenant_id = s.tenant_id)
    group by s.tenant_id
), booked as (
    select l.tenant_id, sum(l.amount_pico) as amount_pico
    from ledger l join spans s on s.tenant_id = l.tenant_id
    where l.kind = 'hours' and l.day between s.first_day and s.last_day
    group by l.tenant_id
), used as (
    select s.tenant_id, s.deployment_id, s.adapter_version_id, sum(s.requests) as requests,
        sum(s.billed_requests) as billed_requests,
        sum(s.prompt_tokens - s.cached_tokens) as input, sum(s.cached_tokens) as cached_input,
        sum(s.completion_tokens) as output, sum(s.amount_pico) as amount_pico
    from source s join tenants t on t.id = s.tenant_id
    where s.day between (cast(:start as timestamptz) at time zone t.billing_tz)::date
        and ((cast(:end as timestamptz) - interval '1 microsecond') at time zone t.billing_tz)::date
    group by s.tenant_id, s.deployment_id, s.adapter_version_id
), priced as (
    select u.tenant_id, sum(u.requests) as requests, sum(u.amount_pico) as cost_pico,
        coalesce(sum(u.input * p.input + u.cached_input * p.cached_input + u.output * p.output
            + u.billed_requests * p.request), 0) as preview_pico,
        coalesce(sum(u.requests) filter (where p.input is null or p.output is null), 0) as unpriced
    from used u
    cross join lateral loraplex_entry_prices(:book, u.adapter_version_id, u.deployment_id) p
    group by u.tenant_id
)
select t.id as tenant_id, t.slug as tenant, coalesce(p.requests, 0) as requests,
    coalesce(p.cost_pico, 0) + coalesce(b.amount_pico, 0) as cost_pico,
    coalesce(p.preview_pico, 0) + coalesce(h.preview_pico, 0) as preview_pico,
    coalesce(p.unpriced, 0) as unpriced
from tenants t
left join priced p on p.tenant_id = t.id
left join hours h on h.tenant_id = t.id
left join booked b on b.tenant_id = t.id
where p.tenant_id is not null or h.preview_pico > 0 or b.amount_pico <> 0
order by t.slug
""")  # noqa: S608 # USAGE_SOURCE is ours


def all_books() -> Select[PriceBook]:
    """Every book."""
    return select(PriceBook)


async def find_book(
    session: AsyncSession, book_id: UUID, *, is_locked: bool = False
) -> PriceBook | None:
    """By id; locked against other changes until the transaction ends."""
    statement = select(PriceBook).where(PriceBook.id == book_id)
    if is_locked:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    return await session.scalar(statement)


async def lock_periods(session: AsyncSession) -> None:
    """One publication at a time: each looks at the books before and after its own."""
    await session.execute(text("select pg_advisory_xact_lock(hashtext('loraplex_price_books'))"))


async def current_book_id(session: AsyncSession) -> UUID | None:
    """The book in force now."""
    found: UUID | None = await session.scalar(_BOOK_NOW)
    return found


async def now(session: AsyncSession) -> datetime:
    """The database's time, as of the transaction's start."""
    return (await session.execute(select(func.now()))).scalar_one()


async def book_before(session: AsyncSession, at: datetime) -> PriceBook | None:
    """The book that is in force just before a time, or was last."""
    return await session.scalar(
        select(PriceBook)
        .where(PriceBook.status != "draft", PriceBook.effective_from < at)
        .where(
            PriceBook.effective_to.is_(None) | (PriceBook.effective_to > PriceBook.effective_from)
        )
        .order_by(PriceBook.effective_from.desc())
        .limit(1)
        .with_for_update()
        .execution_options(populate_existing=True)
    )


async def book_after(session: AsyncSession, at: datetime) -> PriceBook | None:
    """The next book from a time on."""
    return await session.scalar(
        select(PriceBook)
        .where(PriceBook.status == "published", PriceBook.effective_from >= at)
        .order_by(PriceBook.effective_from)
        .limit(1)
    )


async def items_of(session: AsyncSession, book_id: UUID) -> Sequence[PriceItem]:
    """A book's prices, the most general first."""
    return (
        await session.scalars(
            select(PriceItem)
            .where(PriceItem.price_book_id == book_id)
            .order_by(_KIND_ORDER, PriceItem.target_id, _CLASS_ORDER)
        )
    ).all()


async def replace_items(
    session: AsyncSession, book_id: UUID, items: Collection[dict[str, Any]]
) -> None:
    """All of a draft's prices."""
    await session.execute(
        delete(PriceItem)
        .where(PriceItem.price_book_id == book_id)
        .execution_options(synchronize_session=False)
    )
    if items:
        await session.execute(
            insert(PriceItem), [{"price_book_id": book_id} | item for item in items]
        )


async def existing_ids(session: AsyncSession, kind: str, ids: Collection[UUID]) -> set[UUID]:
    """Which of these base models, adapters or deployments there are."""
    column = _IDS[kind]
    return set((await session.scalars(select(column).where(column.in_(ids)))).all())


async def unpriced_models(session: AsyncSession, book_id: UUID) -> list[str]:
    """Names of deployments that the book has no price for, some of them at most."""
    parameters = {"book": book_id, "limit": MAX_UNPRICED}
    return list((await session.scalars(_UNPRICED, parameters)).all())


async def preview(
    session: AsyncSession,
    book_id: UUID,
    *,
    start: datetime,
    end: datetime,
    first_day: date,
    last_day: date,
    tenant_id: UUID | None,
) -> Sequence[Row[Any]]:
    """What tenants paid in a period, and what they would have paid by this book."""
    parameters = {
        "book": book_id,
        "start": start,
        "end": end,
        "first_day": first_day,
        "last_day": last_day,
        "tenant": tenant_id,
    }
    return (await session.execute(_PREVIEW, parameters)).all()
