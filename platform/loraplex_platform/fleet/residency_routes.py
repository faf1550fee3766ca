"""Residency and drift over HTTP: the operator's."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import ResidentAdapter
from loraplex_platform.fleet import residency
from loraplex_platform.fleet import residency_queries as queries
from loraplex_platform.fleet.residency_schemas import (
    DriftResource,
    NewResidency,
    ReleasedResidency,
    ResidencyResource,
    ToldResidency,
    show_drift,
    show_outcomes,
    show_residency,
)

router = admin_router("/fleet", "Fleet")

VersionId = Annotated[
    str, Path(max_length=80, description="An adapter version of any tenant, `ver_...`.")
]


@router.get("/residency")
@requires("fleet.read")
async def list_residency(page: Paging, session: DbSession) -> ListPage[ResidencyResource]:
    """Adapter versions that every replica keeps in memory."""
    rows, has_more = await fetch(
        session, queries.residents(), ResidentAdapter.version_id, page, "adapter_version"
    )
    names = await queries.names_of(session, [row.version_id for row in rows])
    return to_list(rows, has_more, lambda row: show_residency(row, names[row.version_id]))


@router.put("/residency/{version_id}")
@requires("fleet.write")
async def put_residency(
    version_id: VersionId,
    body: NewResidency,
    request: Request,
    context: Context,
    session: DbSession,
) -> ToldResidency:
    """Have every replica of its base load an adapter version and keep it in memory, however seldom it is used.

    It is desired state: a replica that starts later, or again, is told by the worker within seconds. Refused
    (409) where all replicas that answer refuse, with their reasons.
    """
    resident, outcomes = await residency.put(
        session, request.state.actor, context.fleet, version_id, body.reason
    )
    names = await queries.names_of(session, [resident.version_id])
    shown = show_residency(resident, names[resident.version_id])
    return ToldResidency(**shown.model_dump(), replicas=show_outcomes(outcomes))


@router.delete("/residency/{version_id}")
@requires("fleet.write")
async def delete_residency(
    version_id: VersionId, request: Request, context: Context, session: DbSession
) -> ReleasedResidency:
    """Let every replica evict a version like any other; what runs with it finishes. Other tenants' versions of
    the same content are not touched.
    """
    outcomes = await residency.remove(session, request.state.actor, context.fleet, version_id)
    return ReleasedResidency(id=version_id, replicas=show_outcomes(outcomes))


@router.get("/drift")
@requires("fleet.read")
async def get_drift(context: Context, session: DbSession) -> DriftResource:
    """Where the fleet is not as it is desired: adapters that a replica does not keep in memory, with the
    engine's reason; engine builds that something live names and no replica runs; other weights than named.
    """
    views = await context.fleet.views()
    return show_drift(
        views,
        await queries.desired_adapters(session),
        await queries.wanted_builds(session),
        context.fleet.running_builds(),
        await queries.base_revisions(session),
    )
