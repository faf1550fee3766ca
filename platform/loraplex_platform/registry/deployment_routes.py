"""Deployments, their revisions and pins over HTTP: a tenant's, and beside them the platform's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from sqlalchemy import Text, cast

from loraplex_platform.control.context import Context, ControlContext, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Deployment, DeploymentRevision, Pin
from loraplex_platform.registry import deployments, pin_queries, pins, queries, revisions
from loraplex_platform.registry.pin_schemas import NewPin, PinResource, show_pin
from loraplex_platform.registry.revisions import Asker
from loraplex_platform.registry.schemas import (
    ComparedRevision,
    DeploymentResource,
    NewDeployment,
    RevisionChange,
    RevisionContent,
    RevisionResource,
    show_deployment,
    show_revision,
)
from loraplex_platform.tenancy.routes import Owner

router = admin_router("/tenants/{tenant_id}/deployments", "Deployments")
platform_router = admin_router("/deployments", "Deployments")
pins_router = admin_router("/tenants/{tenant_id}/pins", "Deployments")

DeploymentName = Annotated[
    str,
    Path(
        description="The model id that clients ask for.",
        examples=["capitals"],
        max_length=128,
    ),
]
RevisionId = Annotated[str, Path(max_length=80, description="The revision's id, `rev_...`.")]
Against = Annotated[
    str | None,
    Query(max_length=80, description="Another revision of it: `changes` says what differs."),
]


async def _tenant(owner: Owner) -> UUID:
    return owner.id


async def _platform() -> None:
    return None


def _asker(request: Request, context: ControlContext) -> Asker:
    return Asker(context.intake.base_model, is_operator=request.state.reach.tenant_ids is None)


def _add_routes(router: APIRouter, action: str, owner_of: Callable[..., Any], whose: str) -> None:
    """The same routes for a tenant's deployments and the platform's: who owns them differs, and who may."""
    owns: Any = Depends(owner_of)

    @router.put("/{name}", description=_PUT.format(whose=whose))
    @requires(f"{action}.write")
    async def put_deployment(
        name: DeploymentName,
        body: NewDeployment,
        if_match: IfMatch,
        *,
        request: Request,
        response: Response,
        context: Context,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> DeploymentResource:
        deployed = await deployments.deploy(
            session,
            request.state.actor,
            _asker(request, context),
            owner_id,
            name,
            body,
            if_match,
        )
        if deployed.revision.adapter_digest is not None:
            context.fleet.prefetch(deployed.revision.adapter_digest)
        set_etag(response, deployed.deployment.row_version)
        return show_deployment(deployed)

    @router.get("", description=f"{whose} deployments, newest first.")
    @requires(f"{action}.read")
    async def list_deployments(
        page: Paging, session: DbSession, search: Search = None, owner_id: UUID | None = owns
    ) -> ListPage[DeploymentResource]:
        statement = holding(queries.live_deployments(owner_id), search, Deployment.public_name)
        rows, has_more = await fetch(session, statement, Deployment.id, page, "deployment")
        return to_list(await queries.resolve(session, rows), has_more, show_deployment)

    @router.get("/{name}", description="One model id and its current revision.")
    @requires(f"{action}.read")
    async def get_deployment(
        name: DeploymentName, response: Response, session: DbSession, owner_id: UUID | None = owns
    ) -> DeploymentResource:
        deployed = await deployments.find(session, owner_id, name)
        set_etag(response, deployed.deployment.row_version)
        return show_deployment(deployed)

    @router.post("/{name}/revisions", status_code=201, description=_ADD)
    @requires(f"{action}.write")
    async def add_revision(
        name: DeploymentName,
        body: RevisionContent,
        *,
        request: Request,
        response: Response,
        context: Context,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RevisionResource:
        facts, is_new = await deployments.add_revision(
            session, request.state.actor, _asker(request, context), owner_id, name, body
        )
        if not is_new:
            response.status_code = 200
        return show_revision(facts)

    @router.get(
        "/{name}/revisions",
        description="All of its revisions, newest first. `search`: in the number.",
    )
    @requires(f"{action}.read")
    async def list_revisions(
        name: DeploymentName,
        page: Paging,
        session: DbSession,
        search: Search = None,
        owner_id: UUID | None = owns,
    ) -> ListPage[RevisionResource]:
        deployment = await deployments.get(session, owner_id, name)
        number = cast(DeploymentRevision.number, Text)
        statement = holding(queries.revisions_of(deployment.id), search, number)
        rows, has_more = await fetch(
            session, statement, DeploymentRevision.id, page, "deployment_revision"
        )
        return to_list(await queries.facts_of(session, rows), has_more, show_revision)

    @router.get("/{name}/revisions/{revision_id}", description=_GET_REVISION)
    @requires(f"{action}.read")
    async def get_revision(
        name: DeploymentName,
        revision_id: RevisionId,
        session: DbSession,
        against: Against = None,
        owner_id: UUID | None = owns,
    ) -> ComparedRevision:
        deployment = await deployments.get(session, owner_id, name)
        [facts] = await queries.facts_of(
            session, [await revisions.get(session, deployment, revision_id)]
        )
        changes = None
        if against is not None:
            [other] = await queries.facts_of(
                session, [await revisions.get(session, deployment, against, param="against")]
            )
            changes = [
                RevisionChange(field=name, before=before, after=after)
                for name, (before, after) in revisions.differences(other, facts).items()
            ]
        return ComparedRevision(
            **show_revision(facts).model_dump(), against=against, changes=changes
        )


_PUT = (
    "Have a model id of {whose} answer with exactly this, from the next request on; running ones finish on their "
    "revision. It is the whole of it: what is left out is at its default, but for the price book. The same again "
    "changes nothing, and content that it had before is that revision again. 409 while a rollout of it is on its way."
)
_ADD = (
    "Make a revision that nothing answers with yet, for a rollout or a pin. The same content is the same revision "
    "(200)."
)
_GET_REVISION = "One revision, beside another one with `against`."

_add_routes(router, "deployment", _tenant, "The tenant's")
_add_routes(platform_router, "platform_deployment", _platform, "The platform's")


@router.delete("/{name}", status_code=204)
@requires("deployment.write")
async def archive_deployment(
    owner: Owner, name: DeploymentName, if_match: IfMatch, request: Request, session: DbSession
) -> None:
    """Take a model id away: its next request is a 404. Its pin ends with it. 409 while a rollout of it is on
    its way.
    """
    await deployments.archive(session, request.state.actor, owner.id, name, if_match)


# ---------------------------------------------------------------------------- pins


@router.put("/{name}/pin")
@requires("deployment.write")
async def put_pin(
    owner: Owner,
    name: DeploymentName,
    body: NewPin,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    context: Context,
    session: DbSession,
) -> PinResource:
    """Keep the tenant's requests for a deployment, its own or the platform's, at a revision until a time,
    whatever is deployed or rolled out. In place of the pin that is there, if any. The revision's price book is kept
    with it, so only the operator may pin to one with another book than the current revision's (403).
    """
    facts = await pins.put(
        session,
        request.state.actor,
        owner.id,
        name,
        body,
        if_match,
        is_operator=request.state.reach.tenant_ids is None,
    )
    set_etag(response, facts.pin.row_version)
    return show_pin(facts, context.fleet.running_builds())


@router.get("/{name}/pin")
@requires("deployment.read")
async def get_pin(
    owner: Owner, name: DeploymentName, response: Response, context: Context, session: DbSession
) -> PinResource:
    """The tenant's pin of a deployment, its own or the platform's; also one that has expired."""
    facts = await pins.get(session, owner.id, name)
    set_etag(response, facts.pin.row_version)
    return show_pin(facts, context.fleet.running_builds())


@router.delete("/{name}/pin", status_code=204)
@requires("deployment.write")
async def delete_pin(
    owner: Owner, name: DeploymentName, if_match: IfMatch, request: Request, session: DbSession
) -> None:
    """End a pin: the current revision, or a rollout of it, answers from the next request on."""
    await pins.remove(session, request.state.actor, owner.id, name, if_match)


@pins_router.get("")
@requires("deployment.read")
async def list_pins(
    owner: Owner, page: Paging, context: Context, session: DbSession
) -> ListPage[PinResource]:
    """All of the tenant's pins, also those that have expired."""
    statement = pin_queries.pins_of(owner.id)
    rows, has_more = await fetch(session, statement, Pin.deployment_id, page, "deployment")
    running = context.fleet.running_builds()
    facts = await pin_queries.facts_of(session, rows)
    return to_list(facts, has_more, lambda item: show_pin(item, running))
