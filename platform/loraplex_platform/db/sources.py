"""Adapters on their way in: uploads that may be cut and resumed, and imports that run by themselves."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, func, text
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class AdapterUpload(Base):
    """One resumable upload. Its bytes lie in the quarantine folder, whose file sizes are the offsets."""

    __tablename__ = "adapter_uploads"
    __table_args__ = (
        CheckConstraint("state in ('open', 'completed', 'refused')", name="state"),
        CheckConstraint("(state = 'completed') = (version_id is not null)", name="completed"),
        CheckConstraint("(state = 'refused') = (error is not null)", name="refused"),
        Index("ix_adapter_uploads_tenant_id_id", "tenant_id", "id"),
        Index("ix_adapter_uploads_expires_at", "expires_at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(80))  # of the adapter
    is_probed: Mapped[bool]
    tokenizer_sha256: Mapped[str | None] = mapped_column(String(64))
    chat_template_sha256: Mapped[str | None] = mapped_column(String(64))
    files: Mapped[Json]  # name -> {"size_bytes", "sha256" or null}
    state: Mapped[str] = mapped_column(String(16), server_default="open")
    version_id: Mapped[UUID | None] = mapped_column(ForeignKey("adapter_versions.id"))
    error: Mapped[Json | None]  # {"message", "param", "code"}, as the caller was told
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]  # it goes then: unless it is ended, with its bytes


class AdapterImport(Base):
    """One import: a job that whichever control process is free runs, under a lease."""

    __tablename__ = "adapter_imports"
    __table_args__ = (
        CheckConstraint("state in ('queued', 'running', 'succeeded', 'failed')", name="state"),
        CheckConstraint("(state = 'succeeded') = (version_id is not null)", name="succeeded"),
        CheckConstraint("(state = 'running') = (lease_token is not null)", name="running"),
        CheckConstraint("(state = 'running') = (lease_until is not null)", name="leased"),
        Index("ix_adapter_imports_tenant_id_id", "tenant_id", "id"),
        Index(
            "ix_adapter_imports_next_at",
            "next_at",
            postgresql_where=text("state in ('queued', 'running')"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(80))  # of the adapter
    source: Mapped[str] = mapped_column(String(1000))
    resolved: Mapped[str | None] = mapped_column(String(1000))  # the source pinned, if it can be
    is_probed: Mapped[bool]
    state: Mapped[str] = mapped_column(String(16), server_default="queued")
    received_bytes: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    total_bytes: Mapped[int | None] = mapped_column(BigInteger)
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    next_at: Mapped[datetime] = mapped_column(server_default=func.now())
    lease_token: Mapped[UUID | None]
    lease_until: Mapped[datetime | None]
    version_id: Mapped[UUID | None] = mapped_column(ForeignKey("adapter_versions.id"))
    error: Mapped[Json | None]  # of the last attempt, as an answer would tell it
    actor_kind: Mapped[str] = mapped_column(String(16))  # who asked: the audit log names them
    actor_id: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None]
