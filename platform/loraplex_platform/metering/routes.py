"""Usage, the request log and the invariants over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Depends, Query, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.context import Context, ControlContext, DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import Reach, requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Request
from loraplex_platform.db.errors import StatementTimeoutError
from loraplex_platform.db.tenant_scope import enter_tenants
from loraplex_platform.errors import InvalidRequestError, NotFoundError
from loraplex_platform.ids import PREFIXES, MalformedIdError, parse_id
from loraplex_platform.metering import request_log
from loraplex_platform.metering.csv_export import to_csv
from loraplex_platform.metering.invariant_runs import check_and_keep, find_last, report_of
from loraplex_platform.metering.invariants import check_invariants
from loraplex_platform.metering.records import Arm
from loraplex_platform.metering.schemas import (
    InvariantsResource,
    RequestResource,
    UsageReport,
    encode_usage,
    show_invariants,
    show_request,
    usage_columns,
    usage_fields,
)
from loraplex_platform.metering.usage import (
    FILE_ROWS,
    MAX_ROWS,
    BucketWidth,
    GroupBy,
    UsageFilter,
    UsagePage,
    UsageQuery,
    report_usage,
)
from loraplex_platform.tenancy import service as tenancy

router = admin_router("", "Usage and money")

_FIRST_UNIX_S = 0
_LAST_UNIX_S = 32_503_680_000  # the year 3000

UnixTime = Annotated[int, Query(ge=_FIRST_UNIX_S, le=_LAST_UNIX_S)]


async def _tenant_filter(
    session: DbSession,
    tenant_id: Annotated[
        str | None, Query(description="Only this tenant's; all of them if not given.")
    ] = None,
) -> UUID | None:
    if tenant_id is None:
        return None
    try:
        tenant_uuid = parse_id("tenant", tenant_id)
    except MalformedIdError:
        raise NotFoundError("No such tenant.", param="tenant_id") from None
    return (await tenancy.get_tenant(session, tenant_uuid)).id


TenantFilter = Annotated[UUID | None, Depends(_tenant_filter)]


def _id_filter(kind: str, name: str, text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        return parse_id(kind, text)
    except MalformedIdError:
        raise InvalidRequestError(
            f"{name}: pass an id, {PREFIXES[kind]}_ and 32 hex digits.", param=name
        ) from None


async def _usage_filter(
    *,
    tenant: TenantFilter,
    project_id: Annotated[str | None, Query(description="Only this project's.")] = None,
    key_id: Annotated[str | None, Query(description="Only this key's.")] = None,
    model: Annotated[
        str | None, Query(max_length=128, description="Only of this model name.")
    ] = None,
    deployment_id: Annotated[str | None, Query(description="Only of this deployment.")] = None,
    adapter_version_id: Annotated[
        str | None, Query(description="Only of this adapter version.")
    ] = None,
    price_book_id: Annotated[
        str | None, Query(description="Only what was billed by this price book.")
    ] = None,
    revision_id: Annotated[
        str | None,
        Query(description="Only what this revision answered, `rev_...`; of 1m and 1h only."),
    ] = None,
) -> UsageFilter:
    if model is not None and "\0" in model:
        raise InvalidRequestError("model: it must not hold NUL.", param="model")
    return UsageFilter(
        tenant_id=tenant,
        project_id=_id_filter("project", "project_id", project_id),
        key_id=_id_filter("api_key", "key_id", key_id),
        model=model,
        deployment_id=_id_filter("deployment", "deployment_id", deployment_id),
        adapter_version_id=_id_filter("adapter_version", "adapter_version_id", adapter_version_id),
        price_book_id=_id_filter("price_book", "price_book_id", price_book_id),
        revision_id=_id_filter("deployment_revision", "revision_id", revision_id),
    )


async def _usage_query(
    *,
    only: Annotated[UsageFilter, Depends(_usage_filter)],
    start_time: Annotated[UnixTime, Query(description="Unix seconds, inclusive.")],
    end_time: Annotated[
        UnixTime | None, Query(description="Unix seconds, exclusive; now if not given.")
    ] = None,
    bucket_width: Annotated[
        BucketWidth,
        Query(
            description="1d and 1mo: whole days and months in the tenant's billing time zone. 1m and "
            "1h: UTC, over at most 2 and 8 days."
        ),
    ] = "1d",
    group_by: Annotated[
        list[GroupBy] | None,
        Query(alias="group_by[]", max_length=8, description="Repeat it for several."),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=MAX_ROWS, description="Rows per page of JSON.")
    ] = MAX_ROWS,
    page: Annotated[
        str | None, Query(max_length=1000, description="The `next_page` of the page before.")
    ] = None,
) -> UsageQuery:
    end = datetime.now(UTC) if end_time is None else datetime.fromtimestamp(end_time, UTC)
    return UsageQuery(
        start=datetime.fromtimestamp(start_time, UTC),
        end=end,
        bucket_width=bucket_width,
        group_by=tuple(dict.fromkeys(group_by or ())),
        only=only,
        limit=limit,
        page=page,
    )


@router.get(
    "/usage",
    response_model=UsageReport,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
@requires("usage.read")
async def get_usage(
    query: Annotated[UsageQuery, Depends(_usage_query)],
    request: HttpRequest,
    context: Context,
    session: DbSession,
    format: Annotated[
        Literal["json", "csv"], Query(description="csv: the whole report, not one page.")
    ] = "json",
) -> Response:
    """Settled requests, their tokens and exact dollars, by time and group.

    From the same rows as the bill. Probes are not in it: the platform pays for those.
    """
    if format == "csv":
        query = replace(query, limit=FILE_ROWS)  # `limit` cuts pages, and a file has none
    first = await report_usage(session, query)
    if format == "csv":
        name = f"usage-{query.start:%Y%m%d}-{query.end:%Y%m%d}.csv"
        return StreamingResponse(
            _csv(context, request.state.reach, query, first),
            media_type="text/csv; charset=utf-8",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )
    return Response(encode_usage(first, query), media_type="application/json")


async def _csv(
    context: ControlContext, reach: Reach, query: UsageQuery, first: UsagePage
) -> AsyncIterator[str]:
    yield to_csv([usage_columns(query)])
    page = first
    while True:
        yield to_csv([list(usage_fields(row, query).values()) for row in page.rows])
        if page.next_page is None:
            return
        async with context.sessions() as session:
            if reach.tenant_ids is not None:
                await enter_tenants(session, reach.tenant_ids)
            page = await report_usage(session, replace(query, page=page.next_page))


@router.get("/requests")
@requires("request.read")
async def list_requests(
    tenant: TenantFilter,
    page: Paging,
    session: DbSession,
    *,
    revision_id: Annotated[
        str | None, Query(description="Only what this revision answered, `rev_...`.")
    ] = None,
    rollout_id: Annotated[
        str | None, Query(description="Only the requests of this rollout, `rol_...`.")
    ] = None,
    arm: Annotated[Arm | None, Query(description="Only those of this side.")] = None,
) -> ListPage[RequestResource]:
    """The request log, newest first: metadata only, never what was said."""
    statement = await request_log.requests_of(
        session,
        tenant,
        revision_id=_id_filter("deployment_revision", "revision_id", revision_id),
        rollout_id=_id_filter("rollout", "rollout_id", rollout_id),
        arm=arm,
    )
    rows, has_more = await fetch(session, statement, Request.id, page, "request")
    return to_list(rows, has_more, show_request)


@router.get("/invariants")
@requires("invariant.read")
async def get_invariants(
    context: Context,
    session: DbSession,
    run: Annotated[
        Literal["now", "last"],
        Query(
            description="now: check all of the books, which takes its time where they are long. "
            "last: what was found when they were last checked."
        ),
    ] = "now",
) -> InvariantsResource:
    """Do the books add up: generated = billed + absorbed + discarded, and all that follows.

    `last_run` says when they were last checked on their own, and by whom.
    """
    last = await find_last(session)
    if run == "now":
        with _told_if_too_long():
            return show_invariants(await check_invariants(context.sessions), last)
    if last is None:
        raise NotFoundError("No check was kept yet; the worker makes one every hour.")
    return show_invariants(report_of(last), last)


@router.post("/invariants", status_code=201)
@requires("invariant.write")
async def check_invariants_now(
    request: HttpRequest, context: Context, session: DbSession
) -> InvariantsResource:
    """Check all of the books, and keep what was found as the last run."""
    actor: Actor = request.state.actor
    record(session, actor, "invariants.check", "books", None)
    with _told_if_too_long():
        report = await check_and_keep(context.sessions, actor.id or actor.kind)
    return show_invariants(report, await find_last(session))


@contextmanager
def _told_if_too_long() -> Iterator[None]:
    try:
        yield
    except StatementTimeoutError as error:
        raise StatementTimeoutError(
            "The books are too long to be checked while you wait. The worker checks the last two days every hour "
            "(run=last); `loraplex reconcile` checks all of them, and takes the time that needs."
        ) from error
