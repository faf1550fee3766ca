"""Who did what, in a chain that shows tampering; replies of idempotent POSTs; stored checks."""

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, Index, String, func, text
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json

NO_TENANT = UUID(int=0)  # the platform's own chain


class AuditLog(Base):
    """Append only: the runtime role may INSERT and SELECT. Never holds a secret.

    `at`, `chain`, `seq` and the hashes are the database's own: whatever is inserted there is replaced,
    and a row is linked to the newest one of its chain when its transaction commits.
    """

    __tablename__ = "audit_log"
    __table_args__ = (
        Index("ix_audit_log_tenant_id_id", "tenant_id", "id"),
        # By bytes (COLLATE "C", which alembic does not compare): one may ask for all that begin alike.
        Index("ix_audit_log_action_id", "action", "id"),
        Index("ix_audit_log_actor_id_id", "actor_id", "id"),
        Index("ix_audit_log_object_kind_id", "object_kind", "id"),
        Index("ix_audit_log_object_id_id", "object_id", "id"),
        Index("ix_audit_log_request_id_id", "request_id", "id"),
        Index("ix_audit_log_unlinked", "chain", postgresql_where=text("hash is null")),
        Index("uq_audit_log_chain_seq", "chain", "seq", unique=True),
    )

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
    before: Mapped[Json | None]  # the fields that changed, from allow-lists
    after: Mapped[Json | None]
    chain: Mapped[UUID]  # the tenant's, or NO_TENANT for the platform's
    seq: Mapped[int | None] = mapped_column(BigInteger)  # from 1 on, without gaps
    prev_hash: Mapped[bytes | None]
    hash: Mapped[bytes | None]


class AuditHead(Base):
    """The newest row of a chain, and the first that is kept: read only for the runtime role."""

    __tablename__ = "audit_heads"

    chain: Mapped[UUID] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[bytes]
    first_seq: Mapped[int] = mapped_column(BigInteger, server_default=text("1"))
    first_prev_hash: Mapped[bytes]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


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


class InvariantRun(Base):
    """One check of the books, kept: who ran it, when, over what, and what it found."""

    __tablename__ = "invariant_runs"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    checked_at: Mapped[datetime]
    checked_by: Mapped[str] = mapped_column(String(64))  # "worker", "reconcile", or a user
    since: Mapped[datetime | None]  # null: all of the books
    is_ok: Mapped[bool]
    took_ms: Mapped[int]
    report: Mapped[Json]


class RetentionSetting(Base):
    """How long something is kept where that is not the default; null: for ever."""

    __tablename__ = "retention_settings"
    __table_args__ = (
        CheckConstraint(
            "keep_days >= CASE name"
            " WHEN 'requests' THEN 62 WHEN 'audit_log' THEN 3650 WHEN 'invariant_runs' THEN 7"
            " WHEN 'webhook_deliveries' THEN 1 WHEN 'sessions' THEN 1 WHEN 'alerts' THEN 7 END",
            name="least",
        ),
        CheckConstraint(
            "name in ('requests', 'audit_log', 'invariant_runs', 'webhook_deliveries', 'sessions',"
            " 'alerts')",
            name="name",
        ),
    )

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    keep_days: Mapped[int | None]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class DroppedMonth(Base):
    """A month (its first day) whose requests, attempts and journal entries are gone."""

    __tablename__ = "dropped_months"

    month: Mapped[date] = mapped_column(primary_key=True)
    dropped_at: Mapped[datetime] = mapped_column(server_default=func.now())
    requests: Mapped[int] = mapped_column(BigInteger)
    attempts: Mapped[int] = mapped_column(BigInteger)
    engine_usage: Mapped[int] = mapped_column(BigInteger)
