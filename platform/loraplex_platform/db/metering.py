"""Requests, reserved before work and settled after it, and what each attempt at one produced."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    REAL,
    BigInteger,
    CheckConstraint,
    Index,
    SmallInteger,
    String,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt, Json, Pico


class Request(Base):
    """One request of a tenant (or a probe of the platform's own).

    States: reserved -> settled | voided. `lease_token` fences: whoever holds the current value may
    settle, and the sweeper takes over by raising it. Partitioned by id (UUIDv7, so by time); ids of
    other tables are kept without foreign keys because a partition may outlive or precede them.
    """

    __tablename__ = "requests"
    __table_args__ = (
        CheckConstraint("state in ('reserved', 'settled', 'voided')", name="state"),
        CheckConstraint("kind in ('user', 'probe', 'shadow')", name="kind"),
        CheckConstraint("(state = 'reserved') = (settled_at is null)", name="settled_at"),
        Index("ix_requests_tenant_id_id", "tenant_id", "id"),
        CheckConstraint("arm in ('stable', 'canary', 'shadow', 'pinned', 'named')", name="arm"),
        Index("ix_requests_key_id_id", "key_id", "id"),
        Index(
            "ix_requests_rollout_id",
            "rollout_id",
            "rollout_step",
            "arm",
            "subject_key",
            postgresql_where=text("rollout_id is not null"),
        ),
        Index(
            "ix_requests_lease_until", "lease_until", postgresql_where=text("state = 'reserved'")
        ),
        {"postgresql_partition_by": "RANGE (id)"},
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    project_id: Mapped[UUID | None]
    key_id: Mapped[UUID | None]  # null: a probe, or a rollout's shadow
    deployment_id: Mapped[UUID | None]
    revision_id: Mapped[UUID | None]
    adapter_id: Mapped[UUID | None]
    adapter_version_id: Mapped[UUID | None]
    price_book_id: Mapped[UUID]
    kind: Mapped[str] = mapped_column(String(16), server_default="user")
    state: Mapped[str] = mapped_column(String(16), server_default="reserved")
    endpoint: Mapped[str] = mapped_column(String(32))  # chat.completions | completions | probe
    model: Mapped[str] = mapped_column(String(128))  # the public name asked for
    is_stream: Mapped[bool]
    # With stop strings only the gateway knows where billing ends: the sweeper must not guess high.
    has_stop_strings: Mapped[bool] = mapped_column(server_default=text("false"))
    owner: Mapped[str] = mapped_column(String(64))  # gateway id
    replica_id: Mapped[str | None] = mapped_column(String(64))
    attempt: Mapped[int] = mapped_column(server_default=text("1"))
    lease_token: Mapped[BigInt] = mapped_column(server_default=text("1"))
    lease_until: Mapped[datetime]
    admitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    settled_at: Mapped[datetime | None]
    est_prompt_tokens: Mapped[BigInt]
    est_completion_tokens: Mapped[BigInt]  # effective max_tokens, of all choices
    est_pico: Mapped[Pico]
    # The quota windows in which the three estimates are held until the request is closed.
    windows: Mapped[list[int]] = mapped_column(ARRAY(BigInteger), server_default="{}")
    asked_completion_tokens: Mapped[BigInt | None]  # before a quota cut them
    clamped_by: Mapped[UUID | None]  # the limit that did
    checkpoint_tokens: Mapped[BigInt] = mapped_column(server_default=text("0"))
    prompt_tokens: Mapped[BigInt | None]
    cached_tokens: Mapped[BigInt | None]
    completion_tokens: Mapped[BigInt | None]  # billed
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    http_status: Mapped[int | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    ttft_ms: Mapped[int | None]
    e2e_ms: Mapped[int | None]
    settled_by: Mapped[str | None] = mapped_column(String(64))  # gateway id or "sweeper"
    # Which side of a rollout answered, in which of its steps; `pinned`: neither, for the tenant has a pin.
    rollout_id: Mapped[UUID | None]
    rollout_step: Mapped[int | None] = mapped_column(SmallInteger)
    arm: Mapped[str | None] = mapped_column(String(8))
    subject_key: Mapped[int | None] = mapped_column(BigInteger)  # of `rollouts.assignment`
    shadow_of: Mapped[
        UUID | None
    ]  # the tenant's own request that a shadow or a scoring is made after
    sampling: Mapped[Json | None]  # as resolved: numbers only, never text
    fingerprint: Mapped[str | None] = mapped_column(String(128))  # of the replica that answered
    # Between two tokens of the first choice: mean and 95th percentile.
    itl_mean_ms: Mapped[float | None] = mapped_column(REAL)
    itl_p95_ms: Mapped[float | None] = mapped_column(REAL)
    # Mean log-probability of the answer under the rollout's stable revision; null: not sampled.
    stable_logprob: Mapped[float | None] = mapped_column(REAL)


class Attempt(Base):
    """What one attempt generated, and where each of those tokens went: the identity, row by row."""

    __tablename__ = "attempts"
    __table_args__ = (
        CheckConstraint("outcome in ('completed', 'aborted', 'fault', 'lost')", name="outcome"),
        CheckConstraint("source in ('terminal', 'journal', 'observed')", name="source"),
        CheckConstraint(
            "generated = billed + absorbed + discarded_past_stop + discarded_past_abort",
            name="identity",
        ),
        CheckConstraint(
            "least(generated, billed, absorbed, discarded_past_stop, discarded_past_abort) >= 0",
            name="not_negative",
        ),
        CheckConstraint("cached_tokens between 0 and prompt_tokens", name="cached_tokens"),
        Index(
            "ix_attempts_absorbed",
            "request_id",
            postgresql_include=["tenant_id", "absorbed"],
            postgresql_where=text("absorbed > 0"),
        ),
        {"postgresql_partition_by": "RANGE (request_id)"},
    )

    request_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    replica_id: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(16))
    # terminal: the engine's last event; journal: read by the sweeper; observed: the engine died and
    # the gateway counted what had reached it.
    source: Mapped[str] = mapped_column(String(16))
    prompt_tokens: Mapped[BigInt]
    cached_tokens: Mapped[BigInt]  # of the prompt
    generated: Mapped[BigInt]
    billed: Mapped[BigInt]
    absorbed: Mapped[BigInt]
    discarded_past_stop: Mapped[BigInt]
    discarded_past_abort: Mapped[BigInt]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())
