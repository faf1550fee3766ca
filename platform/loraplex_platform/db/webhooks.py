"""Addresses that are told of alerts and invoices, and every telling of them."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, String, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class Webhook(Base):
    """An address of a tenant's; `tenant_id` null: the platform's, which is told of all tenants.

    The signing secret lies here encrypted (AES-256-GCM) under the key that `secret_key_id` names.
    """

    __tablename__ = "webhooks"
    __table_args__ = (
        CheckConstraint("status in ('enabled', 'disabled', 'failed')", name="status"),
        CheckConstraint(
            "(old_secret_box is null) = (old_secret_key_id is null)"
            " and (old_secret_box is null) = (old_secret_until is null)",
            name="old_secret",
        ),
        Index("ix_webhooks_tenant_id_id", "tenant_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    url: Mapped[str] = mapped_column(String(2000))
    description: Mapped[str] = mapped_column(String(200), server_default="")
    topics: Mapped[list[str]] = mapped_column(ARRAY(String(64)))
    status: Mapped[str] = mapped_column(String(16), server_default="enabled")
    secret_box: Mapped[bytes]
    secret_key_id: Mapped[str] = mapped_column(String(16))
    old_secret_box: Mapped[bytes | None]  # signs too until then
    old_secret_key_id: Mapped[str | None] = mapped_column(String(16))
    old_secret_until: Mapped[datetime | None]
    failing_since: Mapped[datetime | None]  # null: the last try was a success, or there was none
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    disabled_at: Mapped[datetime | None]
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class WebhookDelivery(Base):
    """One event for one address, tried until it is delivered or given up."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("webhook_id", "topic", "dedupe_key"),
        CheckConstraint("status in ('pending', 'delivered', 'failed')", name="status"),
        CheckConstraint("(status = 'delivered') = (delivered_at is not null)", name="delivered"),
        Index("ix_webhook_deliveries_webhook_id_id", "webhook_id", "id"),
        Index(
            "ix_webhook_deliveries_next_at",
            "next_at",
            postgresql_where=text("status = 'pending'"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    webhook_id: Mapped[UUID] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    tenant_id: Mapped[UUID | None]  # whom the event is about
    topic: Mapped[str] = mapped_column(String(64))
    dedupe_key: Mapped[str] = mapped_column(String(200))
    payload: Mapped[Json]
    occurred_at: Mapped[datetime]
    status: Mapped[str] = mapped_column(String(16), server_default="pending")
    tries: Mapped[int] = mapped_column(server_default=text("0"))
    next_at: Mapped[datetime] = mapped_column(server_default=func.now())
    give_up_at: Mapped[datetime]
    lease_token: Mapped[UUID | None]  # of the worker that tries it just now
    last_tried_at: Mapped[datetime | None]
    last_status: Mapped[int | None]  # HTTP
    last_error: Mapped[str | None] = mapped_column(String(300))
    delivered_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
