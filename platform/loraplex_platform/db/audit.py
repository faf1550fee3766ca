"""Who did what, and the replies of idempotent POSTs."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import Index, String, func
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class AuditLog(Base):
    """Append only: the runtime role may INSERT and SELECT. Never holds a secret."""

    __tablename__ = "audit_log"
    __table_args__ = (Index("ix_audit_log_tenant_id_id", "tenant_id", "id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor_kind: Mapped[str] = mapped_column(String(16))  # admin_key | user | system
    actor_id: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(64))
    object_kind: Mapped[str] = mapped_column(String(32))
    object_id: Mapped[str | None] = mapped_column(String(64))
    tenant_id: Mapped[UUID | None]
    detail: Mapped[Json]


class IdempotencyRecord(Base):
    """The stored reply of an admin POST under its Idempotency-Key, kept for a day."""

    __tablename__ = "idempotency"

    principal: Mapped[str] = mapped_column(String(80), primary_key=True)
    route: Mapped[str] = mapped_column(String(160), primary_key=True)
    key_hash: Mapped[bytes] = mapped_column(primary_key=True)
    fingerprint: Mapped[bytes]
    claim_token: Mapped[UUID]  # of the call that runs, or ran: only that one finishes or drops it
    status: Mapped[int | None]  # null: still running
    response: Mapped[Json | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
