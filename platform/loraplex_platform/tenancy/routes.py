"""Tenants and their API keys over HTTP."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path, Request

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import ApiKey, Tenant
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, parse_id
from loraplex_platform.tenancy import queries, service
from loraplex_platform.tenancy.schemas import (
    KeyResource,
    KeyWithSecret,
    NewKey,
    NewTenant,
    TenantResource,
    show_key,
    show_tenant,
)

router = admin_router("/tenants", "Tenants and keys")


def _tenant_uuid(
    tenant_id: Annotated[
        str,
        Path(
            description="The tenant's id, `ten_...`.",
            examples=["ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f"],
        ),
    ],
) -> UUID:
    try:
        return parse_id("tenant", tenant_id)
    except MalformedIdError:
        raise NotFoundError("No such tenant.") from None


async def _owner(tenant_id: Annotated[UUID, Depends(_tenant_uuid)], session: DbSession) -> Tenant:
    return await service.get_tenant(session, tenant_id)


TenantUuid = Annotated[UUID, Depends(_tenant_uuid)]
# The tenant in the path, loaded: 404 before anything else is looked at.
Owner = Annotated[Tenant, Depends(_owner)]


@router.post("", status_code=201)
@requires("tenant.create")
async def create_tenant(body: NewTenant, request: Request, session: DbSession) -> TenantResource:
    """Add a tenant. Its adapters, keys, cache, usage and bill are its own."""
    return show_tenant(await service.create_tenant(session, request.state.actor, body))


@router.get("")
@requires("tenant.read")
async def list_tenants(page: Paging, session: DbSession) -> ListPage[TenantResource]:
    """Every tenant, newest first."""
    rows, has_more = await fetch(session, queries.all_tenants(), Tenant.id, page, "tenant")
    return to_list(rows, has_more, show_tenant)


@router.get("/{tenant_id}")
@requires("tenant.read")
async def get_tenant(owner: Owner) -> TenantResource:
    """One tenant."""
    return show_tenant(owner)


@router.post("/{tenant_id}/keys", status_code=201)
@requires("key.write")
async def create_key(
    owner: Owner, body: NewKey, request: Request, context: Context, session: DbSession
) -> KeyWithSecret:
    """Make an API key for the gateway. `secret` is in this answer and nowhere else, ever."""
    made = await service.create_key(
        session,
        request.state.actor,
        context.settings.key_pepper,
        owner.id,
        name=body.name,
        expires_at=body.expires_at_time,
    )
    return KeyWithSecret(**show_key(made.key).__dict__, secret=made.secret)


@router.get("/{tenant_id}/keys")
@requires("key.read")
async def list_keys(owner: Owner, page: Paging, session: DbSession) -> ListPage[KeyResource]:
    """The tenant's keys, newest first; revoked ones stay, because bills name them."""
    statement = queries.keys_of(owner.id)
    rows, has_more = await fetch(session, statement, ApiKey.id, page, "api_key")
    return to_list(rows, has_more, show_key)


@router.delete("/{tenant_id}/keys/{key_id}", status_code=204)
@requires("key.write")
async def revoke_key(
    owner: Owner,
    key_id: Annotated[str, Path(description="The key's id, `key_...`.")],
    request: Request,
    session: DbSession,
) -> None:
    """Revoke a key: it stops at its next request. Revoking it again changes nothing."""
    await service.revoke_key(session, request.state.actor, owner.id, key_id)
