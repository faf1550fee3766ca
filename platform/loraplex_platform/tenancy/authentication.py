"""From the text of a data-plane key to the tenant it speaks for.

Unknown, revoked, disabled, expired, suspended and "the database is down" are different answers: the
last is a 503 and never looks like a refusal, and the others beyond "unknown" are given only to who
holds the secret. Nothing is cached here; `metering.reserve` looks again in the transaction that admits
the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy import Text, bindparam, cast, func, select
from sqlalchemy.dialects.postgresql.psycopg import dialect as psycopg_dialect

from loraplex_platform.db import ApiKey, ApiKeySecret, KeyModelGrant, Tenant
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import (
    DisabledKeyError,
    ExpiredKeyError,
    InsufficientScopeError,
    InvalidApiKeyError,
    IpNotAllowedError,
    RevokedKeyError,
    TenantSuspendedError,
)
from loraplex_platform.tenancy import keys
from loraplex_platform.tenancy.access import (
    Grants,
    KeyScope,
    Network,
    is_address_allowed,
    parse_grants,
)

# A key that is rotated often keeps the MACs of its old secrets; the newest are asked first.
_MAX_SECRETS = 8


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Whom a request is for, and what its key may do.

    Attributes:
        key_version: raised by every change of the key; of two of these the higher one is newer.
        tenant_version: the same of its tenant, whose status may have changed.
        tenant_version: the same for the tenant itself; its limits have a version of their own.
        scopes: what the key is for, see `require_scope`.
        grants: what it may call; None: all that its tenant may.
        networks: where it may be used from, see `require_address`; empty: anywhere.
        valid_until: when the secret that was shown ends: the key's expiry, or the end of the grace of
            a rotated secret, whichever is first. Who keeps this object must look again then.
        priority, weight: of the tenant's requests at the engine, see `loraplex_engine.policies`.
        memory_weight, max_adapters: what the tenant may take of an engine's memory, see
            `loraplex_engine.protocol.Generate`.
    """

    key_id: UUID
    key_version: int
    public_id: str
    tenant_id: UUID
    tenant_slug: str
    tenant_version: int = 0
    project_id: UUID | None = None
    scopes: frozenset[str] = frozenset()
    grants: Grants | None = None
    networks: tuple[Network, ...] = ()
    valid_until: datetime | None = None
    priority: int = 0
    weight: float = 1.0
    memory_weight: float | None = None
    max_adapters: int | None = None


_GRANTS = (
    select(func.array_agg(KeyModelGrant.target_kind + ":" + cast(KeyModelGrant.target_id, Text)))
    .where(KeyModelGrant.key_id == ApiKey.id)
    .scalar_subquery()
)
_HOLDERS = (
    select(
        ApiKeySecret.mac,
        ApiKeySecret.valid_until,
        func.now(),
        _GRANTS,
        ApiKey.id,
        ApiKey.version,
        ApiKey.public_id,
        ApiKey.status,
        ApiKey.revoked_at,
        ApiKey.expires_at,
        ApiKey.project_id,
        ApiKey.scopes,
        ApiKey.ip_allow,
        Tenant.id,
        Tenant.slug,
        Tenant.status,
        Tenant.row_version,
        Tenant.priority,
        Tenant.weight,
        Tenant.memory_weight,
        Tenant.max_adapters,
    )
    .join(Tenant, Tenant.id == ApiKey.tenant_id)
    .join(ApiKeySecret, ApiKeySecret.key_id == ApiKey.id)
    .where(ApiKey.public_id == bindparam("public_id", type_=Text()))
    .order_by(ApiKeySecret.valid_from.desc())
    .limit(_MAX_SECRETS)
    # As text for the driver, once: with thousands of tenants every other request asks this.
    .compile(dialect=psycopg_dialect())  # type: ignore[no-untyped-call] # SQLAlchemy's
)
_HOLDERS_TEXT, _HOLDERS_CONSTANTS = str(_HOLDERS), dict(_HOLDERS.params)


async def authenticate(sessions: SessionFactory, pepper: SecretStr, secret: str) -> Authenticated:
    """The key's holder. Where it is used from and what for is for the caller to check.

    Raises:
        InvalidApiKeyError: malformed, an admin key, or unknown.
        RevokedKeyError, DisabledKeyError, ExpiredKeyError: known, but over.
        TenantSuspendedError: the key is good, its tenant is not active.
        DatabaseUnavailableError: we cannot tell.
    """
    asked = {"public_id": public_id_of(secret)}
    rows = await sessions.calls.rows(_HOLDERS_TEXT, _HOLDERS_CONSTANTS | asked)
    # The public id only finds the rows; this comparison, in constant time, decides.
    row = next((row for row in rows if keys.is_valid(pepper, secret, row[0])), None)
    if row is None:
        raise InvalidApiKeyError("Unknown API key.")
    _, secret_until, now, grants, *of_key_and_tenant = row
    key_id, key_version, public_id, key_status, revoked_at, expires_at, *rest = of_key_and_tenant
    project_id, scopes, networks, tenant_id, slug, tenant_status, tenant_version, *policy = rest
    check_live(key_status, revoked_at, expires_at, tenant_status, now)
    if secret_until is not None and secret_until <= now:
        raise ExpiredKeyError("This secret was replaced when the key was rotated; use the new one.")
    priority, weight, memory_weight, max_adapters = policy
    return Authenticated(
        key_id=key_id,
        key_version=key_version,
        public_id=public_id,
        tenant_id=tenant_id,
        tenant_slug=slug,
        tenant_version=tenant_version,
        project_id=project_id,
        scopes=frozenset(scopes),
        grants=parse_grants(grants),
        networks=tuple(networks),
        valid_until=min((end for end in (expires_at, secret_until) if end), default=None),
        priority=priority,
        weight=weight,
        memory_weight=memory_weight,
        max_adapters=max_adapters,
    )


def require_scope(caller: Authenticated, scope: KeyScope) -> None:
    """Raise InsufficientScopeError unless the key is for this."""
    if scope not in caller.scopes:
        raise InsufficientScopeError(
            f"This API key does not have the scope '{scope}'. Use another key, or ask your tenant's "
            "administrator to add the scope."
        )


def require_address(caller: Authenticated, address: str) -> None:
    """Raise IpNotAllowedError if the key may not be used from there. The address is not repeated."""
    if not is_address_allowed(caller.networks, address):
        raise IpNotAllowedError("This API key may not be used from this network address.")


def check_live(
    key_status: str,
    revoked_at: datetime | None,
    expires_at: datetime | None,
    tenant_status: str,
    now: datetime,
) -> None:
    """Raise what a known key in this state deserves, see `authenticate`."""
    if key_status == "disabled":
        raise DisabledKeyError(
            "This API key is disabled. Its tenant's administrator can enable it."
        )
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


def public_id_of(secret: str) -> str:
    """The public id in a data-plane key's text, without asking the database.

    Raises:
        InvalidApiKeyError: malformed, or an admin key.
    """
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
