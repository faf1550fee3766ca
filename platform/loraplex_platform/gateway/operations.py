"""/live, /ready and /metrics: for whoever runs the process, not for tenants."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import text

from loraplex_platform.db.session import DatabaseUnavailableError
from loraplex_platform.errors import NotFoundError
from loraplex_platform.gateway.context import Gateway, ThisGateway
from loraplex_platform.gateway.spool import Spool

router = APIRouter(include_in_schema=False)

# A request that came through a proxy came from outside, whatever address the proxy has.
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


@router.get("/live")
async def live() -> JSONResponse:
    """The event loop turns."""
    return JSONResponse({"status": "live"})


@router.get("/ready")
async def ready(gateway: ThisGateway) -> JSONResponse:
    """200 if this gateway should get requests. Engines that are away do not count against it:

    without them it answers 503 with `Retry-After`, which a balancer with no gateway left cannot.
    """
    has_database = await _has_database(gateway)
    is_ready = has_database and not gateway.is_draining
    return JSONResponse(
        {
            "status": "ready" if is_ready else "not_ready",
            "draining": gateway.is_draining,
            "database": has_database,
            "spool": _spool_state(gateway.spool),
            "engines_ready": gateway.router.num_ready,
        },
        status_code=200 if is_ready else 503,
    )


@router.get("/metrics")
async def metrics(request: Request, gateway: ThisGateway) -> Response:
    """Prometheus metrics, for internal peers; a 404 like any other for the rest."""
    if not _is_internal(request, gateway):
        raise NotFoundError("There is nothing at this URL.")
    gateway.metrics.engines_ready.set(gateway.router.num_ready)
    body = generate_latest(gateway.metrics.registry)
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


def _spool_state(spool: Spool | None) -> dict[str, object] | None:
    """None: there is none, and what ends while the database is away waits in memory."""
    if spool is None:
        return None
    return {"pending": spool.num_pending, "writable": spool.is_writable}


async def _has_database(gateway: Gateway) -> bool:
    try:
        async with gateway.sessions() as session:
            await session.execute(text("select 1"))
    except DatabaseUnavailableError:
        return False
    return True


def _is_internal(request: Request, gateway: Gateway) -> bool:
    if any(name in request.headers for name in _PROXY_HEADERS):
        return False
    if request.client is None:  # a unix socket
        return True
    try:
        peer = ip_address(request.client.host)
    except ValueError:
        return False
    networks = gateway.settings.gateway_metrics_networks.split(",")
    return any(peer in ip_network(network.strip()) for network in networks)
