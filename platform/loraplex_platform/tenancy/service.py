"""Tenants, and the life of their API keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import ApiKey, ApiKeySecret, Tenant
from loraplex_platform.errors import ConflictError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.tenancy import keys, queries
from loraplex_platform.tenancy.schemas import NewTenant


@dataclass(frozen=True, slots=True)
class NewlyMadeKey:
    """A key and, this once, its secret."""

    key: ApiKey
    secret: str = field(repr=False)


async def get_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant:
    """By id.

    Raises:
        NotFoundError: no such tenant.
    """
    tenant = await queries.find_tenant(session, tenant_id)
    if tenant is None:
        raise NotFoundError("No such tenant.")
    return tenant


async def create_tenant(session: AsyncSession, actor: Actor, new: NewTenant) -> Tenant:
    """Add a tenant.

    Raises:
        ConflictError: the slug is taken.
    """
    tenant = Tenant(id=uuid7(), slug=new.slug, name=new.name or new.slug)
    if not await queries.insert_tenant(session, tenant):
        raise ConflictError(f"slug: {new.slug!r} is taken; choose another one.", param="slug")
    tenant_id = tenant.id
    record(
        session,
        actor,
        "tenant.create",
        "tenant",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        detail={"slug": new.slug, "name": new.name or new.slug},
    )
    return await get_tenant(session, tenant_id)


async def create_key(
    session: AsyncSession,
    actor: Actor,
    pepper: SecretStr,
    tenant_id: UUID,
    *,
    name: str,
    expires_at: datetime | None,
) -> NewlyMadeKey:
    """Make a key; only its MAC is stored."""
    minted = keys.mint("sk")
    key = ApiKey(
        id=uuid7(),
        tenant_id=tenant_id,
        name=name,
        public_id=minted.public_id,
        last4=minted.last4,
        expires_at=expires_at,
    )
    session.add(key)
    await session.flush()
    session.add(ApiKeySecret(id=uuid7(), key_id=key.id, mac=keys.mac(pepper, minted.secret)))
    record(
        session,
        actor,
        "api_key.create",
        "api_key",
        format_id("api_key", key.id),
        tenant_id=tenant_id,
        detail={"name": name, "public_id": minted.public_id},
    )
    await session.flush()
    await session.refresh(key)
    return NewlyMadeKey(key, minted.secret)


async def revoke_key(session: AsyncSession, actor: Actor, tenant_id: UUID, key_id: str) -> None:
    """Revoke one of the tenant's keys; a revoked one stays so.

    Raises:
        NotFoundError: no such key of this tenant.
    """
    try:
        key_uuid = parse_id("api_key", key_id)
    except MalformedIdError:
        raise NotFoundError("No such key.") from None
    if await queries.revoke_key(session, tenant_id, key_uuid):
        record(
            session,
            actor,
            "api_key.revoke",
            "api_key",
            format_id("api_key", key_uuid),
            tenant_id=tenant_id,
        )
    elif await queries.find_key(session, tenant_id, key_uuid) is None:
        raise NotFoundError("No such key.")
