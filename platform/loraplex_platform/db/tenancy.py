"""Tenants, their API keys, and the people who administer the platform."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, CIDR
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt


class Tenant(Base):
    """One customer: the boundary that weights, tokens, cache, limits and bills never cross."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("status in ('active', 'suspended', 'closed')", name="status"),
        CheckConstraint("slug ~ '^[a-z0-9][a-z0-9-]{0,62}$'", name="slug"),
        CheckConstraint("priority between -100 and 100", name="priority"),
        CheckConstraint("weight between 0.001 and 1000", name="weight"),
        CheckConstraint("memory_weight between 0.001 and 1000", name="memory_weight"),
        CheckConstraint("max_adapters >= 1", name="max_adapters"),
        CheckConstraint("erased_at is null or status = 'closed'", name="erased"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    slug: Mapped[str] = mapped_column(String(63), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    status: Mapped[str] = mapped_column(String(16), server_default="active")
    billing_tz: Mapped[str] = mapped_column(String(64), server_default="UTC")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Whether whole answers are kept, encrypted, for retries under an Idempotency-Key.
    replays_answers: Mapped[bool] = mapped_column(server_default=text("false"))
    limits_version: Mapped[BigInt] = mapped_column(server_default=text("1"))  # of all its limits
    # The engine's: a larger priority is served first, weights share what is left (policies/fair.py).
    priority: Mapped[int] = mapped_column(server_default=text("0"))
    weight: Mapped[float] = mapped_column(Double, server_default=text("1"))
    # Of its share of an engine's KV cache, null: its weight; and how many of its adapters may be in use
    # there at a time, null: as many as there is room for.
    memory_weight: Mapped[float | None] = mapped_column(Double)
    max_adapters: Mapped[int | None]
    row_version: Mapped[int] = mapped_column(server_default=text("1"))
    erased_at: Mapped[datetime | None]  # deleted: what was theirs is gone, see erasure/service.py


class Project(Base):
    """A part of a tenant, with keys, limits and bills of its own. Optional: a key may have none."""

    __tablename__ = "projects"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        Index(
            "uq_projects_tenant_id_name",
            "tenant_id",
            func.lower(text("name")),
            unique=True,
            postgresql_where=text("archived_at is null"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(80))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    archived_at: Mapped[datetime | None]
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class ApiKey(Base):
    """A data-plane key. Its id outlives every secret; the secrets' MACs are in api_key_secrets."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("status in ('active', 'disabled', 'revoked')", name="status"),
        CheckConstraint("(status = 'revoked') = (revoked_at is not null)", name="revoked"),
        CheckConstraint("cardinality(scopes) > 0", name="scopes"),
        # Lists walk these backwards, see control/paging.py.
        Index("uq_api_keys_tenant_id_id", "tenant_id", "id", unique=True),
        Index("ix_api_keys_tenant_id_project_id_id", "tenant_id", "project_id", "id"),
        Index(
            "ix_api_keys_tenant_id_id_active",
            "tenant_id",
            "id",
            postgresql_where=text("status = 'active'"),
        ),
        # Small: counted whole for the overview.
        Index(
            "ix_api_keys_expires_at_active",
            "expires_at",
            postgresql_where=text("status = 'active'"),
        ),
        # For a piece of the name, see migration 0021; by bytes (COLLATE "C", which alembic does not compare).
        Index(
            "ix_api_keys_pieces",
            text("loraplex_key_pieces(tenant_id, name, public_id)"),
            postgresql_using="gin",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_api_keys_own_project",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[UUID | None]
    owner_user_id: Mapped[UUID | None] = mapped_column(ForeignKey("users.id"))  # null: a service's
    name: Mapped[str] = mapped_column(String(80))
    public_id: Mapped[str] = mapped_column(String(16), unique=True)
    last4: Mapped[str] = mapped_column(String(4))
    scopes: Mapped[list[str]] = mapped_column(
        ARRAY(String(32)), server_default=text("'{inference,models.read}'")
    )
    # Networks that may use it; empty: any. Read as `ipaddress` networks, written as text.
    ip_allow: Mapped[list[Any]] = mapped_column(ARRAY(CIDR), server_default=text("'{}'"))
    status: Mapped[str] = mapped_column(String(16), server_default="active")
    # Raised by every change that a cached copy must not survive.
    version: Mapped[int] = mapped_column(server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    created_by: Mapped[str | None] = mapped_column(String(64))  # usr_..., admin_key or system
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    revoke_reason: Mapped[str | None] = mapped_column(String(200))
    last_used_at: Mapped[datetime | None]  # at most a minute old, never written on a request's path


class KeyModelGrant(Base):
    """One thing that a key may call. A key without any may call all that its tenant may."""

    __tablename__ = "key_model_grants"
    __table_args__ = (
        CheckConstraint("target_kind in ('base', 'adapter', 'deployment')", name="target_kind"),
        ForeignKeyConstraint(
            ["tenant_id", "key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name="fk_key_model_grants_own_key",
        ),
    )

    key_id: Mapped[UUID] = mapped_column(primary_key=True)
    target_kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    target_id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]


class ApiKeySecret(Base):
    """HMAC-SHA256(pepper, secret). More than one row only while a rotation's grace lasts."""

    __tablename__ = "api_key_secrets"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"), index=True)
    # Only the MAC is stored: a leaked dump must not be a set of working keys.
    mac: Mapped[bytes] = mapped_column(unique=True)
    pepper_version: Mapped[int] = mapped_column(server_default=text("1"))
    valid_from: Mapped[datetime] = mapped_column(server_default=func.now())
    valid_until: Mapped[datetime | None]


class User(Base):
    """Someone who may log in. What they may do: `platform_role` everywhere, memberships in tenants."""

    __tablename__ = "users"
    __table_args__ = (
        CheckConstraint("platform_role in ('admin', 'viewer')", name="platform_role"),
        CheckConstraint("email = lower(email)", name="email_lower"),
        CheckConstraint("(oidc_issuer is null) = (oidc_subject is null)", name="oidc"),
        UniqueConstraint("oidc_issuer", "oidc_subject"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(254), unique=True)
    password_hash: Mapped[str | None]  # argon2id, with its parameters; null: logs in by OIDC only
    platform_role: Mapped[str | None] = mapped_column(String(16))
    oidc_issuer: Mapped[str | None] = mapped_column(String(255))
    oidc_subject: Mapped[str | None] = mapped_column(String(255))
    # Since when the e-mail is known to be theirs: an operator or a login provider said so. Null: somebody
    # accepted an invitation of this e-mail with a password of their own.
    email_proven_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    disabled_at: Mapped[datetime | None]


class Membership(Base):
    """What a user may do in a tenant; control/permissions.py says what each role means."""

    __tablename__ = "memberships"
    __table_args__ = (
        CheckConstraint(
            "role in ('owner', 'admin', 'developer', 'billing', 'viewer')", name="role"
        ),
    )

    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id"), primary_key=True, index=True)
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


class Invitation(Base):
    """A membership that waits for whoever holds its token and proves to be the person of its e-mail."""

    __tablename__ = "invitations"
    __table_args__ = (
        CheckConstraint(
            "role in ('owner', 'admin', 'developer', 'billing', 'viewer')", name="role"
        ),
        CheckConstraint("email = lower(email)", name="email_lower"),
        CheckConstraint("accepted_at is null or revoked_at is null", name="ended_once"),
        Index("ix_invitations_tenant_id_id", "tenant_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    email: Mapped[str] = mapped_column(String(254))
    role: Mapped[str] = mapped_column(String(16))
    token_mac: Mapped[bytes] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    accepted_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Session(Base):
    """A console login. The cookie holds a random token; only its MAC is here."""

    __tablename__ = "sessions"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    user_id: Mapped[UUID] = mapped_column(ForeignKey("users.id"), index=True)
    token_mac: Mapped[bytes] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class LoginThrottle(Base):
    """Failed logins per subject (an e-mail or an address) in the current window."""

    __tablename__ = "login_throttle"

    subject: Mapped[str] = mapped_column(String(300), primary_key=True)
    window_start: Mapped[datetime]
    failures: Mapped[int]
