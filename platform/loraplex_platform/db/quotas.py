"""Limits, what has been used of them, the alerts that fired and the requests that were refused."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    SmallInteger,
    String,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt, Pico

# `scope_id` of the platform's own scope: a null would be no part of a unique key.
NO_SCOPE_ID = UUID(int=0)


class Limit(Base):
    """A rate (enforced in Redis) or a quota (enforced by `loraplex_reserve`, in Postgres).

    `value` is in the metric's unit: requests, tokens, or pico-USD of `cost`. `window_s` is the length
    of a rolling period, else 0. `tenant_id` is whose requests it counts: null is everybody's.
    """

    __tablename__ = "limits"
    __table_args__ = (
        CheckConstraint(
            "scope_kind in ('platform', 'tenant', 'project', 'key', 'adapter', 'deployment')",
            name="scope_kind",
        ),
        CheckConstraint("value >= 0", name="value"),
        CheckConstraint("burst >= 1", name="burst"),
        CheckConstraint("fail_mode in ('open', 'closed', 'local')", name="fail_mode"),
        CheckConstraint("valid_from < valid_to", name="valid"),
        CheckConstraint(
            "not is_opening or (not is_hard and alert_pct = '{}' and valid_from is null)",
            name="opening",
        ),
        Index(
            "uq_limits_what",
            "scope_kind",
            "scope_id",
            "metric",
            "period",
            "window_s",
            "is_hard",
            text("coalesce(valid_from, '-infinity'::timestamptz)"),
            unique=True,
        ),
        Index("ix_limits_scope_id", "scope_id"),
        Index("ix_limits_tenant_id", "tenant_id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    scope_kind: Mapped[str] = mapped_column(String(16))
    scope_id: Mapped[UUID]
    metric: Mapped[str] = mapped_column(String(16))
    period: Mapped[str] = mapped_column(String(8))
    window_s: Mapped[int] = mapped_column(server_default=text("0"))
    value: Mapped[Pico]
    burst: Mapped[BigInt | None]
    is_hard: Mapped[bool] = mapped_column(server_default=text("true"))
    # Stands for a quota whose windows are being counted (quotas/opening.py); shown to nobody.
    is_opening: Mapped[bool] = mapped_column(server_default=text("false"))
    fail_mode: Mapped[str] = mapped_column(String(8), server_default="local")
    alert_pct: Mapped[list[int]] = mapped_column(ARRAY(SmallInteger), server_default="{}")
    valid_from: Mapped[datetime | None]
    valid_to: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # When it was set or changed, and what was used of it then, which may be more than its value.
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    used_then: Mapped[Pico] = mapped_column(server_default=text("0"))
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class SharedLimitsVersion(Base):
    """The one row that counts changes of the limits that tenants share, as `tenants.limits_version` does
    of a tenant's own. None: there was no change, and it is 1."""

    __tablename__ = "shared_limits_version"
    __table_args__ = (CheckConstraint("is_only", name="is_only"),)

    is_only: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    version: Mapped[BigInt] = mapped_column(server_default=text("1"))


class QuotaWindow(Base):
    """What has been used (`committed`) and is held by requests in flight, in one period of one scope.

    Belongs to the scope, not to a limit: a limit that is changed, or removed and set again, finds what
    has been used. A rolling period is a row per 24th of it.
    """

    __tablename__ = "quota_windows"
    __table_args__ = (
        UniqueConstraint(
            "scope_kind",
            "scope_id",
            "metric",
            "period",
            "window_s",
            "period_start",
            name="uq_quota_windows_what",
        ),
        CheckConstraint("committed >= 0 and held >= 0", name="not_negative"),
        Index("ix_quota_windows_tenant_id", "tenant_id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID | None]
    scope_kind: Mapped[str] = mapped_column(String(16))
    scope_id: Mapped[UUID]
    metric: Mapped[str] = mapped_column(String(16))
    period: Mapped[str] = mapped_column(String(8))
    window_s: Mapped[int] = mapped_column(server_default=text("0"))
    period_start: Mapped[datetime]
    period_end: Mapped[datetime | None]  # null: it never ends
    committed: Mapped[Pico] = mapped_column(server_default=text("0"))
    held: Mapped[Pico] = mapped_column(server_default=text("0"))


class AlertFired(Base):
    """A threshold that was passed: its alert has been sent, once."""

    __tablename__ = "alerts_fired"

    limit_id: Mapped[UUID] = mapped_column(primary_key=True)
    period_start: Mapped[datetime] = mapped_column(primary_key=True)
    pct: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    fired_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Refusal(Base):
    """Requests of one key that one limit refused within a second, the first few of them by id."""

    __tablename__ = "refusals"
    __table_args__ = (
        Index("ix_refusals_at", "at"),
        Index("ix_refusals_tenant_id_at", "tenant_id", "at"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    tenant_id: Mapped[UUID]
    key_id: Mapped[UUID | None]
    code: Mapped[str] = mapped_column(String(64))
    limit_id: Mapped[UUID | None]
    reason: Mapped[str]  # the error's message, as the client got it
    count: Mapped[int]
    request_ids: Mapped[list[UUID]] = mapped_column(ARRAY(Uuid(as_uuid=True)))
