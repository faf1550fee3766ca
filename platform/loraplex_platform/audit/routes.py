"""The audit log over HTTP: search, export, and what proves it whole."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Depends, Path, Query, Request, Response

from loraplex_platform.audit.log_queries import (
    AuditFilter,
    chain_of,
    chains,
    entries,
    find_link,
)
from loraplex_platform.audit.schemas import (
    CSV_COLUMNS,
    PLATFORM_CHAIN,
    AuditChain,
    AuditEntry,
    AuditLink,
    chain_name,
    csv_row,
    show_chain,
    show_entry,
)
from loraplex_platform.control.context import DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import Reach, requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import AuditHead, AuditLog
from loraplex_platform.errors import InvalidRequestError, NotFoundError
from loraplex_platform.ids import MalformedIdError, parse_id
from loraplex_platform.metering.csv_export import to_csv
from loraplex_platform.metering.routes import TenantFilter, UnixTime

router = admin_router("/audit", "Audit")

# A file is made in one transaction and held in memory: longer ones are asked for in parts.
MAX_CSV_ROWS = 20_000

# Without control characters: Postgres refuses NUL, and no id has one.
_PLAIN = r"^[^\x00-\x1f]*$"
Word = Annotated[str | None, Query(max_length=80, pattern=_PLAIN)]


def _reached(request: Request, tenant: UUID | None) -> Collection[UUID] | None:
    """Whose entries: of the tenant that is named, else of all whom the caller may see."""
    reach: Reach = request.state.reach
    return reach.tenant_ids if tenant is None else frozenset({tenant})


async def _filter(
    request: Request,
    *,
    tenant: TenantFilter,
    action: Annotated[
        str | None,
        Query(
            max_length=64,
            pattern=_PLAIN,
            description="An action, or the beginning of one with `*`.",
            examples=["api_key.*"],
        ),
    ] = None,
    actor_id: Word = None,
    object_kind: Word = None,
    object_id: Word = None,
    request_id: Word = None,
    start_time: Annotated[UnixTime | None, Query(description="Unix seconds, inclusive.")] = None,
    end_time: Annotated[UnixTime | None, Query(description="Unix seconds, exclusive.")] = None,
) -> AuditFilter:
    return AuditFilter(
        tenant_ids=_reached(request, tenant),
        action=action,
        actor_id=actor_id,
        object_kind=object_kind,
        object_id=object_id,
        request_id=request_id,
        start=None if start_time is None else datetime.fromtimestamp(start_time, UTC),
        end=None if end_time is None else datetime.fromtimestamp(end_time, UTC),
    )


@router.get(
    "",
    response_model=ListPage[AuditEntry],
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
@requires("audit.read")
async def list_entries(
    wanted: Annotated[AuditFilter, Depends(_filter)],
    page: Paging,
    session: DbSession,
    format: Annotated[
        Literal["json", "csv"],
        Query(description=f"csv: all that was asked for, up to {MAX_CSV_ROWS} entries."),
    ] = "json",
) -> ListPage[AuditEntry] | Response:
    """Every change that was ever made here, newest first.

    A tenant's owners and admins see their tenants' own; the platform's people see all.
    """
    if format == "csv":
        return await _csv(session, wanted)
    rows, has_more = await fetch(session, entries(wanted), AuditLog.id, page, "audit_entry")
    return to_list(rows, has_more, show_entry)


async def _csv(session: DbSession, wanted: AuditFilter) -> Response:
    statement = entries(wanted).order_by(AuditLog.id.desc()).limit(MAX_CSV_ROWS + 1)
    rows = (await session.scalars(statement)).all()
    if len(rows) > MAX_CSV_ROWS:
        raise InvalidRequestError(
            f"format: these are more than {MAX_CSV_ROWS} entries; ask for them in parts, with "
            "start_time and end_time.",
            param="format",
        )
    return Response(
        to_csv([CSV_COLUMNS, *map(csv_row, rows)]),
        media_type="text/csv; charset=utf-8",
        headers={"content-disposition": 'attachment; filename="audit.csv"'},
    )


@router.get("/chains")
@requires("audit.read")
async def list_chains(
    request: Request, tenant: TenantFilter, page: Paging, session: DbSession
) -> ListPage[AuditChain]:
    """The newest row of every chain: one per tenant, and the platform's own.

    Keep what this says somewhere else from time to time: a log that was cut off behind such a row
    does not lead to it any more.
    """
    statement = chains(_reached(request, tenant))
    rows, has_more = await fetch(session, statement, AuditHead.chain, page, "tenant")
    return to_list(rows, has_more, show_chain)


@router.get("/chains/{chain}/{seq}")
@requires("audit.read")
async def get_link(
    request: Request,
    chain: Annotated[str, Path(max_length=80, description="A tenant's id, or `platform`.")],
    seq: Annotated[int, Path(ge=1, le=2**62)],
    session: DbSession,
) -> AuditLink:
    """The hash of one row, to be compared with what was kept elsewhere."""
    reach: Reach = request.state.reach
    try:
        tenant_id = None if chain == PLATFORM_CHAIN else parse_id("tenant", chain)
    except MalformedIdError:
        raise NotFoundError("No such chain.") from None
    wanted = chain_of(tenant_id)
    if reach.tenant_ids is not None and wanted not in reach.tenant_ids:
        raise NotFoundError("No such chain.")
    found = await find_link(session, wanted, seq)
    if found is None:
        raise NotFoundError("This chain has no such row.")
    return AuditLink(chain=chain_name(wanted), seq=seq, hash=found.hex())
