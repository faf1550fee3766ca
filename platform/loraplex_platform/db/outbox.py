"""What must be told to others once a transaction has committed."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Identity, Index, String, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class OutboxMessage(Base):
    """Written in the transaction of its cause; relayed at least once, so consumers dedupe by its key.

    Never read by "id > last seen": a slow transaction would become visible behind the cursor.
    """

    __tablename__ = "outbox"
    __table_args__ = (
        UniqueConstraint("topic", "dedupe_key"),
        Index(
            "ix_outbox_topic_next_at",
            "topic",
            "next_at",
            postgresql_where=text("done_at is null and dead_at is null"),
        ),
        Index("ix_outbox_done_at", "done_at", postgresql_where=text("done_at is not null")),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    topic: Mapped[str] = mapped_column(String(64))
    dedupe_key: Mapped[str] = mapped_column(String(200))
    payload: Mapped[Json]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    tries: Mapped[int] = mapped_column(server_default=text("0"))
    next_at: Mapped[datetime] = mapped_column(server_default=func.now())
    done_at: Mapped[datetime | None]
    dead_at: Mapped[datetime | None]  # given up after too many tries; kept for somebody to look
    error: Mapped[str | None]  # of the last try
