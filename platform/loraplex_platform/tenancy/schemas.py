"""Tenants and API keys on the wire."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StrictInt

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import ApiKey, Tenant
from loraplex_platform.ids import format_id

SLUG_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
_MAX_UNIX_S = 253_402_300_799  # the end of the year 9999, as far as Postgres and datetime agree


def _in_future(unix_s: int) -> int:
    if not time.time() < unix_s <= _MAX_UNIX_S:
        raise ValueError("it must be a Unix time in seconds, in the future.")
    return unix_s


class NewTenant(Body):
    """A customer. The slug is its short name, and stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"slug": "acme", "name": "Acme Corp."}]}
    )

    slug: str = Field(
        pattern=SLUG_PATTERN, description="Lower-case letters, digits and '-', at most 63."
    )
    name: CleanText | None = Field(
        default=None, min_length=1, max_length=200, description="The slug if not given."
    )


class NewKey(Body):
    """A data-plane key to make."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "production"}]}
    )

    name: CleanText = Field(min_length=1, max_length=80)
    expires_at: Annotated[StrictInt, AfterValidator(_in_future)] | None = Field(
        default=None, description="Unix seconds; never if not given."
    )

    @property
    def expires_at_time(self) -> datetime | None:
        """`expires_at` as a time."""
        return None if self.expires_at is None else datetime.fromtimestamp(self.expires_at, UTC)


class TenantResource(Resource):
    """A tenant."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "object": "tenant",
                    "id": "ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "slug": "acme",
                    "name": "Acme Corp.",
                    "status": "active",
                    "created_at": 1764400000,
                }
            ]
        }
    )

    object: Literal["tenant"] = "tenant"
    id: str
    slug: str
    name: str
    status: Literal["active", "suspended", "closed"]
    created_at: UnixSeconds


KeyStatus = Literal["active", "revoked", "expired"]


class KeyResource(Resource):
    """An API key, without its secret: that is not stored anywhere."""

    object: Literal["api_key"] = "api_key"
    id: str
    tenant_id: str
    name: str
    public_id: str
    redacted: str = Field(examples=["lpx_sk_…9aZ3"])
    status: KeyStatus
    created_at: UnixSeconds
    expires_at: UnixSeconds | None
    revoked_at: UnixSeconds | None
    last_used_at: UnixSeconds | None


class KeyWithSecret(KeyResource):
    """The answer to the creation of a key: the one time its secret is shown."""

    secret: str | None = Field(
        description="The whole key. It is shown this once; a replay under the same "
        "Idempotency-Key has null here."
    )


def show_tenant(tenant: Tenant) -> TenantResource:
    """The tenant as the API shows it."""
    return TenantResource(
        id=format_id("tenant", tenant.id),
        slug=tenant.slug,
        name=tenant.name,
        status=tenant.status,  # type: ignore[arg-type]  # checked by the table
        created_at=tenant.created_at,
    )


def show_key(key: ApiKey) -> KeyResource:
    """The key as the API shows it."""
    status: KeyStatus = "revoked" if key.revoked_at is not None else "active"
    if status == "active" and key.expires_at is not None and key.expires_at <= datetime.now(UTC):
        status = "expired"
    return KeyResource(
        id=format_id("api_key", key.id),
        tenant_id=format_id("tenant", key.tenant_id),
        name=key.name,
        public_id=key.public_id,
        redacted=f"lpx_sk_…{key.last4}",
        status=status,
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=key.last_used_at,
    )
