"""An invoice as text, ready for paper: one content, which HTML and PDF only set.

Everything comes from the frozen invoice, so the same invoice always reads the same. Names are other
people's: direction controls, which could make a line read as another one, are taken out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from loraplex_platform.billing.invoice_schemas import format_hours, format_percent
from loraplex_platform.billing.invoices import month_of
from loraplex_platform.billing.money import format_cents, format_usd
from loraplex_platform.db import Invoice, InvoiceLine

_TOKENS_PER_PRICE = 1_000_000
_DIRECTION_CONTROLS: Final = dict.fromkeys(
    [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
_CLASSES = {
    "input": ("Input tokens", "per 1M tokens"),
    "cached_input": ("Cached input tokens", "per 1M tokens"),
    "output": ("Output tokens", "per 1M tokens"),
    "request": ("Requests", "per request"),
    "adapter_hour": ("Hours deployed", "per hour"),
}
_HEADINGS = {
    "usage": "Usage of the period",
    "earlier": "Usage of earlier periods, settled after they were invoiced",
    "adjustment": "Credits and adjustments",
}


@dataclass(frozen=True, slots=True)
class DocumentLine:
    """A row: what, how much of it, at what price, exactly and rounded."""

    description: str
    unit: str
    quantity: str
    unit_price: str
    exact: str
    amount: str


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under a heading, with their sum."""

    heading: str
    lines: list[DocumentLine]
    subtotal: str


@dataclass(frozen=True, slots=True)
class Document:
    """An invoice or credit note in words. `stamp` is what no reader may overlook: DRAFT or VOID."""

    title: str
    stamp: str | None
    issuer: list[str]
    customer: list[str]
    facts: list[tuple[str, str]]
    currency: str
    sections: list[Section]
    totals: list[tuple[str, str]]
    due: tuple[str, str]
    notes: list[str]
    footer: str

    def texts(self) -> Iterable[str]:
        """Every string that is set, to choose fonts by."""
        yield from (self.title, self.stamp or "", self.currency, self.footer, *self.due)
        yield from (*self.issuer, *self.customer, *self.notes)
        for label, value in (*self.facts, *self.totals):
            yield from (label, value)
        for section in self.sections:
            yield from (section.heading, section.subtotal)
            for line in section.lines:
                yield from (line.description, line.unit, line.quantity)
                yield from (line.unit_price, line.exact, line.amount)


def compose(
    invoice: Invoice, lines: Sequence[InvoiceLine], *, related_number: str | None = None
) -> Document:
    """The document.

    Args:
        related_number: of the invoice that a credit note corrects, or of the credit note that voided an
            invoice.
    """
    is_note = invoice.kind == "credit_note"
    kind = "Credit note" if is_note else "Invoice"
    stamp = {"draft": "DRAFT", "void": "VOID"}.get(invoice.status)
    return Document(
        title=kind,
        stamp=stamp,
        issuer=_party(invoice.issuer),
        customer=_party(invoice.customer),
        facts=_facts(invoice, kind, related_number),
        currency=invoice.currency,
        sections=[
            _section(heading, found)
            for name, heading in _HEADINGS.items()
            if (found := [line for line in lines if line.section == name])
        ],
        totals=_totals(invoice),
        due=_due(invoice),
        notes=_notes(invoice, lines),
        footer=f"{kind} {invoice.number or '(draft)'} · {_inert(invoice.issuer['name'])}",
    )


def _party(party: dict[str, str | None]) -> list[str]:
    address = (party["address"] or "").replace("|", "\n").split("\n")
    lines = [party["name"] or "", *address]
    if party["tax_id"]:
        lines.append(f"Tax ID: {party['tax_id']}")
    if party["email"]:
        lines.append(party["email"])
    return [clean for line in lines if (clean := _inert(line))]


def _facts(invoice: Invoice, kind: str, related_number: str | None) -> list[tuple[str, str]]:
    first = month_of(invoice)
    last = (first + timedelta(days=32)).replace(day=1) - timedelta(days=1)
    zone = ZoneInfo(invoice.billing_tz)
    facts = [
        (f"{kind} number", invoice.number or "none yet: draft"),
        ("Billing period", f"{_day(first)} to {_day(last)}"),
        ("Time zone of the period", invoice.billing_tz),
        ("Customer account", _inert(invoice.customer["tenant"])),
    ]
    if invoice.issued_at is not None:
        facts.insert(1, ("Date of issue", _day(invoice.issued_at.astimezone(zone).date())))
    if invoice.due_on is not None:
        facts.insert(2, ("Payment due", _day(invoice.due_on)))
    if related_number is not None:
        is_note = invoice.kind == "credit_note"
        facts.append(("Cancels invoice" if is_note else "Cancelled by", related_number))
    return facts


def _section(heading: str, lines: Sequence[InvoiceLine]) -> Section:
    return Section(
        heading,
        [_line(line) for line in lines],
        _grouped(format_cents(sum(line.amount_cents for line in lines))),
    )


def _line(line: InvoiceLine) -> DocumentLine:
    exact = _grouped(format_usd(int(line.amount_pico)))
    amount = _grouped(format_cents(line.amount_cents))
    if line.price_class is None:
        return DocumentLine(_inert(line.description), "", "", "", exact, amount)
    unit, per = _CLASSES[line.price_class]
    price = int(line.unit_price_pico)
    quantity = f"{int(line.quantity):,}"
    if line.price_class == "adapter_hour":
        quantity = _grouped(format_hours(int(line.quantity)))
    if line.price_class in ("request", "adapter_hour"):
        shown = _trimmed(format_usd(price))
    else:
        shown = _trimmed(format_usd(price * _TOKENS_PER_PRICE))
    return DocumentLine(
        description=_inert(line.description),
        unit=unit,
        quantity=quantity,
        unit_price=f"{_grouped(shown)} {per}",
        exact=exact,
        amount=amount,
    )


def _totals(invoice: Invoice) -> list[tuple[str, str]]:
    percent = format_percent(invoice.customer["tax_ppm"])
    totals = [("Subtotal", invoice.subtotal_cents)]
    if invoice.adjustments_cents:
        totals.append(("Credits and adjustments", invoice.adjustments_cents))
    totals.append((f"{_inert(invoice.customer['tax_label'])} ({percent} %)", invoice.tax_cents))
    totals.append(("Total", invoice.total_cents))
    if invoice.brought_forward_cents:
        given_back = invoice.kind == "credit_note"
        label = "Credit given back" if given_back else "Credit brought forward"
        totals.append((label, -invoice.brought_forward_cents))
    return [(label, _grouped(format_cents(cents))) for label, cents in totals]


def _due(invoice: Invoice) -> tuple[str, str]:
    amount = f"{invoice.currency} {_grouped(format_cents(invoice.due_cents))}"
    if invoice.kind == "credit_note":
        return "Credited", f"{invoice.currency} {_grouped(format_cents(-invoice.due_cents))}"
    return "Amount due", amount


def _notes(invoice: Invoice, lines: Sequence[InvoiceLine]) -> list[str]:
    rounded = sum(line.amount_cents for line in lines)
    notes = [
        "Each line is its quantity times its unit price, exactly, rounded once to cents, half to even. "
        f"Exact sum of the lines: {_grouped(format_usd(int(invoice.exact_pico)))}; "
        f"rounded: {_grouped(format_cents(rounded))}."
    ]
    if any(line.price_class == "adapter_hour" for line in lines):
        notes.append(
            "Hours deployed are counted in whole seconds (shown to four places of an hour) and charged by the "
            "day, each day's amount rounded half to even to 12 places."
        )
    if invoice.carried_forward_cents:
        carried = _grouped(format_cents(abs(invoice.carried_forward_cents)))
        what = "no longer carried" if invoice.kind == "credit_note" else "carried"
        notes.append(f"Credit {what} forward to the next invoice: {invoice.currency} {carried}.")
    if invoice.customer["tax_note"]:
        notes.append(_inert(invoice.customer["tax_note"]))
    if invoice.void_reason:
        notes.append(f"Void: {_inert(invoice.void_reason)}")
    if invoice.issuer["payment"] and invoice.due_cents > 0:
        notes.append(f"Payment: {_inert(invoice.issuer['payment'])}")
    return notes


def _day(day: date) -> str:
    return f"{day.day} {day:%B %Y}"


def _grouped(decimal: str) -> str:
    """Thousands apart: -1234.50 -> -1,234.50."""
    sign = "-" if decimal.startswith("-") else ""
    whole, point, fraction = decimal.removeprefix("-").partition(".")
    return f"{sign}{int(whole):,}{point}{fraction}"


def _trimmed(decimal: str) -> str:
    """No needless zeros, but two places at least."""
    whole, _, fraction = decimal.partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"


def _inert(text: str) -> str:
    return " ".join(text.translate(_DIRECTION_CONTROLS).split())
