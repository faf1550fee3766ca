"""Alerts over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query, Request

from loraplex_platform.alerts import queries
from loraplex_platform.alerts.schemas import AlertResource, show_alert
from loraplex_platform.alerts.words import AlertKind
from loraplex_platform.control.context import DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import Reach, requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Alert
from loraplex_platform.metering.routes import TenantFilter, UnixTime

router = admin_router("/alerts", "Alerts")


@router.get("")
@requires("alert.read")
async def list_alerts(
    request: Request,
    tenant: TenantFilter,
    page: Paging,
    session: DbSession,
    kind: Annotated[AlertKind | None, Query(description="Only of this kind.")] = None,
    start_time: Annotated[UnixTime | None, Query(description="Unix seconds, inclusive.")] = None,
    end_time: Annotated[UnixTime | None, Query(description="Unix seconds, exclusive.")] = None,
) -> ListPage[AlertResource]:
    """What somebody should look at, newest first: thresholds of limits that were passed, pins that end, evals
    whose result changed though nothing else did, rollouts that gates hold or abort, webhooks that were
    switched off.

    Members see their tenants' own; the platform's people see all. Kept as long as retention says.
    """
    reach: Reach = request.state.reach
    wanted = queries.AlertFilter(
        tenant_ids=reach.tenant_ids if tenant is None else frozenset({tenant}),
        kind=kind,
        start=None if start_time is None else datetime.fromtimestamp(start_time, UTC),
        end=None if end_time is None else datetime.fromtimestamp(end_time, UTC),
    )
    rows, has_more = await fetch(session, queries.alerts(wanted), Alert.id, page, "alert")
    zones = await queries.zones_of(session, rows)
    return to_list(
        rows,
        has_more,
        lambda row: show_alert(row, zones.get(row.tenant_id, "UTC") if row.tenant_id else "UTC"),
    )
