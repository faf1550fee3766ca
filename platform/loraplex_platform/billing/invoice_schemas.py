"""Invoices and billing profiles on the wire. Money is decimal text beside its currency."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from loraplex_platform.billing.invoices import month_of
from loraplex_platform.billing.money import CURRENCY, format_cents, format_usd
from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import BillingProfile, Invoice, InvoiceLine
from loraplex_platform.ids import format_id

MAX_ADDRESS_LINES = 8
_PPM_PER_PERCENT = 10_000


def _clean_address(text: str) -> str:
    lines = [line.strip() for line in text.split("\n")]
    if len(lines) > MAX_ADDRESS_LINES:
        raise ValueError(f"it has more than {MAX_ADDRESS_LINES} lines.")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for line in lines for char in line):
        raise ValueError("it must not hold control characters; separate lines by \\n.")
    return "\n".join(lines).strip()


Month = Annotated[
    str,
    Field(
        pattern=r"^2[0-9]{3}-(0[1-9]|1[0-2])$",
        description="A calendar month in the tenant's billing time zone.",
        examples=["2026-11"],
    ),
]


InvoiceStatus = Literal["draft", "final", "void"]


class DraftRequest(Body):
    """The month to draft, or to draft again."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"month": "2026-11"}]}
    )

    month: Month


class VoidRequest(Body):
    """Why an invoice is cancelled."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"reason": "Wrong customer address"}]}
    )

    reason: Annotated[CleanText, Field(min_length=1, max_length=400)]


class NewBillingProfile(Body):
    """Whom a tenant's invoices are made out to. Invoices that have a number keep what they say."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "legal_name": "Acme GmbH",
                    "address": "Hauptstraße 1\n10115 Berlin\nGermany",
                    "email": "billing@acme.example",
                    "tax_id": "DE123456789",
                    "tax_label": "VAT",
                    "tax_percent": "19",
                    "payment_days": 14,
                }
            ]
        },
    )

    legal_name: Annotated[CleanText, Field(min_length=1, max_length=200)]
    address: Annotated[
        str,
        Field(max_length=1000, description="Lines, separated by \\n."),
        AfterValidator(_clean_address),
    ] = ""
    email: Annotated[CleanText, Field(max_length=254)] | None = None
    tax_id: Annotated[CleanText, Field(max_length=64)] | None = None
    tax_label: Annotated[CleanText, Field(min_length=1, max_length=40)] = "Tax"
    tax_percent: str = Field(
        default="0",
        pattern=r"^([0-9]{1,2}(\.[0-9]{1,4})?|100(\.0{1,4})?)$",
        description="Of all that is charged, as decimal text with at most 4 places.",
        examples=["19"],
    )
    tax_note: Annotated[CleanText, Field(max_length=200)] | None = Field(
        default=None, description="A sentence that the law asks for, such as 'Reverse charge'."
    )
    payment_days: int = Field(default=30, ge=0, le=365, description="From the date of issue.")

    @property
    def tax_ppm(self) -> int:
        """The rate in millionths."""
        return int(Decimal(self.tax_percent) * _PPM_PER_PERCENT)


class BillingProfileResource(Resource):
    """Whom a tenant's invoices are made out to."""

    object: Literal["billing_profile"] = "billing_profile"
    tenant_id: str
    legal_name: str
    address: str
    email: str | None
    tax_id: str | None
    tax_label: str
    tax_percent: str
    tax_note: str | None
    payment_days: int
    version: int = Field(description="Its ETag, for If-Match.")


class InvoiceResource(Resource):
    """An invoice or a credit note. total = subtotal + adjustments + tax; what is due is the total less
    what the invoice before carried forward."""

    object: Literal["invoice"] = "invoice"
    id: str
    tenant_id: str
    kind: Literal["invoice", "credit_note"]
    status: InvoiceStatus
    number: str | None = Field(description="null: a draft.")
    month: str
    period_start: UnixSeconds
    period_end: UnixSeconds
    time_zone: str
    currency: Literal["USD"] = CURRENCY
    exact_usd: str = Field(description="Sum of all lines before rounding; tax is not in it.")
    subtotal_usd: str
    adjustments_usd: str
    tax_usd: str
    total_usd: str
    brought_forward_usd: str
    carried_forward_usd: str
    due_usd: str
    corrects_id: str | None
    computed_at: UnixSeconds
    issued_at: UnixSeconds | None
    due_on: str | None = Field(description="A date, YYYY-MM-DD.")
    voided_at: UnixSeconds | None
    void_reason: str | None


class InvoiceLineResource(Resource):
    """quantity x unit price, exactly, and rounded to cents once, half-even. Hours are charged by the day: their
    exact amount is a sum of days, rounded each to 12 places."""

    section: Literal["usage", "earlier", "adjustment"] = Field(
        description="earlier: of months before this one, settled after they were invoiced."
    )
    description: str
    deployment_id: str | None
    adapter_version_id: str | None
    price_book_id: str | None
    price_class: Literal["input", "cached_input", "output", "request", "adapter_hour"] | None
    quantity: str = Field(
        description="Tokens or requests; of adapter_hour hours, rounded to four places: `seconds` is exact."
    )
    seconds: int | None = Field(description="Of adapter_hour only.")
    unit_price_usd: str = Field(description="Per token, request or hour.")
    exact_usd: str
    amount_usd: str
    adjustment_id: str | None


class Party(Resource):
    """Issuer or customer, as the invoice names them."""

    name: str
    address: str
    email: str | None
    tax_id: str | None


class InvoiceWithLines(InvoiceResource):
    """An invoice, whole."""

    issuer: Party
    customer: Party
    lines: list[InvoiceLineResource]


def show_profile(profile: BillingProfile) -> BillingProfileResource:
    """The profile as the API shows it."""
    return BillingProfileResource(
        tenant_id=format_id("tenant", profile.tenant_id),
        legal_name=profile.legal_name,
        address=profile.address,
        email=profile.email,
        tax_id=profile.tax_id,
        tax_label=profile.tax_label,
        tax_percent=format_percent(profile.tax_ppm),
        tax_note=profile.tax_note,
        payment_days=profile.payment_days,
        version=profile.row_version,
    )


def format_percent(ppm: int) -> str:
    """190_000 -> "19", 88_750 -> "8.875"."""
    whole, fraction = divmod(ppm, _PPM_PER_PERCENT)
    return f"{whole}.{fraction:04d}".rstrip("0").rstrip(".")


def format_hours(seconds: int) -> str:
    """2_678_400 -> "744.0000"; the last place is rounded half to even."""
    return f"{Decimal(seconds) / 3600:.4f}"


def show_invoice(invoice: Invoice) -> InvoiceResource:
    """The invoice as the API shows it, without its lines."""
    return InvoiceResource(**_fields(invoice))


def show_whole_invoice(invoice: Invoice, lines: Sequence[InvoiceLine]) -> InvoiceWithLines:
    """With its lines and parties."""
    return InvoiceWithLines(
        **_fields(invoice),
        issuer=Party(**{name: invoice.issuer[name] for name in Party.model_fields}),
        customer=Party(**{name: invoice.customer[name] for name in Party.model_fields}),
        lines=[_show_line(line) for line in lines],
    )


def _fields(invoice: Invoice) -> dict[str, Any]:
    return {
        "id": format_id("invoice", invoice.id),
        "tenant_id": format_id("tenant", invoice.tenant_id),
        "kind": invoice.kind,
        "status": invoice.status,
        "number": invoice.number,
        "month": f"{month_of(invoice):%Y-%m}",
        "period_start": invoice.period_start,
        "period_end": invoice.period_end,
        "time_zone": invoice.billing_tz,
        "exact_usd": format_usd(int(invoice.exact_pico)),
        "subtotal_usd": format_cents(invoice.subtotal_cents),
        "adjustments_usd": format_cents(invoice.adjustments_cents),
        "tax_usd": format_cents(invoice.tax_cents),
        "total_usd": format_cents(invoice.total_cents),
        "brought_forward_usd": format_cents(invoice.brought_forward_cents),
        "carried_forward_usd": format_cents(invoice.carried_forward_cents),
        "due_usd": format_cents(invoice.due_cents),
        "corrects_id": None
        if invoice.corrects_id is None
        else format_id("invoice", invoice.corrects_id),
        "computed_at": invoice.computed_at,
        "issued_at": invoice.issued_at,
        "due_on": None if invoice.due_on is None else invoice.due_on.isoformat(),
        "voided_at": invoice.voided_at,
        "void_reason": invoice.void_reason,
    }


def _show_line(line: InvoiceLine) -> InvoiceLineResource:
    def optional(kind: str, value: Any) -> str | None:  # noqa: ANN401 (a UUID or None)
        return None if value is None else format_id(kind, value)

    is_hours = line.price_class == "adapter_hour"
    return InvoiceLineResource(
        section=line.section,  # type: ignore[arg-type]  # checked by the table
        description=line.description,
        deployment_id=optional("deployment", line.deployment_id),
        adapter_version_id=optional("adapter_version", line.adapter_version_id),
        price_book_id=optional("price_book", line.price_book_id),
        price_class=line.price_class,  # type: ignore[arg-type]  # what the books know
        quantity=format_hours(int(line.quantity)) if is_hours else str(int(line.quantity)),
        seconds=int(line.quantity) if is_hours else None,
        unit_price_usd=format_usd(int(line.unit_price_pico)),
        exact_usd=format_usd(int(line.amount_pico)),
        amount_usd=format_cents(line.amount_cents),
        adjustment_id=optional("adjustment", line.entry_id),
    )
