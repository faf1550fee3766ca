"""Alerts as they were told, kept by the database itself when they leave through the outbox."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import Index, String, func
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class Alert(Base):
    """One alert. Written by a trigger on `outbox` (migration 0018), so that none is forgotten.

    `tenant_id` null: it concerns the platform itself. `payload` is what webhooks are told.
    """

    __tablename__ = "alerts"
    __table_args__ = (Index("ix_alerts_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)  # UUIDv7 of the database's clock
    tenant_id: Mapped[UUID | None]
    kind: Mapped[str] = mapped_column(String(64))
    payload: Mapped[Json]
    at: Mapped[datetime] = mapped_column(server_default=func.now())
