"""Prices and the append-only ledger. Money is integers: pico-USD = tokens x micro-USD per 1M."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    SmallInteger,
    String,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt, Pico


class PriceBook(Base):
    """A set of prices with a time from which it holds. Published books never change."""

    __tablename__ = "price_books"
    __table_args__ = (
        CheckConstraint("status in ('draft', 'published', 'retired')", name="status"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(80))
    currency: Mapped[str] = mapped_column(String(3), server_default="USD")
    status: Mapped[str] = mapped_column(String(16))
    effective_from: Mapped[datetime]
    effective_to: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PriceItem(Base):
    """Micro-USD per 1M tokens of a class, for the base or for any adapter on it."""

    __tablename__ = "price_items"
    __table_args__ = (
        CheckConstraint("target_kind in ('base', 'adapter')", name="target_kind"),
        CheckConstraint("token_class in ('input', 'cached_input', 'output')", name="token_class"),
        CheckConstraint("micro_usd_per_mtok >= 0", name="not_negative"),
    )

    price_book_id: Mapped[UUID] = mapped_column(ForeignKey("price_books.id"), primary_key=True)
    target_kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    token_class: Mapped[str] = mapped_column(String(16), primary_key=True)
    micro_usd_per_mtok: Mapped[int] = mapped_column(BigInteger)


class LedgerEntry(Base):
    """One line of account. (entry_id, kind, seq) is the exactly-once guard: entry_id = request id.

    The runtime role may INSERT and SELECT only; corrections are new rows. `account` is `revenue`
    (the tenant pays) or `absorbed` (the platform does: faults, probes).
    """

    __tablename__ = "ledger"
    __table_args__ = (
        CheckConstraint("kind in ('usage', 'late', 'credit', 'debit', 'reversal')", name="kind"),
        CheckConstraint("account in ('revenue', 'absorbed', 'credit', 'adjust')", name="account"),
        Index("ix_ledger_tenant_id_entry_id", "tenant_id", "entry_id"),
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
    adapter_version_id: Mapped[UUID | None]
    price_book_id: Mapped[UUID]
    prompt_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    amount_pico: Mapped[Pico]
    occurred_at: Mapped[datetime] = mapped_column(server_default=func.now())
