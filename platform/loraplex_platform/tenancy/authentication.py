"""From the text of a data-plane key to the tenant it speaks for.

Unknown, revoked, expired, suspended and "the database is down" are five different answers: the last
is a 503 and never looks like a refusal. Nothing is cached here; `metering.reserve` looks again in the
transaction that admits the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy import func, or_, select

from loraplex_platform.db import ApiKey, ApiKeySecret, Tenant
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import (
    ExpiredKeyError,
    InvalidApiKeyError,
    RevokedKeyError,
    TenantSuspendedError,
)
from loraplex_platform.tenancy import keys


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Whom a request is for."""

    key_id: UUID
    key_version: int
    public_id: str
    tenant_id: UUID
    tenant_slug: str


async def authenticate(sessions: SessionFactory, pepper: SecretStr, secret: str) -> Authenticated:
    """The key's holder.

    Raises:
        InvalidApiKeyError: malformed, an admin key, or unknown.
        RevokedKeyError, ExpiredKeyError: known, but over.
        TenantSuspendedError: the key is good, its tenant is not active.
        DatabaseUnavailableError: we cannot tell.
    """
    public_id = _public_id(secret)
    statement = (
        select(ApiKey, Tenant, ApiKeySecret.mac, func.now())
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .join(ApiKeySecret, ApiKeySecret.key_id == ApiKey.id)
        .where(
            ApiKey.public_id == public_id,
            or_(ApiKeySecret.valid_until.is_(None), ApiKeySecret.valid_until > func.now()),
        )
    )
    async with sessions() as session:
        rows = (await session.execute(statement)).all()
    # The public id only finds the row; this comparison, in constant time, decides.
    row = next((row for row in rows if keys.is_valid(pepper, secret, row[2])), None)
    if row is None:
        raise InvalidApiKeyError("Unknown API key.")
    key, tenant, _, now = row
    check_live(key.status, key.revoked_at, key.expires_at, tenant.status, now)
    return Authenticated(
        key_id=key.id,
        key_version=key.version,
        public_id=key.public_id,
        tenant_id=tenant.id,
        tenant_slug=tenant.slug,
    )


def check_live(
    key_status: str,
    revoked_at: datetime | None,
    expires_at: datetime | None,
    tenant_status: str,
    now: datetime,
) -> None:
    """Raise what a known key in this state deserves, see `authenticate`."""
    if key_status != "active" or revoked_at is not None:
        raise RevokedKeyError("This API key has been revoked.")
    if expires_at is not None and expires_at <= now:
        raise ExpiredKeyError("This API key has expired.")
    check_tenant(tenant_status)


def check_tenant(tenant_status: str) -> None:
    """Raise TenantSuspendedError unless the tenant is active."""
    if tenant_status != "active":
        raise TenantSuspendedError(
            "This tenant is not active. Ask the operator of this service to reactivate it."
        )


def _public_id(secret: str) -> str:
    try:
        parsed = keys.parse(secret)
    except keys.MalformedKeyError as error:
        raise InvalidApiKeyError(
            f"Malformed API key ({error}). A key is the whole text that was shown when it was made."
        ) from None
    if parsed.kind != "sk":
        raise InvalidApiKeyError(
            "This is an admin key, for the control API. Use a tenant's key (lpx_sk_...)."
        )
    return parsed.public_id
