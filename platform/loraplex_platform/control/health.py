"""/live, /ready, /metrics."""

from __future__ import annotations

import asyncio
import ipaddress

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from loraplex_platform.control.auth import authorize
from loraplex_platform.control.context import Context, ControlContext
from loraplex_platform.control.permissions import ACTIONS
from loraplex_platform.errors import (
    InvalidApiKeyError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)

router = APIRouter(tags=["Health"])

READY_DEADLINE_S = 2.0


@router.get("/live")
async def live() -> dict[str, str]:
    """The process runs."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "The database cannot be reached."}})
async def ready(context: Context) -> Response:
    """The database answers. Engines, Redis and the adapter store may be down: most works without.

    `adapter_store` says how that was at the last look, `ok` or `unavailable`: without it nothing can be
    uploaded.
    """
    is_ready = await _answers(context)
    status = "ok" if is_ready else "database_unavailable"
    store = "ok" if context.store_watch.is_reachable else "unavailable"
    return JSONResponse({"status": status, "adapter_store": store}, 200 if is_ready else 503)


async def _answers(context: ControlContext) -> bool:
    try:
        async with asyncio.timeout(READY_DEADLINE_S), context.sessions() as session:
            await session.execute(text("select 1"))
    except (UnavailableError, SQLAlchemyError, OSError, TimeoutError):
        return False
    return True


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, context: Context) -> Response:
    """Prometheus metrics, for this machine or with the admin key; to others they do not exist."""
    if not _is_local(request):
        try:
            await authorize(request, context, ACTIONS["metrics.read"])
        except (InvalidApiKeyError, PermissionDeniedError):
            raise NotFoundError("There is no GET /metrics; see /docs.") from None
    return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _is_local(request: Request) -> bool:
    """A loopback peer, and no sign of a proxy on this machine that speaks for others."""
    if "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        return False
    if request.client is None:
        return True  # a unix socket
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
