"""The route classes of /admin/v1: authorise, open the transaction, run, keep the reply, commit.

The transaction of a tenant's member sees that member's tenants and nothing else, whatever a query
forgets (db/tenant_scope.py). FastAPI parses a body before it solves dependencies. Authorising here instead means that nobody
without credentials can make this process read or parse anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyCookie, HTTPBearer
from sqlalchemy import func, select

from loraplex_platform.audit.service import Actor
from loraplex_platform.control.auth import SESSION_COOKIE, Principal, authorize
from loraplex_platform.control.context import get_context
from loraplex_platform.control.idempotency import Idempotency
from loraplex_platform.control.permissions import Action, Reach, action_of
from loraplex_platform.control.schemas import ERROR_RESPONSES
from loraplex_platform.db.tenant_scope import enter_tenants, leave_tenants
from loraplex_platform.db.transactions import retry_lost_races
from loraplex_platform.rates.versions import tell_gateways

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

# For the OpenAPI page only; `authorize` decides.
_BEARER = HTTPBearer(auto_error=False, description="The admin key, lpx_ak_...")
_COOKIE = APIKeyCookie(name=SESSION_COOKIE, auto_error=False, description="Set by POST /sessions.")


class UndeclaredActionError(TypeError):
    """A route that nobody said who may call: refused by default, and before it can be."""


class PublicRoute(APIRoute):
    """For logging in: no credentials are asked for. The handler owns its transactions."""

    def get_route_handler(self) -> Handler:
        """As FastAPI calls it, once per route."""
        handle = super().get_route_handler()

        async def handle_public(request: Request) -> Response:
            await request.body()  # here, so that the body cap's error is ours to answer
            return await handle(request)

        return handle_public


class GuardedRoute(APIRoute):
    """Only for those who may do the action that its endpoint declares."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:  # noqa: ANN401 (FastAPI's own)
        """As FastAPI calls it.

        Raises:
            UndeclaredActionError: the endpoint does not say what its caller must be allowed to do.
        """
        action = action_of(endpoint)
        if action is None:
            raise UndeclaredActionError(
                f"{endpoint.__module__}.{endpoint.__qualname__} ({path}) has no @requires(...): "
                "name its action from control/permissions.py, below the router's decorator."
            )
        self.action: Action = action
        super().__init__(path, endpoint, **options)


class AdminRoute(GuardedRoute):
    """One transaction per request; POSTs take an Idempotency-Key over the whole body."""

    def get_route_handler(self) -> Handler:
        """As FastAPI calls it, once per route."""
        handle = super().get_route_handler()

        async def handle_for_principal(request: Request) -> Response:
            principal = await _identify(request, self.action)
            body = await request.body()
            keyed = None
            if request.method == "POST":
                sessions = get_context(request).sessions
                keyed = Idempotency.of(sessions, principal.name, request)
            if keyed is None:
                return await in_transaction(request, handle, is_repeatable=True)
            return await run_once(
                request,
                keyed,
                hashlib.sha256(body).digest(),
                lambda: handle(request),
                is_repeatable=True,
            )

        return handle_for_principal


class StreamedRoute(GuardedRoute):
    """Authorised like `AdminRoute`, but the handler reads the body and owns its transactions.

    For uploads, which must not be read into memory, and for streams, which outlive a transaction.
    """

    def get_route_handler(self) -> Handler:
        """As FastAPI calls it, once per route."""
        handle = super().get_route_handler()

        async def handle_for_principal(request: Request) -> Response:
            await _identify(request, self.action)
            if self.body_field is not None:
                await request.body()
            return await handle(request)

        return handle_for_principal


async def _identify(request: Request, action: Action) -> Principal:
    """Authorise, and leave who it is where handlers find it."""
    principal, reach = await authorize(request, get_context(request), action)
    request.state.principal = principal
    request.state.reach = reach
    request.state.actor = Actor(principal.kind, principal.actor_id, request.state.request_id)
    return principal


async def in_transaction(
    request: Request,
    handle: Handler,
    *,
    keyed: Idempotency | None = None,
    is_repeatable: bool = False,
) -> Response:
    """Run `handle` with `request.state.session`; commit unless it failed.

    Args:
        is_repeatable: all that `handle` changes is rolled back with the transaction, and the body is
            in memory: it is run again where the transaction has lost a race.
    """

    async def attempt() -> tuple[Response, datetime | None]:
        return await _run_transaction(request, handle, keyed)

    response, changed_at = await (retry_lost_races(attempt) if is_repeatable else attempt())
    if changed_at is not None:
        await tell_gateways(get_context(request).versions, changed_at)
    return response


async def _run_transaction(
    request: Request, handle: Handler, keyed: Idempotency | None
) -> tuple[Response, datetime | None]:
    """The response, and the `now()` of a transaction that may have changed something."""
    changed_at = None
    failpoints = get_context(request).failpoints
    async with get_context(request).sessions() as session:
        request.state.session = session
        reach: Reach = request.state.reach
        platform_role = None
        if reach.tenant_ids is not None:
            platform_role = await enter_tenants(session, reach.tenant_ids)
        response = await handle(request)
        if response.status_code < 400:
            # Written with the member's rights, and only then with ours: replies have no tenant.
            await session.flush()
            if platform_role is not None:
                await leave_tenants(session, platform_role)
            if keyed is not None:
                await keyed.finish(session, response)
            if request.method not in ("GET", "HEAD"):
                changed_at = await session.scalar(select(func.now()))
                failpoints.hit("before_commit")
            await session.commit()
    if changed_at is not None:
        failpoints.hit("after_commit")
    return response, changed_at


async def run_once(
    request: Request,
    keyed: Idempotency,
    fingerprint: bytes,
    operation: Callable[[], Awaitable[Response]],
    *,
    is_repeatable: bool = False,
) -> Response:
    """`operation` in a transaction, or its earlier reply. `is_repeatable`: see `in_transaction`."""
    replay = await keyed.begin(fingerprint)
    if replay is not None:
        return replay
    is_done = False
    try:

        async def handle(_: Request) -> Response:
            return await operation()

        response = await in_transaction(request, handle, keyed=keyed, is_repeatable=is_repeatable)
        is_done = response.status_code < 400
    finally:
        if not is_done:
            await keyed.abandon()
    return response


def admin_router(prefix: str, tag: str, route_class: type[APIRoute] = AdminRoute) -> APIRouter:
    """A router below /admin/v1 whose routes all authorise."""
    return APIRouter(
        prefix=f"/admin/v1{prefix}",
        tags=[tag],
        route_class=route_class,
        dependencies=[Security(_BEARER), Security(_COOKIE)],
        responses=ERROR_RESPONSES,
    )
