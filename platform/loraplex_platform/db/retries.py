"""Which request an Idempotency-Key of the data plane stands for."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import ForeignKeyConstraint, String, func
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base


class IdempotentRequest(Base):
    """The first request with a key, for a day.

    Whether that request runs, was billed, or cost nothing is asked of `requests` and `ledger`, where
    the sweeper sees to it that every request ends: a claim needs no lease of its own.
    """

    __tablename__ = "idempotent_requests"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name="fk_idempotent_requests_own_key",
        ),
    )

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    key_id: Mapped[UUID] = mapped_column(primary_key=True)  # the API key
    endpoint: Mapped[str] = mapped_column(String(32), primary_key=True)
    key_hash: Mapped[bytes] = mapped_column(primary_key=True)  # of the Idempotency-Key
    fingerprint: Mapped[bytes]  # of the body
    request_id: Mapped[UUID]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime] = mapped_column(index=True)
    # Encrypted, and only where the tenant has asked for it (`tenants.replays_answers`).
    sealed_answer: Mapped[bytes | None]
