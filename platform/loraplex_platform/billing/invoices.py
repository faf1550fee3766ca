"""Invoices: a tenant's month, from a draft that follows the books to a number that never changes.

A draft can be made again at any time. Finalising computes it once more, takes the next number of the
series and freezes it. Usage that settles later goes to the next invoice, under "earlier": what is
invoiced adds up to what the ledger says, month after month. A final invoice is only ever voided, by a
credit note with a number of its own, and only the newest of a tenant, so that no line is on two.

Each line is rounded to cents once, half-even; totals are sums of rounded lines. Of adapter-hours a line is
the sum of its days, which the ledger has rounded to the pico-dollar each.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import structlog
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM, Actor, record
from loraplex_platform.billing import invoice_queries as queries
from loraplex_platform.billing.adapter_hours import MODEL_NAME
from loraplex_platform.billing.money import CURRENCY, format_cents, round_half_even, to_cents
from loraplex_platform.db import BillingProfile, Invoice, OutboxMessage, Tenant
from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory
from loraplex_platform.errors import ConflictError, NotFoundError, PlatformError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.settings import IssuerSettings
from loraplex_platform.tenancy import queries as tenancy

log = structlog.get_logger(__name__)

OUTBOX_TOPIC: Final = "invoice"
MAX_DESCRIPTION_CHARS = 400
_NEGATED = (
    "exact_pico",
    "subtotal_cents",
    "adjustments_cents",
    "tax_cents",
    "total_cents",
    # A note takes back what its invoice asked for and what it did with credit, each by itself: it is the
    # invoice before that has the credit to carry forward again.
    "brought_forward_cents",
    "carried_forward_cents",
    "due_cents",
)


class IssuerUnknownError(ConflictError):
    """Nobody has said who issues the invoices."""

    code = "issuer_unknown"


class BooksDisagreeError(PlatformError):
    """The ledger's amounts are not its tokens times their prices: nothing may be invoiced from it."""

    code = "books_disagree"


async def find(
    session: AsyncSession, tenant_id: UUID | None, invoice_id: str, *, is_locked: bool = False
) -> Invoice:
    """By its public id.

    Raises:
        NotFoundError: no such invoice (of this tenant).
    """
    try:
        found = await queries.find_invoice(
            session, parse_id("invoice", invoice_id), is_locked=is_locked
        )
    except MalformedIdError:
        found = None
    if found is None or (tenant_id is not None and found.tenant_id != tenant_id):
        raise NotFoundError("No such invoice.")
    return found


async def draft(
    session: AsyncSession, actor: Actor, issuer: IssuerSettings, tenant: Tenant, month: date
) -> Invoice:
    """The draft of a month, made or made again.

    Raises:
        ConflictError: the month has not begun, has a final invoice, or a later month has one.
    """
    await queries.lock_tenant(session, tenant.id)
    period = await queries.period_of(session, month, tenant.billing_tz)
    if period.now < period.period_start:
        raise ConflictError(f"{month:%Y-%m} has not begun yet.", param="month")
    existing = await queries.find_period(session, tenant.id, period.period_start)
    if existing is not None and existing.status == "final":
        raise ConflictError(
            f"{month:%Y-%m} is invoiced already ({existing.number}). Void that one first, or book a "
            "credit or debit.",
            param="month",
        )
    latest = await queries.latest_final(session, tenant.id)
    if latest is not None and latest.period_start > period.period_start:
        raise ConflictError(
            f"A later month is invoiced already ({latest.number}). Usage of {month:%Y-%m} that is on no "
            "invoice will be on the next one.",
            param="month",
        )
    invoice = existing
    if invoice is None:
        invoice = Invoice(
            id=uuid7(),
            tenant_id=tenant.id,
            kind="invoice",
            status="draft",
            period_start=period.period_start,
            period_end=period.period_end,
            billing_tz=tenant.billing_tz,
            currency=CURRENCY,
        )
    await _compute(session, invoice, tenant, issuer, month, period.now)
    _record(session, actor, "draft", invoice)
    return invoice


async def finalize(
    session: AsyncSession, actor: Actor, issuer: IssuerSettings, invoice_id: UUID
) -> Invoice:
    """Compute a draft once more, number it and freeze it. Webhooks hear of it.

    Raises:
        NotFoundError: no such invoice.
        ConflictError: it is no draft, its month is not over, an earlier one is still a draft, there is
            nothing on it, or nobody has said who issues it.
    """
    invoice, tenant = await _locked(session, invoice_id)
    if invoice.status != "draft":
        raise ConflictError(f"It is {invoice.status} already ({invoice.number}).")
    if not issuer.issuer_name:
        raise IssuerUnknownError(
            "Nobody has said who issues invoices: set LORAPLEX_ISSUER_NAME and "
            "LORAPLEX_ISSUER_ADDRESS of this process."
        )
    month = month_of(invoice)
    period = await queries.period_of(session, month, invoice.billing_tz)
    if period.now < invoice.period_end:
        raise ConflictError(f"{month:%Y-%m} is not over in {invoice.billing_tz} yet.")
    earliest = await queries.earliest_draft(session, tenant.id)
    if earliest is not None and earliest.period_start < invoice.period_start:
        raise ConflictError(
            f"{month_of(earliest):%Y-%m} is still a draft; finalise or delete that one first."
        )
    if await _compute(session, invoice, tenant, issuer, month, period.now) == 0:
        raise ConflictError("There is nothing on it; delete the draft instead.")
    profile = await queries.find_profile(session, tenant.id)
    await _issue(session, invoice, issuer, period.now, profile)
    _record(session, actor, "finalize", invoice)
    return invoice


async def void(
    session: AsyncSession, actor: Actor, issuer: IssuerSettings, invoice_id: UUID, reason: str
) -> Invoice:
    """Cancel a final invoice; the credit note that does so. Its month can be drafted again.

    Raises:
        NotFoundError: no such invoice.
        ConflictError: it is not final, or not the tenant's newest.
    """
    invoice, tenant = await _locked(session, invoice_id)
    if invoice.kind != "invoice" or invoice.status != "final":
        raise ConflictError("Only a final invoice can be voided.")
    latest = await queries.latest_final(session, tenant.id)
    if latest is not None and latest.id != invoice.id:
        raise ConflictError(
            f"Only a tenant's newest invoice can be voided, and that is {latest.number}. For an earlier "
            "one book a credit; it will be on the next invoice."
        )
    period = await queries.period_of(session, month_of(invoice), invoice.billing_tz)
    note = Invoice(
        id=uuid7(),
        tenant_id=tenant.id,
        kind="credit_note",
        status="draft",
        period_start=invoice.period_start,
        period_end=invoice.period_end,
        billing_tz=invoice.billing_tz,
        currency=invoice.currency,
        issuer=invoice.issuer,
        customer=invoice.customer,
        corrects_id=invoice.id,
        computed_at=period.now,
        **{name: -getattr(invoice, name) for name in _NEGATED},
    )
    session.add(note)
    await session.flush()
    await queries.replace_lines(
        session,
        tenant.id,
        note.id,
        [
            {
                "section": line.section,
                "description": line.description,
                "deployment_id": line.deployment_id,
                "model": line.model,
                "adapter_version_id": line.adapter_version_id,
                "price_book_id": line.price_book_id,
                "price_class": line.price_class,
                "quantity": -line.quantity,
                "unit_price_pico": line.unit_price_pico,
                "amount_pico": -line.amount_pico,
                "amount_cents": -line.amount_cents,
                "entry_id": line.entry_id,
                "entry_kind": line.entry_kind,
                "entry_seq": line.entry_seq,
            }
            for line in await queries.lines_of(session, invoice.id)
        ],
    )
    await _issue(session, note, issuer, period.now, None)
    invoice.status = "void"
    invoice.voided_at = period.now
    invoice.void_reason = reason
    await session.flush()
    _record(session, actor, "void", invoice, reason=reason, credit_note=note.number)
    return note


async def delete_draft(session: AsyncSession, actor: Actor, invoice_id: UUID) -> None:
    """Throw a draft away.

    Raises:
        NotFoundError: no such invoice.
        ConflictError: it has a number.
    """
    invoice, _ = await _locked(session, invoice_id)
    if invoice.status != "draft":
        raise ConflictError(f"{invoice.number} has a number and is kept; void it instead.")
    _record(session, actor, "delete", invoice)
    await queries.replace_lines(session, invoice.tenant_id, invoice.id, [])
    await session.delete(invoice)
    await session.flush()


def month_of(invoice: Invoice) -> date:
    """The first of its month, in its own zone."""
    middle = invoice.period_start + (invoice.period_end - invoice.period_start) / 2
    return middle.astimezone(ZoneInfo(invoice.billing_tz)).date().replace(day=1)


async def _locked(session: AsyncSession, invoice_id: UUID) -> tuple[Invoice, Tenant]:
    found = await queries.find_invoice(session, invoice_id)
    if found is None:
        raise NotFoundError("No such invoice.")
    await queries.lock_tenant(session, found.tenant_id)
    invoice = await queries.find_invoice(session, invoice_id, is_locked=True)
    tenant = await tenancy.find_tenant(session, found.tenant_id)
    if invoice is None or tenant is None:
        raise NotFoundError("No such invoice.")
    return invoice, tenant


async def _compute(
    session: AsyncSession,
    invoice: Invoice,
    tenant: Tenant,
    issuer: IssuerSettings,
    month: date,
    now: datetime,
) -> int:
    """Fill a draft from the books; how many lines it has."""
    lines = await _lines(session, invoice, month)
    profile = await queries.find_profile(session, tenant.id)
    subtotal = sum(line["amount_cents"] for line in lines if line["section"] != "adjustment")
    adjustments = sum(line["amount_cents"] for line in lines if line["section"] == "adjustment")
    tax_ppm = 0 if profile is None else profile.tax_ppm
    tax = round_half_even((subtotal + adjustments) * tax_ppm, 1_000_000)
    total = subtotal + adjustments + tax
    before = await queries.latest_final(session, tenant.id)
    brought = 0 if before is None else before.carried_forward_cents
    invoice.issuer = show_issuer(issuer)
    invoice.customer = show_customer(tenant, profile)
    invoice.exact_pico = sum(line["amount_pico"] for line in lines)
    invoice.subtotal_cents = subtotal
    invoice.adjustments_cents = adjustments
    invoice.tax_cents = tax
    invoice.total_cents = total
    invoice.brought_forward_cents = brought
    invoice.due_cents = max(0, total - brought)
    invoice.carried_forward_cents = max(0, brought - total)
    invoice.computed_at = now
    session.add(invoice)
    await session.flush()
    await queries.replace_lines(session, tenant.id, invoice.id, lines)
    return len(lines)


async def _lines(session: AsyncSession, invoice: Invoice, month: date) -> list[dict[str, Any]]:
    lines = []
    tenant_id, begins, ends = invoice.tenant_id, invoice.period_start, invoice.period_end
    for row in await queries.usage_lines(session, tenant_id, month, begins):
        if row.spent_pico != row.priced_pico:
            raise BooksDisagreeError(
                f"The ledger's amounts ({row.spent_pico} pico-USD) are not its tokens times their prices "
                f"({row.priced_pico}). See `loraplex reconcile`."
            )
        amount = int(row.units) * row.unit_price_pico
        what = row.model if row.adapter is None else f"{row.model}, {row.adapter} v{row.version}"
        lines.append(
            {
                "section": row.section,
                "description": f"{what} (prices: {row.book})"[:MAX_DESCRIPTION_CHARS],
                "deployment_id": row.deployment_id,
                "model": row.model,
                "adapter_version_id": row.adapter_version_id,
                "price_book_id": row.price_book_id,
                "price_class": row.price_class,
                "quantity": int(row.units),
                "unit_price_pico": row.unit_price_pico,
                "amount_pico": amount,
                "amount_cents": to_cents(amount),
                "entry_id": None,
                "entry_kind": None,
                "entry_seq": None,
            }
        )
    for row in await queries.hours_lines(session, tenant_id, month, begins):
        amount = int(row.amount_pico)
        what = f"{row.adapter} v{row.version}, deployed (prices: {row.book})"
        lines.append(
            {
                "section": row.section,
                "description": what[:MAX_DESCRIPTION_CHARS],
                "deployment_id": None,
                "model": MODEL_NAME,
                "adapter_version_id": row.adapter_version_id,
                "price_book_id": row.price_book_id,
                "price_class": "adapter_hour",
                "quantity": int(row.seconds),
                "unit_price_pico": row.unit_price_pico,
                "amount_pico": amount,
                "amount_cents": to_cents(amount),
                "entry_id": None,
                "entry_kind": None,
                "entry_seq": None,
            }
        )
    lines.sort(key=lambda line: str(line["section"]) == "earlier")  # keeps each part's order
    for row in await queries.adjustment_lines(session, tenant_id, begins, ends):
        amount = int(row.amount_pico)
        lines.append(
            {
                "section": "adjustment",
                "description": f"{row.kind.capitalize()}: {row.description}"[
                    :MAX_DESCRIPTION_CHARS
                ],
                "deployment_id": None,
                "model": None,
                "adapter_version_id": None,
                "price_book_id": None,
                "price_class": None,
                "quantity": 1,
                "unit_price_pico": amount,
                "amount_pico": amount,
                "amount_cents": to_cents(amount),
                "entry_id": row.entry_id,
                "entry_kind": row.kind,
                "entry_seq": row.seq,
            }
        )
    return lines


async def _issue(
    session: AsyncSession,
    invoice: Invoice,
    issuer: IssuerSettings,
    now: datetime,
    profile: BillingProfile | None,
) -> None:
    """Number and freeze it, and tell whoever listens."""
    today = now.astimezone(ZoneInfo(invoice.billing_tz)).date()
    days = 30 if profile is None else profile.payment_days
    number = await queries.next_number(session, issuer.invoice_series)
    invoice.number = f"{issuer.invoice_series}-{number:06d}"
    invoice.issued_at = now
    invoice.due_on = today + timedelta(days=days) if invoice.due_cents > 0 else None
    invoice.status = "final"
    session.add(
        OutboxMessage(
            topic=OUTBOX_TOPIC,
            dedupe_key=f"{invoice.id}:final",
            payload={
                "event": f"{invoice.kind}.finalized",
                "tenant_id": str(invoice.tenant_id),
                "invoice_id": str(invoice.id),
                "number": invoice.number,
                "currency": invoice.currency,
                "total": format_cents(invoice.total_cents),
                "due": format_cents(invoice.due_cents),
                "due_on": None if invoice.due_on is None else invoice.due_on.isoformat(),
            },
        )
    )
    await session.flush()


def show_issuer(issuer: IssuerSettings) -> dict[str, Any]:
    """As it is frozen in an invoice."""
    return {
        "name": issuer.issuer_name or "",
        "address": issuer.issuer_address,
        "email": issuer.issuer_email,
        "tax_id": issuer.issuer_tax_id,
        "payment": issuer.issuer_payment,
    }


def show_customer(tenant: Tenant, profile: BillingProfile | None) -> dict[str, Any]:
    """As it is frozen in an invoice."""
    shown: dict[str, Any] = {
        "tenant": tenant.slug,
        "name": tenant.name,
        "address": "",
        "email": None,
        "tax_id": None,
        "tax_label": "Tax",
        "tax_ppm": 0,
        "tax_note": None,
    }
    if profile is not None:
        shown |= {
            "name": profile.legal_name,
            "address": profile.address,
            "email": profile.email,
            "tax_id": profile.tax_id,
            "tax_label": profile.tax_label,
            "tax_ppm": profile.tax_ppm,
            "tax_note": profile.tax_note,
        }
    return shown


def _record(
    session: AsyncSession, actor: Actor, verb: str, invoice: Invoice, **detail: str | None
) -> None:
    record(
        session,
        actor,
        f"invoice.{verb}",
        "invoice",
        format_id("invoice", invoice.id),
        tenant_id=invoice.tenant_id,
        detail={"month": f"{month_of(invoice):%Y-%m}"} | detail,
        after={
            "status": invoice.status,
            "number": invoice.number,
            "total": format_cents(invoice.total_cents),
        },
    )


@dataclass(frozen=True, slots=True)
class InvoiceWorker:
    """Drafts the months that are over, and finalises drafts that have waited long enough.

    A month whose invoice was voided is left to people: made again as it was, it would be wrong again.

    `finalize_after`: how long after its month; None: somebody does it by hand.
    """

    sessions: SessionFactory
    issuer: IssuerSettings
    finalize_after: timedelta | None

    async def run_once(self) -> int:
        """How many invoices were drafted or finalised.

        Raises:
            DatabaseUnavailableError: the rest waits for the next round.
        """
        async with self.sessions() as session:
            tenant_ids = list(await session.scalars(select(Tenant.id).order_by(Tenant.id)))
        count = 0
        for tenant_id in tenant_ids:
            try:
                count += await self._draft_due(tenant_id)
            except DatabaseUnavailableError:
                raise
            except (PlatformError, DBAPIError) as error:  # one tenant's trouble is not everybody's
                log.error("invoice_not_drafted", tenant_id=str(tenant_id), reason=_reason(error))
        return count + await self._finalize()

    async def _draft_due(self, tenant_id: UUID) -> int:
        async with self.sessions() as session:
            months = await queries.months_due(session, tenant_id)
        count = 0
        for month in months:
            count += await self._draft(tenant_id, month)
        return count

    async def _draft(self, tenant_id: UUID, month: date) -> bool:
        async with self.sessions() as session:
            tenant = await tenancy.find_tenant(session, tenant_id)
            if tenant is None:
                return False
            invoice = await draft(session, SYSTEM, self.issuer, tenant, month)
            if not await queries.lines_of(session, invoice.id):
                return False  # without a commit: an empty month has no invoice
            await session.commit()
        return True

    async def _finalize(self) -> int:
        if self.finalize_after is None:
            return 0
        if not self.issuer.issuer_name:
            log.warning("invoices_wait_for_issuer", remedy="set LORAPLEX_ISSUER_NAME")
            return 0
        async with self.sessions() as session:
            before = datetime.now(UTC) - self.finalize_after
            ids = [invoice.id for invoice in await queries.drafts_due(session, before)]
        count = 0
        for invoice_id in ids:
            try:
                async with self.sessions.begin() as session:
                    await finalize(session, SYSTEM, self.issuer, invoice_id)
                count += 1
            except DatabaseUnavailableError:
                raise
            except (PlatformError, DBAPIError) as error:
                log.error("invoice_not_final", invoice_id=str(invoice_id), reason=_reason(error))
        return count


def _reason(error: PlatformError | DBAPIError) -> str:
    return error.message if isinstance(error, PlatformError) else str(error.orig)
