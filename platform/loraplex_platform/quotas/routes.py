"""Limits, how urgent tenants are, and why a request was blocked, over HTTP."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path, Query, Request, Response

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Limit, Tenant
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id
from loraplex_platform.metering.provenance_schemas import show_answer
from loraplex_platform.quotas import explain as explanations
from loraplex_platform.quotas import queries, service, standing
from loraplex_platform.quotas.records import ScopeKind
from loraplex_platform.quotas.schemas import (
    ExplanationResource,
    LimitChanges,
    LimitResource,
    NewLimit,
    SchedulingChanges,
    SchedulingResource,
    show_limit,
)
from loraplex_platform.quotas.standing_schemas import StandingList, show_standing
from loraplex_platform.tenancy.routes import Owner

router = admin_router("/limits", "Limits")
scheduling_router = admin_router("/tenants/{tenant_id}/scheduling", "Limits")
explain_router = admin_router("/explain", "Limits")

LimitId = Annotated[str, Path(description="The limit's id, `lim_...`.")]


async def _tenant_filter(
    tenant_id: Annotated[str | None, Query(description="Only those of this tenant.")] = None,
) -> UUID | None:
    if tenant_id is None:
        return None
    try:
        return parse_id("tenant", tenant_id)
    except MalformedIdError:
        raise NotFoundError("No such tenant.", param="tenant_id") from None


async def _key_filter(
    key_id: Annotated[str, Query(max_length=80, description="The caller's key, `key_...`.")],
) -> UUID:
    try:
        return parse_id("api_key", key_id)
    except MalformedIdError:
        raise NotFoundError("No such key.", param="key_id") from None


async def _deployment_filter(
    deployment_id: Annotated[
        str | None,
        Query(
            max_length=80,
            description="Also the limits of this deployment, `dep_...`, and of its adapter.",
        ),
    ] = None,
) -> UUID | None:
    if deployment_id is None:
        return None
    try:
        return parse_id("deployment", deployment_id)
    except MalformedIdError:
        raise NotFoundError("No such deployment.", param="deployment_id") from None


@router.post("", status_code=201)
@requires("limit.write")
async def create_limit(
    body: NewLimit,
    *,
    request: Request,
    response: Response,
    context: Context,
    session: DbSession,
) -> LimitResource:
    """Set a limit: a rate (rpm, tpm_in, tpm_out, tpm_total, concurrency) or a quota of tokens, requests
    or money per day, month, in total or over any last hours. A quota counts from the beginning of its
    period, also when it is set in the middle.
    """
    made = await service.create_limit(session, request.state.actor, body, sessions=context.sessions)
    set_etag(response, made.limit.row_version)
    return show_limit(made.limit, made.use)


@router.get("")
@requires("limit.read")
async def list_limits(
    page: Paging,
    session: DbSession,
    tenant: Annotated[UUID | None, Depends(_tenant_filter)],
    *,
    scope_kind: Annotated[ScopeKind | None, Query(description="Only of these scopes.")] = None,
    search: Search = None,
) -> ListPage[LimitResource]:
    """Limits, newest first, and what is used of them now; for members, those of their tenants. `search`: in
    the name of what is limited, and of what is counted.
    """
    statement = queries.limits_of(tenant)
    if search and search.strip():
        statement = queries.named(statement, search, tenant)
    if scope_kind is not None:
        statement = statement.where(Limit.scope_kind == scope_kind)
    rows, has_more = await fetch(session, statement, Limit.id, page, "limit")
    counted = {one.id: one.use for one in await service.with_uses(session, rows)}
    return to_list(rows, has_more, lambda limit: show_limit(limit, counted[limit.id]))


@router.get("/effective")
@requires("limit.read")
async def list_effective_limits(
    context: Context,
    session: DbSession,
    *,
    key: Annotated[UUID, Depends(_key_filter)],
    deployment: Annotated[UUID | None, Depends(_deployment_filter)],
) -> StandingList:
    """All limits that bind a caller now, with what is used, held and left of each, and when it resets.

    Of `platform` and other scopes that tenants share only the operator sees how they stand.
    """
    found = await standing.standing_of(session, context.redis, key, deployment)
    return StandingList(data=[show_standing(one) for one in found])


@router.get("/{limit_id}")
@requires("limit.read")
async def get_limit(limit_id: LimitId, response: Response, session: DbSession) -> LimitResource:
    """One limit, and what is used of it now."""
    found = await service.get_limit(session, limit_id)
    set_etag(response, found.limit.row_version)
    return show_limit(found.limit, found.use)


@router.patch("/{limit_id}")
@requires("limit.write")
async def update_limit(
    limit_id: LimitId,
    body: LimitChanges,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    session: DbSession,
) -> LimitResource:
    """Change a limit. What is used in the period stays used; requests in progress keep their holds."""
    changed = await service.update_limit(session, request.state.actor, limit_id, body, if_match)
    set_etag(response, changed.limit.row_version)
    return show_limit(changed.limit, changed.use)


@router.delete("/{limit_id}", status_code=204)
@requires("limit.write")
async def delete_limit(
    limit_id: LimitId, if_match: IfMatch, request: Request, session: DbSession
) -> None:
    """Remove a limit. Set again within its period, it finds what was used."""
    await service.delete_limit(session, request.state.actor, limit_id, if_match)


@scheduling_router.get("")
@requires("limit.read")
async def get_scheduling(owner: Owner, response: Response) -> SchedulingResource:
    """How urgent the tenant's requests are at the engines."""
    set_etag(response, owner.row_version)
    return _show_scheduling(owner)


@scheduling_router.patch("")
@requires("limit.write")
async def update_scheduling(
    owner: Owner,
    body: SchedulingChanges,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    session: DbSession,
) -> SchedulingResource:
    """Set the tenant's priority, weight and shares of memory, from its next request on."""
    tenant = await service.update_scheduling(session, request.state.actor, owner.id, body, if_match)
    set_etag(response, tenant.row_version)
    return _show_scheduling(tenant)


@explain_router.get("/{request_id}")
@requires("request.read")
async def explain(
    request_id: Annotated[str, Path(description="`x-request-id` of an answer, `req_...`.")],
    session: DbSession,
) -> ExplanationResource:
    """Why a request was blocked, cut short or failed, in words; and of one that was admitted what exactly
    answered it, why that, and what it cost. Its revision, adapter, build and prices never change, so that
    the answer is the same a year later."""
    found = await explanations.explain(session, request_id)
    return ExplanationResource(
        request_id=format_id("request", found.request_id),
        tenant_id=format_id("tenant", found.tenant_id),
        outcome=found.outcome,
        summary=found.summary,
        details=found.details,
        limit_ids=[format_id("limit", limit_id) for limit_id in found.limit_ids],
        at=found.at,
        answered_by=None if found.answered_by is None else show_answer(found.answered_by),
    )


def _show_scheduling(tenant: Tenant) -> SchedulingResource:
    return SchedulingResource(
        tenant_id=format_id("tenant", tenant.id),
        priority=tenant.priority,
        weight=tenant.weight,
        memory_weight=tenant.memory_weight,
        max_adapters=tenant.max_adapters,
        version=tenant.row_version,
    )
