"""Evals over HTTP: a tenant's below the tenant, the platform's suites beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, cast
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from loraplex_platform.control.context import DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import EvalResult, EvalRun, EvalSchedule, EvalSuite
from loraplex_platform.evals import queries, service, suites
from loraplex_platform.evals.schemas import (
    ComparisonResource,
    NewRun,
    NewSchedule,
    NewSuite,
    ResultResource,
    RunResource,
    RunState,
    ScheduleChange,
    ScheduleResource,
    SeriesPoint,
    SeriesResource,
    SuiteResource,
    SuiteVersionResource,
    TraceResource,
    show_comparison,
    show_result,
    show_run,
    show_schedule,
    show_suite,
)
from loraplex_platform.ids import format_id
from loraplex_platform.tenancy.routes import Owner

suites_router = admin_router("/tenants/{tenant_id}/eval-suites", "Evals")
platform_suites_router = admin_router("/eval-suites", "Evals")
runs_router = admin_router("/tenants/{tenant_id}/eval-runs", "Evals")
schedules_router = admin_router("/tenants/{tenant_id}/eval-schedules", "Evals")
records_router = admin_router("/tenants/{tenant_id}", "Evals")

SuiteId = Annotated[str, Path(max_length=80, description="The suite's id, `evs_...`.")]
RunId = Annotated[str, Path(max_length=80, description="The run's id, `evr_...`.")]
ScheduleId = Annotated[str, Path(max_length=80, description="The schedule's id, `evd_...`.")]
VersionNumber = Annotated[int, Path(ge=1, le=2**31 - 1, description="1 is the first.")]


async def _tenant(owner: Owner) -> UUID:
    return owner.id


async def _platform() -> None:
    return None


def _add_suite_routes(
    router: APIRouter, action: str, owner_of: Callable[..., Any], whose: str
) -> None:
    """The same routes for a tenant's suites and the platform's: who owns them differs, and who may."""
    owns: Any = Depends(owner_of)

    @router.post("", status_code=201, description=_IMPORT.format(whose=whose))
    @requires(f"{action}.write")
    async def import_suite(
        body: NewSuite,
        request: Request,
        response: Response,
        session: DbSession,
        owner_id: UUID | None = owns,
    ) -> SuiteResource:
        made = await service.import_suite(session, request.state.actor, owner_id, body)
        if not made.is_new:
            response.status_code = 200
        return show_suite(made.suite, made.version)

    @router.get(
        "", description=f"{whose}, newest first, with their newest version. `search`: in the name."
    )
    @requires(f"{action}.read")
    async def list_suites(
        page: Paging, session: DbSession, search: Search = None, owner_id: UUID | None = owns
    ) -> ListPage[SuiteResource]:
        statement = queries.suites_of(owner_id, with_platforms=True)
        statement = holding(statement, search, EvalSuite.name)
        rows, has_more = await fetch(session, statement, EvalSuite.id, page, "eval_suite")
        newest = await queries.newest_versions(session, [suite.id for suite in rows])
        return to_list(rows, has_more, lambda suite: show_suite(suite, newest[suite.id]))

    @router.get("/{suite_id}", description="One suite and its newest version.")
    @requires(f"{action}.read")
    async def get_suite(
        suite_id: SuiteId, session: DbSession, owner_id: UUID | None = owns
    ) -> SuiteResource:
        suite = await service.get_suite(session, owner_id, suite_id, with_platforms=True)
        return show_suite(suite, await service.get_version(session, suite, None))

    @router.get("/{suite_id}/versions/{version}", description=_EXPORT)
    @requires(f"{action}.read")
    async def get_suite_version(
        suite_id: SuiteId, version: VersionNumber, session: DbSession, owner_id: UUID | None = owns
    ) -> SuiteVersionResource:
        suite = await service.get_suite(session, owner_id, suite_id, with_platforms=True)
        found = await service.get_version(session, suite, version)
        content = suites.load(found.content)
        trace = content if isinstance(content, suites.PerformanceContent) else None
        return SuiteVersionResource(
            id=format_id("eval_suite", suite.id),
            name=suite.name,
            kind=content.kind,
            version=found.number,
            sha256=found.sha256,
            num_cases=found.num_cases,
            lines=[json.loads(line) for line in suites.to_lines(content)],
            threshold=content.threshold if isinstance(content, suites.ChecksContent) else None,
            performance=None if trace is None else trace.thresholds,
            pace=None if trace is None else trace.pace,
            created_at=found.created_at,
        )

    @router.delete("/{suite_id}", status_code=204, description=_ARCHIVE)
    @requires(f"{action}.write")
    async def archive_suite(
        suite_id: SuiteId, request: Request, session: DbSession, owner_id: UUID | None = owns
    ) -> None:
        await service.archive_suite(session, request.state.actor, owner_id, suite_id)


_IMPORT = (
    "Add one of: {whose}, or the next version of one. The same lines are the same version (200). An "
    "error names the line, the field and the remedy."
)
_EXPORT = "One version with its lines, which `POST` makes the same version of again."
_ARCHIVE = "Take a suite away; runs of it stay. 409 while a schedule of the tenant's runs it."

_add_suite_routes(suites_router, "eval", _tenant, "The tenant's suites (lists: and the platform's)")
_add_suite_routes(platform_suites_router, "platform_eval", _platform, "The platform's suites")


@runs_router.post("", status_code=201)
@requires("eval.write")
async def start_run(
    owner: Owner, body: NewRun, request: Request, session: DbSession
) -> RunResource:
    """Ask a suite of a revision. The worker does it: at the serving engines, after everybody else's
    requests, at temperature 0 unless a case says otherwise, and at the platform's expense.
    """
    run = await service.start_run(session, request.state.actor, owner.id, body)
    return (await _shown(session, [run]))[0]


@runs_router.get("")
@requires("eval.read")
async def list_runs(
    owner: Owner,
    page: Paging,
    session: DbSession,
    suite_id: Annotated[str | None, Query(max_length=80, description="Only of this suite.")] = None,
    state: Annotated[RunState | None, Query(description="Only in this state.")] = None,
    search: Search = None,
) -> ListPage[RunResource]:
    """The tenant's runs, newest first. `search`: in the suite's name and the deployment's."""
    statement = queries.runs_of(owner.id)
    if suite_id is not None:
        suite = await service.get_suite(session, owner.id, suite_id, with_platforms=True)
        statement = queries.only_of_suite(statement, suite.id)
    if state is not None:
        statement = statement.where(EvalRun.state == state)
    if search and search.strip():
        statement = queries.named_runs(statement, search)
    rows, has_more = await fetch(session, statement, EvalRun.id, page, "eval_run")
    shown = {run.id: item for run, item in zip(rows, await _shown(session, rows), strict=True)}
    return to_list(rows, has_more, lambda run: shown[run.id])


@runs_router.get("/{run_id}")
@requires("eval.read")
async def get_run(owner: Owner, run_id: RunId, session: DbSession) -> RunResource:
    """One run, with how far it is."""
    run = await service.get_run(session, owner.id, run_id)
    return (await _shown(session, [run]))[0]


@runs_router.get("/{run_id}/results")
@requires("eval.read")
async def list_results(
    owner: Owner, run_id: RunId, page: Paging, session: DbSession
) -> ListPage[ResultResource]:
    """What became of each case, the last to end first; `case_index` is its place in the suite."""
    run = await service.get_run(session, owner.id, run_id)
    statement = queries.results_of(owner.id, run.id)
    rows, has_more = await fetch(session, statement, EvalResult.id, page, "eval_result")
    return to_list(rows, has_more, show_result)


@runs_router.post("/{run_id}/cancel")
@requires("eval.write")
async def cancel_run(
    owner: Owner, run_id: RunId, request: Request, session: DbSession
) -> RunResource:
    """End it; the results so far are kept."""
    run = await service.cancel_run(session, request.state.actor, owner.id, run_id)
    return (await _shown(session, [run]))[0]


@runs_router.get("/{run_id}/compare")
@requires("eval.read")
async def compare_runs(
    owner: Owner,
    run_id: RunId,
    session: DbSession,
    other: Annotated[
        str, Query(alias="with", max_length=80, description="The second run's id, `evr_...`.")
    ],
) -> ComparisonResource:
    """This run (the first) and another of the same suite (the second), case by case."""
    found = await service.compare_runs(session, owner.id, run_id, other)
    return show_comparison(
        found.first, found.second, found.found, found.first_results, found.second_results
    )


@records_router.get("/eval-series")
@requires("eval.read")
async def get_series(
    owner: Owner,
    session: DbSession,
    suite_id: Annotated[str, Query(max_length=80, description="The suite's id, `evs_...`.")],
    limit: Annotated[int, Query(ge=1, le=500, description="The newest so many.")] = 100,
) -> SeriesResource:
    """A suite's finished runs over time, oldest first, for charts."""
    suite = await service.get_suite(session, owner.id, suite_id, with_platforms=True)
    runs = await queries.series(session, owner.id, suite.id, limit)
    counts = await queries.status_counts(session, [run.id for run in runs])
    versions = await queries.versions_of_runs(session, [run.suite_version_id for run in runs])
    names = await queries.names_of_revisions(session, [run.revision_id for run in runs])
    points = [
        SeriesPoint(
            run_id=format_id("eval_run", run.id),
            ended_at=run.ended_at,
            state=cast(RunState, run.state),
            suite_version=versions[run.suite_version_id][2],
            deployment=names[run.revision_id][0],
            revision_id=format_id("deployment_revision", run.revision_id),
            revision=names[run.revision_id][1],
            score=run.score,
            counts=counts[run.id],
            figures=run.summary.get("figures"),
            fingerprints=run.fingerprints,
        )
        for run in runs
    ]
    return SeriesResource(suite_id=format_id("eval_suite", suite.id), data=points)


@records_router.get("/eval-trace")
@requires("eval.read")
async def get_trace(
    owner: Owner,
    session: DbSession,
    start_time: Annotated[int, Query(ge=0, le=2**33, description="Unix seconds.")],
    end_time: Annotated[
        int, Query(ge=0, le=2**33, description="Unix seconds; a day later at most.")
    ],
    keep_models: Annotated[
        bool, Query(description="Each asks its own deployment again, else all the one under test.")
    ] = False,
) -> TraceResource:
    """The tenant's own requests of that time as lines of a performance suite: when and how long, no text."""
    lines, is_cut = await service.trace_of(
        session,
        owner.id,
        datetime.fromtimestamp(start_time, UTC),
        datetime.fromtimestamp(end_time, UTC),
        keeps_models=keep_models,
    )
    return TraceResource(lines=lines, is_cut=is_cut)


@schedules_router.post("", status_code=201)
@requires("eval.write")
async def create_schedule(
    owner: Owner, body: NewSchedule, request: Request, response: Response, session: DbSession
) -> ScheduleResource:
    """Run a suite by itself, by a cron expression in a zone or every so many hours."""
    schedule = await service.create_schedule(session, request.state.actor, owner, body)
    set_etag(response, schedule.row_version)
    return show_schedule(schedule)


@schedules_router.get("")
@requires("eval.read")
async def list_schedules(
    owner: Owner, page: Paging, session: DbSession, search: Search = None
) -> ListPage[ScheduleResource]:
    """The tenant's schedules, newest first. `search`: in the name."""
    statement = holding(queries.schedules_of(owner.id), search, EvalSchedule.name)
    rows, has_more = await fetch(session, statement, EvalSchedule.id, page, "eval_schedule")
    return to_list(rows, has_more, show_schedule)


@schedules_router.get("/{schedule_id}")
@requires("eval.read")
async def get_schedule(
    owner: Owner, schedule_id: ScheduleId, response: Response, session: DbSession
) -> ScheduleResource:
    """One schedule; the ETag is for If-Match."""
    schedule = await service.get_schedule(session, owner.id, schedule_id)
    set_etag(response, schedule.row_version)
    return show_schedule(schedule)


@schedules_router.patch("/{schedule_id}")
@requires("eval.write")
async def change_schedule(
    owner: Owner,
    schedule_id: ScheduleId,
    body: ScheduleChange,
    version: IfMatch,
    request: Request,
    response: Response,
    session: DbSession,
) -> ScheduleResource:
    """Another time or zone, or on and off. Its next run is at the next time from now."""
    schedule = await service.change_schedule(
        session, request.state.actor, owner.id, schedule_id, body, version
    )
    set_etag(response, schedule.row_version)
    return show_schedule(schedule)


@schedules_router.delete("/{schedule_id}", status_code=204)
@requires("eval.write")
async def delete_schedule(
    owner: Owner, schedule_id: ScheduleId, request: Request, session: DbSession
) -> None:
    """Delete it; its runs stay."""
    await service.delete_schedule(session, request.state.actor, owner.id, schedule_id)


async def _shown(session: DbSession, runs: list[EvalRun]) -> list[RunResource]:
    counts = await queries.status_counts(session, [run.id for run in runs])
    versions = await queries.versions_of_runs(session, [run.suite_version_id for run in runs])
    return [show_run(run, versions[run.suite_version_id], counts[run.id]) for run in runs]


routers = (
    suites_router,
    platform_suites_router,
    runs_router,
    schedules_router,
    records_router,
)
