"""Base models, adapters and their immutable versions, deployments and their immutable revisions."""

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
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, Json


class BaseModel(Base):
    """A base model that the fleet serves, and what identifies it exactly."""

    __tablename__ = "base_models"
    __table_args__ = (UniqueConstraint("name", "revision"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    revision: Mapped[str] = mapped_column(String(80))  # sha256 over the weights' digests
    tokenizer_sha256: Mapped[str] = mapped_column(String(64))
    chat_template_sha256: Mapped[str] = mapped_column(String(64))
    license: Mapped[str | None] = mapped_column(String(80))
    architecture: Mapped[Json]  # the shape fields of config.json
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Adapter(Base):
    """A named line of versions, owned by one tenant."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        UniqueConstraint("tenant_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(80))
    base_model_id: Mapped[UUID] = mapped_column(ForeignKey("base_models.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AdapterVersion(Base):
    """Immutable: its digest is its identity everywhere (weights, KV hash, routing, ledger)."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        ForeignKeyConstraint(["tenant_id", "adapter_id"], ["adapters.tenant_id", "adapters.id"]),
        UniqueConstraint("adapter_id", "version"),
        UniqueConstraint("adapter_id", "digest"),
        UniqueConstraint("adapter_id", "id"),
        UniqueConstraint(
            "tenant_id", "id", "digest", name="uq_adapter_versions_tenant_id_id_digest"
        ),
        CheckConstraint("status in ('ready', 'retired')", name="status"),
        CheckConstraint("digest ~ '^sha256:[0-9a-f]{64}$'", name="digest"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    adapter_id: Mapped[UUID]
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(71), index=True)
    status: Mapped[str] = mapped_column(String(16))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int]
    target_modules: Mapped[list[str]] = mapped_column(ARRAY(String(64)))
    report: Mapped[Json]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Deployment(Base):
    """A public model id. `tenant_id` null: the platform's own (the base), visible to every tenant."""

    __tablename__ = "deployments"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        ForeignKeyConstraint(
            ["id", "current_revision_id"],
            ["deployment_revisions.deployment_id", "deployment_revisions.id"],
            name="fk_deployments_own_revision",
            use_alter=True,
        ),
        ForeignKeyConstraint(
            ["tenant_id", "followed_adapter_id", "followed_alias"],
            [
                "adapter_aliases.tenant_id",
                "adapter_aliases.adapter_id",
                "adapter_aliases.alias",
            ],
            name="fk_deployments_own_alias",
        ),
        CheckConstraint(
            "(followed_adapter_id is null) = (followed_alias is null)"
            " and (followed_alias is null or tenant_id is not null)",
            name="followed_alias",
        ),
        Index(
            "ix_deployments_followed",
            "followed_adapter_id",
            "followed_alias",
            postgresql_where=text("followed_alias is not null"),
        ),
        Index(
            "uq_deployments_tenant_id_public_name",
            "tenant_id",
            "public_name",
            unique=True,
            postgresql_where=text("archived_at is null"),
        ),
        Index(
            "uq_deployments_platform_public_name",
            "public_name",
            unique=True,
            postgresql_where=text("tenant_id is null and archived_at is null"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    public_name: Mapped[str] = mapped_column(String(128))
    # What it was made for, which prices go by: never changed, for what is on the ledger must cost the same
    # tomorrow. The weights that answer are its revisions'.
    base_model_id: Mapped[UUID] = mapped_column(ForeignKey("base_models.id"))
    # Set in the transaction that inserts the first revision; the two tables name each other.
    current_revision_id: Mapped[UUID | None]
    # When this alias moves, the deployment gets a revision of the version that it moved to.
    followed_adapter_id: Mapped[UUID | None]
    followed_alias: Mapped[str | None] = mapped_column(String(64))
    row_version: Mapped[int] = mapped_column(server_default=text("1"))  # its ETag
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
    archived_at: Mapped[datetime | None]


class DeploymentRevision(Base):
    """Immutable: exactly what answers when this revision is chosen.

    Its deployment and its adapter are its own tenant's. A key with a null in it is not checked, so
    the platform's revisions, which have no tenant, may have no adapter either.
    """

    __tablename__ = "deployment_revisions"
    __table_args__ = (
        UniqueConstraint("deployment_id", "number"),
        UniqueConstraint("deployment_id", "id", name="uq_deployment_revisions_deployment_id_id"),
        ForeignKeyConstraint(
            ["tenant_id", "adapter_version_id", "adapter_digest"],
            ["adapter_versions.tenant_id", "adapter_versions.id", "adapter_versions.digest"],
            name="fk_deployment_revisions_own_adapter",
        ),
        ForeignKeyConstraint(
            ["tenant_id", "deployment_id"],
            ["deployments.tenant_id", "deployments.id"],
            name="fk_deployment_revisions_own_deployment",
        ),
        CheckConstraint(
            "adapter_version_id is null or tenant_id is not null", name="adapter_has_tenant"
        ),
        CheckConstraint(
            "(adapter_version_id is null) = (adapter_digest is null)", name="adapter_has_digest"
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    deployment_id: Mapped[UUID] = mapped_column(ForeignKey("deployments.id"))
    tenant_id: Mapped[UUID | None]
    number: Mapped[int]
    base_model_id: Mapped[UUID] = mapped_column(ForeignKey("base_models.id"))
    adapter_version_id: Mapped[UUID | None]
    adapter_digest: Mapped[str | None] = mapped_column(String(71))
    # Null: any replica of the base. Otherwise only those with this fingerprint.
    engine_build_id: Mapped[UUID | None] = mapped_column(ForeignKey("engine_builds.id"))
    # Null: the book in force when a request comes.
    price_book_id: Mapped[UUID | None] = mapped_column(ForeignKey("price_books.id"))
    # {"system_prompt": str, "sampling": {"temperature": ...}}: for what a request leaves open.
    params: Mapped[Json]
    sha256: Mapped[str] = mapped_column(String(64))  # of the canonical JSON of the above
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class DeploymentEvent(Base):
    """From when on a tenant's deployment points at which version; null: at the base, or it is archived.

    Written by a trigger of `deployments` alone, and never changed: adapter-hours are counted from it.
    """

    __tablename__ = "deployment_events"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "deployment_id"],
            ["deployments.tenant_id", "deployments.id"],
            name="fk_deployment_events_tenant_id_deployment_id_deployments",
        ),
        Index("ix_deployment_events_tenant_id_at", "tenant_id", "at"),
        Index("ix_deployment_events_deployment_id_at", "deployment_id", "at"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant_id: Mapped[UUID]
    deployment_id: Mapped[UUID]
    at: Mapped[datetime]
    adapter_version_id: Mapped[UUID | None]
