"""Aliases of adapters, and retiring their versions, over HTTP."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path, Request, Response

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.registry import aliases, queries, retirement, service
from loraplex_platform.registry.alias_schemas import (
    AliasEventResource,
    AliasResource,
    MovedAlias,
    NewAlias,
    UsesResource,
    show_alias,
    show_event,
    show_uses,
)
from loraplex_platform.registry.schemas import VersionResource, show_version
from loraplex_platform.tenancy.routes import Owner

router = admin_router("/tenants/{tenant_id}/adapters/{adapter_id}/aliases", "Adapters")
versions_router = admin_router("/tenants/{tenant_id}/adapters/{adapter_id}/versions", "Adapters")

AliasName = Annotated[
    str,
    Path(
        max_length=64, description="The alias, for example `production`.", examples=["production"]
    ),
]
VersionId = Annotated[str, Path(max_length=80, description="The version's id, `ver_...`.")]


async def _adapter(
    owner: Owner,
    adapter_id: Annotated[str, Path(max_length=80, description="The adapter's id, `adp_...`.")],
    session: DbSession,
) -> UUID:
    adapter, _ = await service.get_adapter(session, owner.id, adapter_id)
    return adapter.id


AdapterUuid = Annotated[UUID, Depends(_adapter)]


@router.put("/{alias}")
@requires("adapter.write")
async def put_alias(
    owner: Owner,
    adapter_id: AdapterUuid,
    alias: AliasName,
    body: NewAlias,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    context: Context,
    session: DbSession,
) -> MovedAlias:
    """Have an alias name a version. Deployments that follow it go with it, all at once, from the next request
    on; 409, and nothing moves, while a rollout of one of them is on its way.
    """
    moved = await aliases.put(
        session,
        request.state.actor,
        owner.id,
        adapter_id,
        alias,
        body.version_id,
        if_match,
    )
    if moved.deployments:
        context.fleet.prefetch(moved.version.digest)
    set_etag(response, moved.alias.row_version)
    return MovedAlias(
        **show_alias(moved.alias, moved.version).model_dump(),
        moved=[item.deployment.public_name for item in moved.deployments],
    )


@router.get("")
@requires("adapter.read")
async def list_aliases(
    owner: Owner, adapter_id: AdapterUuid, page: Paging, session: DbSession
) -> ListPage[AliasResource]:
    """The adapter's aliases, by name."""
    rows = await queries.alias_page(session, owner.id, adapter_id, page.after, page.limit)
    return to_list(rows[: page.limit], len(rows) > page.limit, lambda row: show_alias(*row))


@router.get("/{alias}")
@requires("adapter.read")
async def get_alias(
    owner: Owner,
    adapter_id: AdapterUuid,
    alias: AliasName,
    response: Response,
    session: DbSession,
) -> AliasResource:
    """What an alias names."""
    found, version = await aliases.get(session, owner.id, adapter_id, alias)
    set_etag(response, found.row_version)
    return show_alias(found, version)


@router.get("/{alias}/events")
@requires("adapter.read")
async def list_alias_events(
    owner: Owner, adapter_id: AdapterUuid, alias: AliasName, page: Paging, session: DbSession
) -> ListPage[AliasEventResource]:
    """What an alias named from when on, newest first; also of one that was deleted."""
    before_id = None
    if page.after is not None:
        if not (page.after.isascii() and page.after.isdigit() and len(page.after) <= 18):
            raise InvalidRequestError("after: pass the last_id of the page before.", param="after")
        before_id = int(page.after)
    rows = await queries.alias_events(session, owner.id, adapter_id, alias, before_id, page.limit)
    return to_list(rows[: page.limit], len(rows) > page.limit, show_event)


@router.delete("/{alias}", status_code=204)
@requires("adapter.write")
async def delete_alias(
    owner: Owner,
    adapter_id: AdapterUuid,
    alias: AliasName,
    if_match: IfMatch,
    request: Request,
    session: DbSession,
) -> None:
    """Take an alias away. 409 while a deployment follows it."""
    await aliases.remove(session, request.state.actor, owner.id, adapter_id, alias, if_match)


# ---------------------------------------------------------------------------- versions


@versions_router.get("/{version_id}/uses")
@requires("adapter.read")
async def list_uses(
    owner: Owner, adapter_id: AdapterUuid, version_id: VersionId, session: DbSession
) -> UsesResource:
    """What names a version now: deployments, live pins, rollouts, aliases, the operator's wish to keep it in
    memory, running requests.
    """
    version = await retirement.get_version(session, owner.id, adapter_id, version_id)
    return show_uses(version, await retirement.uses_of(session, version))


@versions_router.post("/{version_id}/retire")
@requires("adapter.write")
async def retire_version(
    owner: Owner,
    adapter_id: AdapterUuid,
    version_id: VersionId,
    request: Request,
    session: DbSession,
) -> VersionResource:
    """Have nothing use a version any more. 409 with the list while something names it. Again: no-op.

    Engines evict it like anything that nobody uses; never while a request of it runs. Its files stay.
    """
    version = await retirement.get_version(
        session, owner.id, adapter_id, version_id, to_change=True
    )
    await retirement.retire(session, request.state.actor, version)
    return show_version(version)


@versions_router.post("/{version_id}/unretire")
@requires("adapter.write")
async def unretire_version(
    owner: Owner,
    adapter_id: AdapterUuid,
    version_id: VersionId,
    request: Request,
    session: DbSession,
) -> VersionResource:
    """Let a retired version be used again."""
    version = await retirement.get_version(
        session, owner.id, adapter_id, version_id, to_change=True
    )
    await retirement.unretire(session, request.state.actor, version)
    return show_version(version)
