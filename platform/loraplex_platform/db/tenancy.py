"""Tenants, their API keys, and the people who administer the platform."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base


class Tenant(Base):
    """One customer: the boundary that weights, tokens, cache, limits and bills never cross."""

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("status in ('active', 'suspended', 'closed')", name="status"),
        CheckConstraint("slug ~ '^[a-z0-9][a-z0-9-]{0,62}$'", name="slug"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    slug: Mapped[str] = mapped_column(String(63), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    status: Mapped[str] = mapped_column(String(16), server_default="active")
    billing_tz: Mapped[str] = mapped_column(String(64), server_default="UTC")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    row_version: Mapped[int] = mapped_column(server_default=text("1"))


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
        CheckConstraint("status in ('active', 'revoked')", name="status"),
        CheckConstraint("(status = 'revoked') = (revoked_at is not null)", name="revoked"),
        Index("uq_api_keys_tenant_id_id", "tenant_id", "id", unique=True),
        Index("ix_api_keys_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name="fk_api_keys_own_project",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[UUID | None]
    name: Mapped[str] = mapped_column(String(80))
    public_id: Mapped[str] = mapped_column(String(16), unique=True)
    last4: Mapped[str] = mapped_column(String(4))
    status: Mapped[str] = mapped_column(String(16), server_default="active")
    version: Mapped[int] = mapped_column(server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


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
    """Someone who may log in to the console. Tenant memberships come with a later migration."""

    __tablename__ = "users"
    __table_args__ = (
        CheckConstraint("platform_role in ('admin', 'viewer')", name="platform_role"),
        CheckConstraint("email = lower(email)", name="email_lower"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(254), unique=True)
    password_hash: Mapped[str]  # argon2id, with its parameters
    platform_role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    disabled_at: Mapped[datetime | None]


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
