"""A tenant's API keys over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from fastapi import Depends, Path, Query, Request, Response

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import CleanText, ListPage
from loraplex_platform.db import ApiKey
from loraplex_platform.tenancy import key_queries as queries
from loraplex_platform.tenancy import key_service as service
from loraplex_platform.tenancy.key_schemas import (
    KeyChanges,
    KeyResource,
    KeyWithSecret,
    NewKey,
    Rotation,
    show_key,
)
from loraplex_platform.tenancy.routes import Owner
from loraplex_platform.tenancy.service import project_uuid

router = admin_router("/tenants/{tenant_id}/keys", "Keys")


async def _key_uuid(key_id: Annotated[str, Path(description="The key's id, `key_...`.")]) -> UUID:
    return service.key_uuid(key_id)


KeyUuid = Annotated[UUID, Depends(_key_uuid)]


@router.post("", status_code=201)
@requires("key.write")
async def create_key(
    owner: Owner,
    body: NewKey,
    *,
    request: Request,
    response: Response,
    context: Context,
    session: DbSession,
) -> KeyWithSecret:
    """Make an API key for the gateway. `secret` is in this answer and nowhere else, ever."""
    made = await service.create_key(
        session, request.state.actor, context.settings.key_pepper, owner.id, body
    )
    return _with_secret(made, response)


@router.get("")
@requires("key.read")
async def list_keys(
    owner: Owner,
    page: Paging,
    session: DbSession,
    *,
    project_id: Annotated[
        str | None, Query(max_length=80, description="Only this project's, `prj_...`.")
    ] = None,
    status: Annotated[
        Literal["active"] | None,
        Query(description="`active`: neither disabled nor revoked. All if not given."),
    ] = None,
    search: Search = None,
) -> ListPage[KeyResource]:
    """The tenant's keys, newest first; revoked ones stay, because bills name them. `search`: in the name and
    in what is public of the key.
    """
    project = None if project_id is None else project_uuid(project_id, param="project_id")
    if search and search.strip():
        statement = queries.found_keys(
            owner.id,
            project,
            status,
            search=search.strip(),
            before=page.after_id("api_key"),
            most=page.limit + 1,  # one more tells whether there are more
        )
    else:
        statement = queries.listed_keys(owner.id, project, status)
    rows, has_more = await fetch(session, statement, ApiKey.id, page, "api_key")
    grants = await queries.grants_of(session, owner.id, [key.id for key in rows])
    return to_list(rows, has_more, lambda key: show_key(key, grants.get(key.id, ())))


@router.get("/{key_id}")
@requires("key.read")
async def get_key(
    owner: Owner, key_id: KeyUuid, response: Response, session: DbSession
) -> KeyResource:
    """One key."""
    return _shown(await service.get_key(session, owner.id, key_id), response)


@router.patch("/{key_id}")
@requires("key.write")
async def update_key(
    owner: Owner,
    key_id: KeyUuid,
    body: KeyChanges,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    session: DbSession,
) -> KeyResource:
    """Change a key. It holds on every gateway from the key's next request on."""
    changes = body.model_dump(exclude_unset=True)
    changed = await service.update_key(
        session, request.state.actor, owner.id, key_id, changes, if_match
    )
    return _shown(changed, response)


@router.post("/{key_id}/rotate")
@requires("key.write")
async def rotate_key(
    owner: Owner,
    key_id: KeyUuid,
    body: Rotation,
    *,
    request: Request,
    response: Response,
    context: Context,
    session: DbSession,
) -> KeyWithSecret:
    """Give a key a new secret; the old one works for `grace_s` more seconds.

    The key keeps its id, limits and usage. `secret` is in this answer and nowhere else, ever; who
    loses it rotates again.
    """
    made = await service.rotate_key(
        session,
        request.state.actor,
        context.settings.key_pepper,
        owner.id,
        key_id,
        grace_s=body.grace_s,
    )
    return _with_secret(made, response)


@router.delete("/{key_id}", status_code=204)
@requires("key.write")
async def revoke_key(
    owner: Owner,
    key_id: KeyUuid,
    request: Request,
    session: DbSession,
    *,
    reason: Annotated[
        CleanText | None,
        Query(min_length=1, max_length=200, description="Kept with the key, for people."),
    ] = None,
) -> None:
    """Revoke a key for ever: it stops at its next request. Revoking it again changes nothing."""
    await service.revoke_key(session, request.state.actor, owner.id, key_id, reason=reason)


def _shown(granted: service.GrantedKey, response: Response) -> KeyResource:
    set_etag(response, granted.key.version)
    return show_key(granted.key, granted.grants)


def _with_secret(made: service.NewSecret, response: Response) -> KeyWithSecret:
    return KeyWithSecret(**_shown(made.granted, response).__dict__, secret=made.secret)
