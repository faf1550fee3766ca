"""Replicas and gateways as last seen, and the engines' own account of what they generated."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import String, func
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt, Json


class Replica(Base):
    """Mirror of a replica's Redis record, written by the worker; the routing fallback."""

    __tablename__ = "replicas"

    replica_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    record: Mapped[Json]  # loraplex_engine.protocol.ReplicaRecord
    first_seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Gateway(Base):
    """A gateway process as last seen by its own heartbeat."""

    __tablename__ = "gateways"

    gateway_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    started_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class EngineUsage(Base):
    """An entry of an engine's journal, landed by the worker: the other side of the identity.

    It never passes through a gateway, so a gateway that miscounts is found out.
    """

    __tablename__ = "engine_usage"
    __table_args__ = ({"postgresql_partition_by": "RANGE (request_id)"},)

    request_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    replica_id: Mapped[str] = mapped_column(String(64))
    tenant_id: Mapped[UUID]
    adapter_digest: Mapped[str | None] = mapped_column(String(71))
    finish_reason: Mapped[str] = mapped_column(String(16))
    prompt_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]
    completion_tokens: Mapped[BigInt]
    ended_at: Mapped[datetime]
    landed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class JournalCursor(Base):
    """How far a replica's journal has been read."""

    __tablename__ = "journal_cursors"

    replica_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    journal_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    last_seq: Mapped[BigInt]
