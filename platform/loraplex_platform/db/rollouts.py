"""What runs a revision and who stays on one: engine builds, aliases, pins, rollouts, adapters to keep resident."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    SmallInteger,
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class EngineBuild(Base):
    """What exactly computes: replicas with one fingerprint give the same bits. Written by the worker when it
    first sees a replica of it, and kept for the answers that name it.
    """

    __tablename__ = "engine_builds"
    __table_args__ = (UniqueConstraint("fingerprint"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(128))
    # The exact weights; null: a replica of a release that does not say.
    base_model_id: Mapped[UUID | None] = mapped_column(ForeignKey("base_models.id"))
    base_model: Mapped[str] = mapped_column(String(128))  # its public name
    facts: Mapped[Json]  # dtype, kv_format, device, isa, torch_version, backends
    first_seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_seen_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdapterAlias(Base):
    """A movable name of an adapter's version: `production`, `candidate`."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        # Of the same adapter.
        ForeignKeyConstraint(
            ["adapter_id", "version_id"],
            ["adapter_versions.adapter_id", "adapter_versions.id"],
            name="fk_adapter_aliases_own_version",
        ),
        UniqueConstraint("tenant_id", "adapter_id", "alias"),
    )

    adapter_id: Mapped[UUID] = mapped_column(primary_key=True)
    alias: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[UUID]
    version_id: Mapped[UUID]
    row_version: Mapped[int] = mapped_column(server_default=text("1"))
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdapterAliasEvent(Base):
    """Where an alias pointed from when on; null: it was deleted. Written by a trigger, never changed."""

    __tablename__ = "adapter_alias_events"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        Index("ix_adapter_alias_events_adapter_id_id", "adapter_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    alias: Mapped[str] = mapped_column(String(64))
    version_id: Mapped[UUID | None]
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class Pin(Base):
    """A tenant's word that one of its deployments stays at a revision, whatever is rolled out, until a time.

    Of the platform's deployment (the base model) each tenant may have its own pin.
    """

    __tablename__ = "pins"
    __table_args__ = (
        ForeignKeyConstraint(
            ["deployment_id", "revision_id"],
            ["deployment_revisions.deployment_id", "deployment_revisions.id"],
            name="fk_pins_own_revision",
        ),
        Index("ix_pins_until", "until", postgresql_where=text("expired_at is null")),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployments.id"), primary_key=True)
    revision_id: Mapped[UUID]
    until: Mapped[datetime | None]  # null: for good
    reason: Mapped[str] = mapped_column(String(500))
    created_by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    row_version: Mapped[int] = mapped_column(server_default=text("1"))
    warned_at: Mapped[datetime | None]  # told that it will expire soon
    expired_at: Mapped[datetime | None]  # told that it has


class PinEvent(Base):
    """What a tenant's pin said from when on; without a revision: it was taken away. Written by a trigger,
    never changed, so that a request whose arm is `pinned` can be explained after the pin is gone.
    """

    __tablename__ = "pin_events"
    __table_args__ = (
        Index("ix_pin_events_tenant_id_deployment_id_at", "tenant_id", "deployment_id", "at"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployments.id"))
    revision_id: Mapped[UUID | None]
    until: Mapped[datetime | None]
    reason: Mapped[str | None] = mapped_column(String(500))
    created_by: Mapped[str | None] = mapped_column(String(200))
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class Rollout(Base):
    """A canary revision on its way to answer all of a deployment's requests, step by step.

    States: draft -> evaluating -> shadow and canary steps -> promoted (-> rolled_back) | aborted. Every
    change of state raises `row_version`. What gateways need of the step is in the row itself:
    `weight_bp` of the subjects get the canary's answer, `shadow_bp` of the requests are asked again of it.
    """

    __tablename__ = "rollouts"
    __table_args__ = (
        CheckConstraint(
            "state in ('draft', 'evaluating', 'shadow', 'canary', 'promoted', 'aborted',"
            " 'rolled_back')",
            name="state",
        ),
        CheckConstraint("sticky_by in ('tenant', 'key', 'user', 'conversation')", name="sticky_by"),
        CheckConstraint(
            "weight_bp between 0 and 10000 and shadow_bp between 0 and 10000"
            " and score_bp between 0 and 10000",
            name="shares",
        ),
        CheckConstraint("weight_bp = 0 or state = 'canary'", name="weight_in_canary"),
        CheckConstraint("shadow_bp = 0 or state = 'shadow'", name="shadow_in_shadow"),
        CheckConstraint(
            "(state in ('promoted', 'aborted', 'rolled_back')) = (ended_at is not null)",
            name="ended_at",
        ),
        CheckConstraint("stable_revision_id <> canary_revision_id", name="two_revisions"),
        ForeignKeyConstraint(
            ["deployment_id", "stable_revision_id"],
            ["deployment_revisions.deployment_id", "deployment_revisions.id"],
            name="fk_rollouts_own_stable",
        ),
        ForeignKeyConstraint(
            ["deployment_id", "canary_revision_id"],
            ["deployment_revisions.deployment_id", "deployment_revisions.id"],
            name="fk_rollouts_own_canary",
        ),
        Index(
            "uq_rollouts_active",
            "deployment_id",
            unique=True,
            postgresql_where=text("state in ('evaluating', 'shadow', 'canary')"),
        ),
        Index("ix_rollouts_tenant_id_id", "tenant_id", "id"),
        Index("ix_rollouts_deployment_id_id", "deployment_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))  # null: of the base
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployments.id"))
    stable_revision_id: Mapped[UUID]
    canary_revision_id: Mapped[UUID]
    state: Mapped[str] = mapped_column(String(16), server_default="draft")
    is_paused: Mapped[bool] = mapped_column(server_default=text("false"))
    step: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))  # of `steps`, from 0
    step_began_at: Mapped[datetime | None]
    # [{"kind": "shadow", "share_bp": 1000, "hold_s": 600}, {"kind": "canary", "weight_bp": 500, ...}]
    steps: Mapped[list[Json]] = mapped_column(JSONB)
    sticky_by: Mapped[str] = mapped_column(String(16))
    salt: Mapped[bytes] = mapped_column(BYTEA)
    weight_bp: Mapped[int] = mapped_column(server_default=text("0"))
    shadow_bp: Mapped[int] = mapped_column(server_default=text("0"))
    # Share of both sides' answers whose likelihood under the stable revision is computed.
    score_bp: Mapped[int] = mapped_column(server_default=text("0"))
    gate: Mapped[Json]
    changes: Mapped[list[str]] = mapped_column(
        ARRAY(String(64))
    )  # what differs between the sides: "adapter", "engine_build", ...
    verdict: Mapped[Json | None]  # of the last look
    looked_at: Mapped[datetime | None]
    created_by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None] = mapped_column(String(1000))
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class RolloutEvent(Base):
    """What happened to a rollout, in order; never changed."""

    __tablename__ = "rollout_events"

    rollout_id: Mapped[UUID] = mapped_column(
        ForeignKey("rollouts.id", ondelete="CASCADE"), primary_key=True
    )
    seq: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None]
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    # created, started, step, hold, verdict, eval, paused, resumed, warning, promoted, aborted, rolled_back
    kind: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(200))
    message: Mapped[str] = mapped_column(String(1000))
    detail: Mapped[Json]


class ResidentAdapter(Base):
    """A version that every replica of its base is to keep in memory: durable desired state."""

    __tablename__ = "resident_adapters"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "version_id", "digest"],
            ["adapter_versions.tenant_id", "adapter_versions.id", "adapter_versions.digest"],
            name="fk_resident_adapters_own_version",
        ),
        Index("ix_resident_adapters_digest", "digest"),
    )

    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    version_id: Mapped[UUID] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(String(71))
    reason: Mapped[str] = mapped_column(String(500))
    created_by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
