"""Rollouts over HTTP: a tenant's below the tenant, those of the platform's own deployments beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Rollout
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import InvalidRequestError, NotFoundError
from loraplex_platform.ids import format_id
from loraplex_platform.rollouts import looks, queries, service
from loraplex_platform.rollouts.driver import show_gate
from loraplex_platform.rollouts.records import State
from loraplex_platform.rollouts.schemas import (
    EventResource,
    MetricsResource,
    NewRollout,
    Reason,
    RolloutChange,
    RolloutResource,
    show_event,
    show_rollout,
    show_sides,
)
from loraplex_platform.rollouts.transitions import settings_of, steps_of
from loraplex_platform.tenancy.routes import Owner

tenant_router = admin_router("/tenants/{tenant_id}/rollouts", "Rollouts")
platform_router = admin_router("/rollouts", "Rollouts")

RolloutId = Annotated[str, Path(max_length=80, description="The rollout's id, `rol_...`.")]
WithReason = Annotated[Reason, Body()]
_NO_REASON = Reason()


async def _tenant(owner: Owner) -> UUID:
    return owner.id


async def _platform() -> None:
    return None


def _add_routes(router: APIRouter, action: str, owner_of: Callable[..., Any], whose: str) -> None:
    """The same routes for a tenant's rollouts and the platform's: who owns them differs, and who may."""

    owns: Any = Depends(owner_of)

    @router.post("", status_code=201, description=_CREATE.format(whose=whose))
    @requires(f"{action}.write")
    async def create_rollout(
        body: NewRollout,
        request: Request,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.create(
            session, request.state.actor, owner_id, body, is_operator=_is_operator(request)
        )
        return await _shown(session, response, rollout)

    @router.get("", description=f"{whose}, newest first. `search`: in the model id.")
    @requires(f"{action}.read")
    async def list_rollouts(
        page: Paging,
        session: DbSession,
        deployment: Annotated[
            str | None,
            Query(max_length=128, description="Only of this model id, or deployment id."),
        ] = None,
        state: Annotated[State | None, Query(description="Only in this state.")] = None,
        search: Search = None,
        owner_id: UUID | None = owns,
    ) -> ListPage[RolloutResource]:
        statement = queries.rollouts_of(owner_id)
        if deployment is not None:
            statement = await service.of_deployment(session, owner_id, deployment)
        if state is not None:
            statement = statement.where(Rollout.state == state)
        if search and search.strip():
            statement = queries.named(statement, search)
        rows, has_more = await fetch(session, statement, Rollout.id, page, "rollout")
        names = await queries.names_of(session, rows)
        return to_list(rows, has_more, lambda rollout: show_rollout(rollout, names[rollout.id]))

    @router.get("/{rollout_id}", description="One rollout; the ETag is for If-Match.")
    @requires(f"{action}.read")
    async def get_rollout(
        rollout_id: RolloutId,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.get(session, owner_id, rollout_id)
        return await _shown(session, response, rollout)

    @router.patch("/{rollout_id}", description=_CHANGE)
    @requires(f"{action}.write")
    async def change_rollout(
        rollout_id: RolloutId,
        body: RolloutChange,
        version: IfMatch,
        request: Request,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.change(
            session,
            request.state.actor,
            owner_id,
            rollout_id,
            body,
            version,
            is_operator=_is_operator(request),
        )
        return await _shown(session, response, rollout)

    @router.post("/{rollout_id}/start", description=_START)
    @requires(f"{action}.write")
    async def start_rollout(
        rollout_id: RolloutId,
        version: IfMatch,
        request: Request,
        response: Response,
        context: Context,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.start(
            session,
            request.state.actor,
            owner_id,
            rollout_id,
            version,
            is_operator=_is_operator(request),
        )
        canary = await queries.find_side(
            session, rollout.deployment_id, revision_id=rollout.canary_revision_id
        )
        if canary is not None and canary.revision.adapter_digest is not None:
            context.fleet.prefetch(canary.revision.adapter_digest)
        return await _shown(session, response, rollout)

    @router.post("/{rollout_id}/pause", description=_PAUSE)
    @requires(f"{action}.write")
    async def pause_rollout(
        rollout_id: RolloutId,
        version: IfMatch,
        request: Request,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.pause(
            session, request.state.actor, owner_id, rollout_id, version, is_paused=True
        )
        return await _shown(session, response, rollout)

    @router.post("/{rollout_id}/resume", description="Let a paused rollout go on.")
    @requires(f"{action}.write")
    async def resume_rollout(
        rollout_id: RolloutId,
        version: IfMatch,
        request: Request,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.pause(
            session, request.state.actor, owner_id, rollout_id, version, is_paused=False
        )
        return await _shown(session, response, rollout)

    @router.post("/{rollout_id}/promote", description=_PROMOTE)
    @requires(f"{action}.write")
    async def promote_rollout(
        rollout_id: RolloutId,
        version: IfMatch,
        request: Request,
        response: Response,
        session: DbSession,
        body: WithReason = _NO_REASON,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.promote(
            session,
            request.state.actor,
            owner_id,
            rollout_id,
            body.reason,
            version,
            is_operator=_is_operator(request),
        )
        return await _shown(session, response, rollout)

    @router.post("/{rollout_id}/abort", description=_ABORT)
    @requires(f"{action}.write")
    async def abort_rollout(
        rollout_id: RolloutId,
        version: IfMatch,
        request: Request,
        response: Response,
        session: DbSession,
        body: WithReason = _NO_REASON,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.abort(
            session, request.state.actor, owner_id, rollout_id, body.reason, version
        )
        return await _shown(session, response, rollout)

    @router.post("/{rollout_id}/rollback", description=_ROLLBACK)
    @requires(f"{action}.write")
    async def roll_back_rollout(
        rollout_id: RolloutId,
        version: IfMatch,
        request: Request,
        response: Response,
        session: DbSession,
        body: WithReason = _NO_REASON,
        owner_id: UUID | None = owns,
    ) -> RolloutResource:
        rollout = await service.roll_back(
            session,
            request.state.actor,
            owner_id,
            rollout_id,
            body.reason,
            version,
            is_operator=_is_operator(request),
        )
        return await _shown(session, response, rollout)

    @router.get("/{rollout_id}/events", description=_EVENTS)
    @requires(f"{action}.read")
    async def list_rollout_events(
        rollout_id: RolloutId,
        session: DbSession,
        limit: Annotated[int, Query(ge=1, le=100, description="How many at most.")] = 20,
        after: Annotated[
            str | None, Query(max_length=20, description="The `last_id` of the page before.")
        ] = None,
        owner_id: UUID | None = owns,
    ) -> ListPage[EventResource]:
        rollout = await service.get(session, owner_id, rollout_id)
        number = _number_of(after)
        rows = await queries.events_of(session, rollout.id, number, limit + 1)
        return to_list(list(rows[:limit]), len(rows) > limit, show_event)

    @router.get("/{rollout_id}/metrics", description=_METRICS)
    @requires(f"{action}.read")
    async def get_rollout_metrics(
        rollout_id: RolloutId,
        context: Context,
        session: DbSession,
        step: Annotated[
            int | None,
            Query(ge=0, le=100, description="Of its steps, from 0; none: the current one."),
        ] = None,
        owner_id: UUID | None = owns,
    ) -> MetricsResource:
        rollout = await service.get(session, owner_id, rollout_id)
        return await _metrics(context.sessions, rollout, step)


def _is_operator(request: Request) -> bool:
    """Whoever may choose by which price book is billed."""
    return bool(request.state.reach.tenant_ids is None)


async def _shown(session: DbSession, response: Response, rollout: Rollout) -> RolloutResource:
    set_etag(response, rollout.row_version)
    return show_rollout(rollout, (await queries.names_of(session, [rollout]))[rollout.id])


async def _metrics(sessions: SessionFactory, rollout: Rollout, step: int | None) -> MetricsResource:
    number = rollout.step if step is None else step
    steps, settings = steps_of(rollout), settings_of(rollout)
    if rollout.step_began_at is None or number > rollout.step:
        raise NotFoundError("No such step has begun, so nothing is known of it.", param="step")
    kind = steps[number].kind
    plan = settings.plan(kind, len(steps))
    # Past the caller's own view of the tables: the rollout is theirs, and what comes back are sums.
    found = await looks.look(sessions, rollout.id, number, kind, plan)
    decision = None
    if plan is not None:
        decision = await asyncio.to_thread(plan.decide, found.observed)
    stable, canary = show_sides(found)
    return MetricsResource(
        rollout_id=format_id("rollout", rollout.id),
        step=number,
        kind=kind,
        share_bp=steps[number].share_bp,
        stable=stable,
        canary=canary,
        sample=found.sample,
        verdict="none" if decision is None else decision.verdict,
        gates=[] if decision is None else [show_gate(result) for result in decision.results],
    )


def _number_of(after: str | None) -> int:
    if after is None:
        return 0
    if not after.isdecimal() or int(after) >= 2**31:
        raise InvalidRequestError(
            "after: pass the last_id of the page before, a number.", param="after"
        )
    return int(after)


_CREATE = (
    "Add one of: {whose}: a draft of two revisions of one deployment. `changes` says what differs between them, and "
    "`warnings` what is unwise. Nothing happens before it is started. A canary with another price book than what answers "
    "now is the operator's to roll out (403)."
)
_CHANGE = "Change a draft; what is not given stays. 409 once it is started."
_START = (
    "Start a draft. Its canary is judged by the offline suite, if one is asked for, and loaded by every ready replica "
    "that may serve it; then its first step begins by itself. 409 while another rollout of the deployment is under way."
)
_PAUSE = "Let it go no step further. The split stays as it is, and failing gates still abort it."
_PROMOTE = (
    "Have the canary answer everything from the next request on, whatever steps are left. A deployment that follows an "
    "alias which names another version stops following it, and an event says so. Another price book than what answers "
    "now is the operator's to promote (403)."
)
_ABORT = "Have the stable revision answer everything from the next request on. Streams in flight finish as they began."
_ROLLBACK = (
    "Undo the last promotion of a deployment: its stable revision answers again, whole: adapter, engine build, "
    "parameters and price book. 409 if something else was promoted or deployed since. To another price book only the "
    "operator goes back (403)."
)
_EVENTS = "What happened to it, oldest first."
_METRICS = (
    "Both sides of a step: subjects, requests and tokens with their shares, errors, latencies, lengths, likelihood, and "
    "what each gate says of it in words. In a shadow step `canary` is what nobody saw."
)

_add_routes(tenant_router, "rollout", _tenant, "The tenant's rollouts")
_add_routes(
    platform_router, "platform_rollout", _platform, "Rollouts of the platform's own deployments"
)

routers = (tenant_router, platform_router)
