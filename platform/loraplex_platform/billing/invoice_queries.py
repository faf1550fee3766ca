"""SQL of invoices: what a tenant's month comes to, numbers, and who is due one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, Select, delete, exists, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraplex_platform.billing.rollups import USAGE_SOURCE
from loraplex_platform.db import BillingProfile, Invoice, InvoiceLine, InvoiceSeries, Tenant

FIRST_DAY: Final = date(1970, 1, 1)

_PERIOD = text("""
select loraplex_midnight(:first_day, :zone) as period_start,
    loraplex_midnight(:next_month, :zone) as period_end, now() as now
""")

# Usage of the month, and of earlier ones what no invoice before this one has yet: late requests, and those
# of months that were never invoiced. (Earlier drafts are finalised first, and made again then.) A unit costs the same always, for its book is part of its line, so
# quantities are enough to tell what is left.
_USAGE_LINES = text(f"""
with {USAGE_SOURCE}, spent as (
    select s.deployment_id, s.model, s.adapter_version_id, s.price_book_id,
        s.day >= :month as is_current,
        sum(s.prompt_tokens - s.cached_tokens) as input, sum(s.cached_tokens) as cached_input,
        sum(s.completion_tokens) as output, sum(s.billed_requests) as request,
        sum(s.amount_pico) as amount_pico
    from source s
    group by s.deployment_id, s.model, s.adapter_version_id, s.price_book_id, s.day >= :month
), classes as (
    select s.*, c.price_class, c.quantity, c.unit_price_pico, c.class_no
    from spent s
    cross join lateral loraplex_entry_prices(
        s.price_book_id, s.adapter_version_id, s.deployment_id) p
    cross join lateral (values
        (1, 'input', s.input, p.input),
        (2, 'cached_input', s.cached_input, p.cached_input),
        (3, 'output', s.output, p.output),
        (4, 'request', s.request, p.request)
    ) as c (class_no, price_class, quantity, unit_price_pico)
), invoiced as (
    select l.deployment_id, l.model, l.adapter_version_id, l.price_book_id, l.price_class,
        sum(l.quantity) as quantity
    from invoices i join invoice_lines l on l.invoice_id = i.id
    where i.tenant_id = :tenant and i.kind = 'invoice' and i.status <> 'void'
        and i.period_start < :period_start and l.section in ('usage', 'earlier')
        and l.price_class <> 'adapter_hour'
    group by l.deployment_id, l.model, l.adapter_version_id, l.price_book_id, l.price_class
), lines as (
    select c.*, c.quantity - case when c.is_current then 0 else coalesce(i.quantity, 0) end as units
    from classes c
    left join invoiced i on i.model = c.model and i.price_book_id = c.price_book_id
        and i.price_class = c.price_class and i.deployment_id is not distinct from c.deployment_id
        and i.adapter_version_id is not distinct from c.adapter_version_id
)
select case when l.is_current then 'usage' else 'earlier' end as section, l.deployment_id, l.model,
    l.adapter_version_id, l.price_book_id, l.price_class, l.units, l.unit_price_pico,
    a.name as adapter, v.version, b.name as book,
    (select coalesce(sum(amount_pico), 0) from spent) as spent_pico,
    (select coalesce(sum(quantity * unit_price_pico), 0) from classes) as priced_pico
from lines l
join price_books b on b.id = l.price_book_id
left join adapter_versions v on v.id = l.adapter_version_id
left join adapters a on a.id = v.adapter_id
where l.units <> 0 and (l.unit_price_pico <> 0 or l.price_class <> 'request')
order by l.is_current desc, l.model, a.name nulls first, v.version, l.deployment_id,
    b.effective_from, b.id, l.class_no
""")  # noqa: S608 # USAGE_SOURCE is ours

# The same of adapter-hours, whose lines are days of the ledger. A line's amount is a sum of days that are
# rounded each, so that of amounts it is told what is left, too.
_HOURS_LINES = text("""
with spent as (
    select l.adapter_version_id, l.price_book_id, l.day >= :month as is_current,
        sum(l.seconds) as seconds, sum(l.amount_pico) as amount_pico
    from ledger l
    where l.kind = 'hours' and l.tenant_id = :tenant and l.day <= :last_day
    group by l.adapter_version_id, l.price_book_id, l.day >= :month
), invoiced as (
    select l.adapter_version_id, l.price_book_id, sum(l.quantity) as seconds,
        sum(l.amount_pico) as amount_pico
    from invoices i join invoice_lines l on l.invoice_id = i.id
    where i.tenant_id = :tenant and i.kind = 'invoice' and i.status <> 'void'
        and i.period_start < :period_start and l.price_class = 'adapter_hour'
    group by l.adapter_version_id, l.price_book_id
)
select case when s.is_current then 'usage' else 'earlier' end as section, s.adapter_version_id,
    s.price_book_id, s.seconds - left_over.seconds as seconds,
    s.amount_pico - left_over.amount_pico as amount_pico,
    loraplex_hour_price(s.price_book_id, a.base_model_id, a.id) as unit_price_pico,
    a.name as adapter, v.version, b.name as book
from spent s
left join invoiced i on not s.is_current and i.adapter_version_id = s.adapter_version_id
    and i.price_book_id = s.price_book_id
cross join lateral (
    select coalesce(i.seconds, 0) as seconds, coalesce(i.amount_pico, 0) as amount_pico) left_over
join adapter_versions v on v.id = s.adapter_version_id
join adapters a on a.id = v.adapter_id
join price_books b on b.id = s.price_book_id
where (s.seconds, s.amount_pico) <> (left_over.seconds, left_over.amount_pico)
order by s.is_current desc, a.name, v.version, b.effective_from, b.id
""")

# Not yet on an invoice before this one, whenever they were booked.
_ADJUSTMENTS = text("""
select l.entry_id, l.kind, l.seq, l.amount_pico, l.description, l.occurred_at
from ledger l
where l.tenant_id = :tenant and l.kind in ('credit', 'debit', 'reversal')
    and l.occurred_at < :period_end
    and not exists (
        select from invoice_lines x join invoices i on i.id = x.invoice_id
        where x.entry_id = l.entry_id and x.entry_kind = l.kind and x.entry_seq = l.seq
            and i.kind = 'invoice' and i.status <> 'void' and i.period_start < :period_start)
order by l.occurred_at, l.entry_id
""")

# Months of a tenant that are over, have no invoice yet and something to be invoiced.
_DUE = text("""
select cast(months.month as date)
from tenants t
cross join lateral (
    select date_trunc('month', now() at time zone t.billing_tz) as this_month, coalesce(
        (select date_trunc('month', max(i.period_end) at time zone t.billing_tz) from invoices i
            where i.tenant_id = t.id and i.kind = 'invoice' and i.status <> 'void'),
        date_trunc('month', least(
            (select cast(min(u.day) as timestamp) from usage_daily u where u.tenant_id = t.id),
            (select cast(min(d.day) as timestamp) from rollup_dirty d where d.tenant_id = t.id),
            (select cast(min(l.day) as timestamp) from ledger l
                where l.tenant_id = t.id and l.kind = 'hours'),
            (select min(l.occurred_at) at time zone t.billing_tz from ledger l
                where l.tenant_id = t.id and l.kind in ('credit', 'debit', 'reversal'))))
    ) as first_month
) as span
cross join lateral generate_series(
    span.first_month, span.this_month - interval '1 month', interval '1 month') as months (month)
where t.id = :tenant and span.first_month < span.this_month and not exists (
    -- Somebody found it wrong: it is theirs to make again.
    select from invoices v where v.tenant_id = t.id and v.kind = 'invoice' and v.status = 'void'
        and date_trunc('month', (v.period_start + (v.period_end - v.period_start) / 2)
            at time zone v.billing_tz) = months.month
) and (
    -- The last month also for what may have come late; of older ones those in which something was.
    months.month = span.this_month - interval '1 month'
    or exists (select from usage_daily u where u.tenant_id = t.id
        and u.day >= months.month and u.day < months.month + interval '1 month')
    or exists (select from rollup_dirty d where d.tenant_id = t.id
        and d.day >= months.month and d.day < months.month + interval '1 month')
    or exists (select from ledger l where l.tenant_id = t.id and l.kind = 'hours'
        and l.day >= months.month and l.day < months.month + interval '1 month')
    or exists (select from ledger l where l.tenant_id = t.id
        and l.kind in ('credit', 'debit', 'reversal')
        and l.occurred_at at time zone t.billing_tz >= months.month
        and l.occurred_at at time zone t.billing_tz < months.month + interval '1 month'))
order by months.month
""")


def invoices_of(tenant_id: UUID | None) -> Select[Invoice]:
    """A tenant's invoices and credit notes; None: everybody's."""
    statement = select(Invoice)
    return statement if tenant_id is None else statement.where(Invoice.tenant_id == tenant_id)


def named(statement: Select[Invoice], search: str) -> Select[Invoice]:
    """Only those whose number, or whose customer's name, holds this."""
    piece = search.strip()
    customer = select(Tenant.id).where(
        Tenant.id == Invoice.tenant_id,
        or_(
            Tenant.slug.icontains(piece, autoescape=True),
            Tenant.name.icontains(piece, autoescape=True),
        ),
    )
    return statement.where(
        or_(
            Invoice.number.icontains(piece, autoescape=True),
            Invoice.customer["name"].astext.icontains(piece, autoescape=True),
            customer.exists(),
        )
    )


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> None:
    """One at a time works on a tenant's invoices."""
    await session.execute(
        text("select pg_advisory_xact_lock(hashtextextended(:tenant, 7156))"),
        {"tenant": str(tenant_id)},
    )


async def period_of(session: AsyncSession, month: date, zone: str) -> Row[Any]:
    """The month's first moment, that of the next one, and now."""
    parameters = {"first_day": month, "next_month": next_month(month), "zone": zone}
    return (await session.execute(_PERIOD, parameters)).one()


def next_month(month: date) -> date:
    """The first of the month after."""
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


async def usage_lines(
    session: AsyncSession, tenant_id: UUID, month: date, period_start: datetime
) -> Sequence[Row[Any]]:
    """Quantities and unit prices of the month, then of earlier ones."""
    parameters = _of_month(tenant_id, month, period_start) | {"first_day": FIRST_DAY}
    return (await session.execute(_USAGE_LINES, parameters)).all()


async def hours_lines(
    session: AsyncSession, tenant_id: UUID, month: date, period_start: datetime
) -> Sequence[Row[Any]]:
    """Adapter-hours of the month, then of earlier ones: seconds, and pico-USD an hour."""
    parameters = _of_month(tenant_id, month, period_start)
    return (await session.execute(_HOURS_LINES, parameters)).all()


def _of_month(tenant_id: UUID, month: date, period_start: datetime) -> dict[str, Any]:
    return {
        "tenant": tenant_id,
        "month": month,
        "period_start": period_start,
        "last_day": date.fromordinal(next_month(month).toordinal() - 1),
    }


async def adjustment_lines(
    session: AsyncSession, tenant_id: UUID, period_start: datetime, period_end: datetime
) -> Sequence[Row[Any]]:
    """Credits, debits and reversals that are on no invoice before this one."""
    parameters = {"tenant": tenant_id, "period_start": period_start, "period_end": period_end}
    return (await session.execute(_ADJUSTMENTS, parameters)).all()


async def months_due(session: AsyncSession, tenant_id: UUID) -> Sequence[date]:
    """Months to draft an invoice of, the oldest first."""
    return (await session.scalars(_DUE, {"tenant": tenant_id})).all()


async def find_invoice(
    session: AsyncSession, invoice_id: UUID, *, is_locked: bool = False
) -> Invoice | None:
    """By id."""
    statement = select(Invoice).where(Invoice.id == invoice_id)
    if is_locked:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    return await session.scalar(statement)


async def find_period(
    session: AsyncSession, tenant_id: UUID, period_start: datetime
) -> Invoice | None:
    """The invoice of a period that is not void."""
    return await session.scalar(
        select(Invoice).where(
            Invoice.tenant_id == tenant_id,
            Invoice.kind == "invoice",
            Invoice.status != "void",
            Invoice.period_start == period_start,
        )
    )


async def earliest_draft(session: AsyncSession, tenant_id: UUID) -> Invoice | None:
    """Of a tenant's drafts, that of the oldest month."""
    return await session.scalar(
        select(Invoice)
        .where(Invoice.tenant_id == tenant_id, Invoice.status == "draft")
        .order_by(Invoice.period_start)
        .limit(1)
    )


async def latest_final(session: AsyncSession, tenant_id: UUID) -> Invoice | None:
    """Of a tenant's final invoices, that of the newest month."""
    return await session.scalar(
        select(Invoice)
        .where(Invoice.tenant_id == tenant_id, Invoice.kind == "invoice", Invoice.status == "final")
        .order_by(Invoice.period_start.desc())
        .limit(1)
    )


async def drafts_due(session: AsyncSession, before: datetime) -> Sequence[Invoice]:
    """Drafts of periods that ended before a time and had no invoice that was voided, the oldest first."""
    voided = aliased(Invoice)
    statement = (
        select(Invoice)
        .where(
            Invoice.status == "draft",
            Invoice.period_end <= before,
            ~exists().where(
                voided.tenant_id == Invoice.tenant_id,
                voided.kind == "invoice",
                voided.status == "void",
                voided.period_start == Invoice.period_start,
            ),
        )
        .order_by(Invoice.period_start, Invoice.tenant_id)
    )
    return (await session.scalars(statement)).all()


async def lines_of(session: AsyncSession, invoice_id: UUID) -> Sequence[InvoiceLine]:
    """In order."""
    statement = (
        select(InvoiceLine)
        .where(InvoiceLine.invoice_id == invoice_id)
        .order_by(InvoiceLine.line_no)
    )
    return (await session.scalars(statement)).all()


async def related_number(session: AsyncSession, invoice: Invoice) -> str | None:
    """Of the invoice that a credit note cancels, or of the note that cancels an invoice."""
    other = (
        Invoice.corrects_id == invoice.id
        if invoice.corrects_id is None
        else Invoice.id == invoice.corrects_id
    )
    return await session.scalar(select(Invoice.number).where(other))


async def replace_lines(
    session: AsyncSession, tenant_id: UUID, invoice_id: UUID, lines: Sequence[dict[str, Any]]
) -> None:
    """All lines of a draft."""
    await session.execute(
        delete(InvoiceLine)
        .where(InvoiceLine.invoice_id == invoice_id)
        .execution_options(synchronize_session=False)
    )
    rows = [
        {"invoice_id": invoice_id, "tenant_id": tenant_id, "line_no": number} | line
        for number, line in enumerate(lines, start=1)
    ]
    if rows:
        await session.execute(insert(InvoiceLine), rows)


async def next_number(session: AsyncSession, series: str) -> int:
    """Takes it: the series is locked until the transaction ends, so a rollback leaves no gap."""
    statement = insert(InvoiceSeries).values(series=series, last_number=1)
    statement = statement.on_conflict_do_update(
        index_elements=[InvoiceSeries.series],
        set_={"last_number": InvoiceSeries.last_number + 1},
    )
    return (await session.execute(statement.returning(InvoiceSeries.last_number))).scalar_one()


async def find_profile(session: AsyncSession, tenant_id: UUID) -> BillingProfile | None:
    """Whom to invoice."""
    return await session.get(BillingProfile, tenant_id)
