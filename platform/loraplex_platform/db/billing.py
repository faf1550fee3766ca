"""Prices, the append-only ledger, rollups and invoices. Money is integers: pico-USD, and cents once
an invoice line has been rounded.

A price is pico-USD per unit: per token, which is the same number as micro-USD per 1M tokens, per request,
or per hour for which an adapter version is deployed.
"""

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Date,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    SmallInteger,
    String,
    Table,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt, Json, Pico

# The target of a price that holds for any base model or any adapter: part of a primary key, so not null.
ANY_TARGET = UUID(int=0)
_ANY_TARGET_SQL = f"'{ANY_TARGET}'"


class PriceBook(Base):
    """A set of prices and the time in which it is in force; periods never overlap.

    A draft may change; once published, triggers let a book only end, and only in the future. A retired
    book has ended, or was withdrawn before it began.
    """

    __tablename__ = "price_books"
    __table_args__ = (
        CheckConstraint("status in ('draft', 'published', 'retired')", name="status"),
        CheckConstraint("currency = 'USD'", name="currency"),
        CheckConstraint("effective_to >= effective_from", name="period"),
        CheckConstraint(
            "status = 'draft' or (published_at is not null and effective_from is not null)",
            name="published",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(80))
    currency: Mapped[str] = mapped_column(String(3), server_default="USD")
    status: Mapped[str] = mapped_column(String(16))
    effective_from: Mapped[datetime | None]
    effective_to: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    published_at: Mapped[datetime | None]
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class PriceItem(Base):
    """Pico-USD per unit of a class, for a target; the most specific target wins."""

    __tablename__ = "price_items"
    __table_args__ = (
        CheckConstraint(
            "target_kind in ('any_base', 'any_adapter', 'base_model', 'adapter', 'deployment')",
            name="target_kind",
        ),
        CheckConstraint(
            f"(target_kind in ('any_base', 'any_adapter')) = (target_id = {_ANY_TARGET_SQL})",
            name="target_id",
        ),
        CheckConstraint(
            "price_class in ('input', 'cached_input', 'output', 'request', 'adapter_hour')",
            name="price_class",
        ),
        CheckConstraint(
            "price_class <> 'adapter_hour'"
            " or target_kind in ('any_adapter', 'base_model', 'adapter')",
            name="adapter_hour",
        ),
        CheckConstraint("price_pico >= 0", name="not_negative"),
    )

    price_book_id: Mapped[UUID] = mapped_column(ForeignKey("price_books.id"), primary_key=True)
    target_kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    target_id: Mapped[UUID] = mapped_column(primary_key=True, server_default=text(_ANY_TARGET_SQL))
    price_class: Mapped[str] = mapped_column(String(16), primary_key=True)
    price_pico: Mapped[int] = mapped_column(BigInteger)


class LedgerEntry(Base):
    """One line of account. (entry_id, kind, seq) is the exactly-once guard: entry_id = request id, or what
    hours, credits and debits are named by.

    The runtime role may INSERT and SELECT only; corrections are new rows. `account` is `revenue`
    (the tenant pays), `absorbed` (the platform does: faults, probes), `credit` (amounts below zero)
    or `adjust` (debits, and reversals of what is not a credit). A usage row costs its tokens and one
    request; a late row only its tokens; rows of hours the time that an adapter version was deployed on one
    day of the tenant's, under one price book: the first of them what was known then, others what corrects it.
    """

    __tablename__ = "ledger"
    __table_args__ = (
        CheckConstraint(
            "kind in ('usage', 'late', 'hours', 'credit', 'debit', 'reversal')", name="kind"
        ),
        CheckConstraint("account in ('revenue', 'absorbed', 'credit', 'adjust')", name="account"),
        CheckConstraint(
            "(kind in ('usage', 'late', 'hours')) = (price_book_id is not null)", name="price_book"
        ),
        CheckConstraint(
            "case kind when 'credit' then amount_pico < 0 and account = 'credit'"
            " when 'debit' then amount_pico > 0 and account = 'adjust'"
            " when 'reversal' then account in ('credit', 'adjust')"
            " when 'hours' then account = 'revenue'"
            " else account in ('revenue', 'absorbed') end",
            name="sign",
        ),
        CheckConstraint(
            "(kind = 'hours') = (day is not null) and (kind = 'hours') = (seconds is not null)"
            " and (kind <> 'hours' or adapter_version_id is not null)",
            name="hours",
        ),
        Index("ix_ledger_tenant_id_entry_id", "tenant_id", "entry_id"),
        Index(
            "ix_ledger_adjustments",
            "tenant_id",
            "entry_id",
            postgresql_where=text("kind in ('credit', 'debit', 'reversal')"),
        ),
        Index("ix_ledger_hours", "tenant_id", "day", postgresql_where=text("kind = 'hours'")),
        {"postgresql_partition_by": "RANGE (entry_id)"},
    )

    entry_id: Mapped[UUID] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    seq: Mapped[int] = mapped_column(SmallInteger, primary_key=True, server_default=text("0"))
    tenant_id: Mapped[UUID]
    account: Mapped[str] = mapped_column(String(16))
    project_id: Mapped[UUID | None]
    key_id: Mapped[UUID | None]
    deployment_id: Mapped[UUID | None]
    revision_id: Mapped[UUID | None]  # of usage and late rows: what answered
    adapter_version_id: Mapped[UUID | None]
    price_book_id: Mapped[UUID | None]
    prompt_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    amount_pico: Mapped[Pico]
    description: Mapped[str | None] = mapped_column(String(400))  # why: credits, debits, reversals
    occurred_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Of hours: whole seconds on a day in the tenant's billing_tz; below zero in a correction.
    day: Mapped[date | None] = mapped_column(Date)
    seconds: Mapped[BigInt | None]


class AdapterHoursProgress(Base):
    """Up to which of its days a tenant's adapter-hours have been booked."""

    __tablename__ = "adapter_hours_progress"

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    booked_to: Mapped[date] = mapped_column(Date)  # exclusive


class LedgerReversal(Base):
    """What has been reversed, at most once: the row of the ledger, and the row that reverses it."""

    __tablename__ = "ledger_reversals"
    __table_args__ = (CheckConstraint("kind in ('usage', 'credit', 'debit')", name="kind"),)

    entry_id: Mapped[UUID] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    seq: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    tenant_id: Mapped[UUID]
    reversal_id: Mapped[UUID] = mapped_column(unique=True)


class UsageDaily(Base):
    """What a tenant used on one of its days, by who and what: made whole from the books by
    `loraplex_roll_up`, never incremented. A request counts on the day it was admitted.

    `requests` are all settled ones, `billed_requests` those that the tenant pays for; tokens and
    `amount_pico` are the billed ones, `absorbed_*` what the platform paid for.
    """

    __tablename__ = "usage_daily"
    __table_args__ = (Index("ix_usage_daily_day", "day"),)

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    day: Mapped[date] = mapped_column(Date, primary_key=True)  # in the tenant's billing_tz
    row_no: Mapped[int] = mapped_column(primary_key=True)
    project_id: Mapped[UUID | None]
    key_id: Mapped[UUID | None]
    deployment_id: Mapped[UUID | None]
    model: Mapped[str] = mapped_column(String(128))
    adapter_version_id: Mapped[UUID | None]
    price_book_id: Mapped[UUID]
    requests: Mapped[BigInt]
    billed_requests: Mapped[BigInt]
    prompt_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    absorbed_tokens: Mapped[BigInt]
    amount_pico: Mapped[Pico]
    absorbed_pico: Mapped[Pico]


# Marks of buckets that changed since they were rolled up, several per bucket. Each settle adds its own,
# so that whoever deletes a mark has seen what it stands for, and names its request. Without one the
# bucket has changed in another way, and what is rolled up of it is worth nothing.
rollup_dirty = Table(
    "rollup_dirty",
    Base.metadata,
    Column("tenant_id", Uuid(as_uuid=True), nullable=False),
    Column("day", Date, nullable=False),
    Column("entry_id", Uuid(as_uuid=True)),
    Index("ix_rollup_dirty_tenant_id_day", "tenant_id", "day"),
)


class BillingProfile(Base):
    """Whom a tenant's invoices are made out to, and how they are taxed."""

    __tablename__ = "billing_profiles"
    __table_args__ = (
        CheckConstraint("tax_ppm between 0 and 1000000", name="tax_ppm"),
        CheckConstraint("payment_days between 0 and 365", name="payment_days"),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    legal_name: Mapped[str] = mapped_column(String(200))
    address: Mapped[str]  # lines
    email: Mapped[str | None] = mapped_column(String(254))
    tax_id: Mapped[str | None] = mapped_column(String(64))
    tax_label: Mapped[str] = mapped_column(String(40), server_default="Tax")
    tax_ppm: Mapped[int] = mapped_column(server_default=text("0"))  # 190_000: 19 %
    tax_note: Mapped[str | None] = mapped_column(String(200))  # such as "Reverse charge"
    payment_days: Mapped[int] = mapped_column(server_default=text("30"))
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class InvoiceSeries(Base):
    """The last number given in a series; its row's lock keeps the numbers without gaps."""

    __tablename__ = "invoice_series"

    series: Mapped[str] = mapped_column(String(20), primary_key=True)
    last_number: Mapped[BigInt]


class Invoice(Base):
    """A tenant's month, or the credit note that voids one. Only a draft may change (triggers).

    total = subtotal + adjustments + tax. What is due is the total less what was brought forward from
    the invoice before; below zero it is carried forward to the next one instead. A credit note has every
    amount of its invoice with the other sign.
    """

    __tablename__ = "invoices"
    __table_args__ = (
        CheckConstraint("kind in ('invoice', 'credit_note')", name="kind"),
        CheckConstraint("status in ('draft', 'final', 'void')", name="status"),
        CheckConstraint("(status = 'draft') = (number is null)", name="number"),
        CheckConstraint("(status = 'draft') = (issued_at is null)", name="issued_at"),
        CheckConstraint("(status = 'void') = (voided_at is not null)", name="voided_at"),
        CheckConstraint("(kind = 'credit_note') = (corrects_id is not null)", name="corrects"),
        CheckConstraint(
            "total_cents = subtotal_cents + adjustments_cents + tax_cents", name="total"
        ),
        CheckConstraint(
            "due_cents - carried_forward_cents = total_cents - brought_forward_cents", name="due"
        ),
        Index(
            "uq_invoices_tenant_id_period",
            "tenant_id",
            "period_start",
            unique=True,
            postgresql_where=text("kind = 'invoice' and status <> 'void'"),
        ),
        UniqueConstraint("tenant_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16))
    number: Mapped[str | None] = mapped_column(String(40), unique=True)
    period_start: Mapped[datetime]
    period_end: Mapped[datetime]
    billing_tz: Mapped[str] = mapped_column(String(64))
    currency: Mapped[str] = mapped_column(String(3), server_default="USD")
    issuer: Mapped[Json]
    customer: Mapped[Json]
    exact_pico: Mapped[Pico]  # of all lines
    subtotal_cents: Mapped[BigInt]  # usage lines
    adjustments_cents: Mapped[BigInt]  # credits, debits, reversals
    tax_cents: Mapped[BigInt]
    total_cents: Mapped[BigInt]
    brought_forward_cents: Mapped[BigInt] = mapped_column(server_default=text("0"))
    carried_forward_cents: Mapped[BigInt] = mapped_column(server_default=text("0"))
    due_cents: Mapped[BigInt]
    corrects_id: Mapped[UUID | None] = mapped_column(ForeignKey("invoices.id"), unique=True)
    computed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    issued_at: Mapped[datetime | None]
    due_on: Mapped[date | None] = mapped_column(Date)
    voided_at: Mapped[datetime | None]
    void_reason: Mapped[str | None] = mapped_column(String(400))


class InvoiceLine(Base):
    """quantity x unit price = exact amount, rounded to cents once, half-even. Of hours the quantity is
    seconds, the unit price that of an hour, and the amount the sum of days, each rounded to the pico."""

    __tablename__ = "invoice_lines"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "invoice_id"],
            ["invoices.tenant_id", "invoices.id"],
            name="fk_invoice_lines_tenant_id_invoice_id_invoices",
        ),
        CheckConstraint("section in ('usage', 'earlier', 'adjustment')", name="section"),
        CheckConstraint(
            "price_class is not distinct from 'adapter_hour'"
            " or amount_pico = quantity * unit_price_pico",
            name="amount",
        ),
        Index(
            "ix_invoice_lines_entry",
            "entry_id",
            postgresql_where=text("entry_id is not null"),
        ),
    )

    invoice_id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    line_no: Mapped[int] = mapped_column(primary_key=True)
    section: Mapped[str] = mapped_column(String(16))  # earlier: usage that came late
    description: Mapped[str] = mapped_column(String(400))
    deployment_id: Mapped[UUID | None]
    model: Mapped[str | None] = mapped_column(String(128))
    adapter_version_id: Mapped[UUID | None]
    price_book_id: Mapped[UUID | None]
    price_class: Mapped[str | None] = mapped_column(String(16))
    quantity: Mapped[Pico]
    unit_price_pico: Mapped[Pico]
    amount_pico: Mapped[Pico]
    amount_cents: Mapped[BigInt]
    # The adjustment that the line stands for.
    entry_id: Mapped[UUID | None]
    entry_kind: Mapped[str | None] = mapped_column(String(16))
    entry_seq: Mapped[int | None] = mapped_column(SmallInteger)
