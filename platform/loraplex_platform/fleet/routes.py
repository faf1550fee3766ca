"""The fleet and the overview over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.fleet import queries, service
from loraplex_platform.fleet.schemas import (
    FleetResource,
    OverviewResource,
    PinResource,
    show_gateway,
    show_replica,
)

router = admin_router("", "Fleet")


@router.get("/fleet")
@requires("fleet.read")
async def get_fleet(context: Context, session: DbSession) -> FleetResource:
    """Live engine replicas with their statistics, and the gateways."""
    views = await context.fleet.views()
    gateways = await queries.live_gateways(session)
    return FleetResource(
        replicas=[show_replica(view) for view in views],
        gateways=[show_gateway(gateway) for gateway in gateways],
    )


AdapterDigest = Annotated[
    str, Path(pattern="^sha256:[0-9a-f]{64}$", description="An adapter version's digest.")
]


@router.put("/fleet/pins/{digest}")
@requires("fleet.write")
async def pin_adapter(
    digest: AdapterDigest, request: Request, context: Context, session: DbSession
) -> PinResource:
    """Have every replica load an adapter and keep it in memory, however seldom it is used.

    Refused where no replica can (409), with their reasons. A replica that starts later is not told:
    give it `--pin-adapter`.
    """
    return await service.set_pin(
        session, request.state.actor, context.fleet, digest, is_wanted=True
    )


@router.delete("/fleet/pins/{digest}")
@requires("fleet.write")
async def unpin_adapter(
    digest: AdapterDigest, request: Request, context: Context, session: DbSession
) -> PinResource:
    """Let every replica evict an adapter like any other. Where it is not pinned nothing changes."""
    return await service.set_pin(
        session, request.state.actor, context.fleet, digest, is_wanted=False
    )


@router.get("/overview")
@requires("fleet.read")
async def get_overview(context: Context, session: DbSession) -> OverviewResource:
    """Load, speed, what there is, and today's revenue (UTC) in dollars."""
    views = await context.fleet.views()
    return service.overview(views, await queries.count_objects(session))
