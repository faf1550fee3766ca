"""The fleet and the overview over HTTP."""

from __future__ import annotations

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.fleet import queries, service
from loraplex_platform.fleet.schemas import (
    FleetResource,
    OverviewResource,
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
    stats = [view.stats for view in views if view.stats is not None]
    held = {digest for one in stats for digest in (*one.adapters_resident, *one.adapters_host)}
    return FleetResource(
        replicas=[show_replica(view) for view in views],
        gateways=[show_gateway(gateway) for gateway in gateways],
        adapters=await queries.names_of_adapters(session, sorted(held)),
    )


@router.get("/overview")
@requires("fleet.read")
async def get_overview(context: Context, session: DbSession) -> OverviewResource:
    """Load, speed, what there is, and today's revenue (UTC) in dollars.

    Where what is counted is many, it is counted anew every few seconds: after a second per 50,000.
    """
    views = await context.fleet.views()
    counts = await context.counts.get(session)
    return service.overview(views, counts, await queries.count_recent(session))
