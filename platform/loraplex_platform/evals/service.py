"""Suites, runs and schedules: made, looked up, ended. What a run does is the worker's (`runner`).

All functions work in the caller's transaction and commit nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM, Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import (
    EvalResult,
    EvalRun,
    EvalSchedule,
    EvalSuite,
    EvalSuiteVersion,
    Tenant,
)
from loraplex_platform.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PlatformError,
)
from loraplex_platform.evals import comparison, queries, suites, timetable
from loraplex_platform.evals.comparison import CaseOutcome
from loraplex_platform.evals.records import RunOptions, Target
from loraplex_platform.evals.schemas import NewRun, NewSchedule, NewSuite, ScheduleChange
from loraplex_platform.ids import format_id, parse_id_or_none, uuid7, uuid7_floor
from loraplex_platform.registry.queries import lock_name

MAX_SUITES: Final = 500  # live ones, of one owner
MAX_ACTIVE_RUNS: Final = 50
MAX_SCHEDULES: Final = 100


@dataclass(frozen=True, slots=True)
class Imported:
    """A suite's version; `is_new` False: it was there already."""

    suite: EvalSuite
    version: EvalSuiteVersion
    is_new: bool


# ---------------------------------------------------------------------------- suites


async def import_suite(
    session: AsyncSession, actor: Actor, tenant_id: UUID | None, wanted: NewSuite
) -> Imported:
    """A suite, or its next version; the same lines again are the same version.

    Raises:
        SuiteLineError: a line is wrong.
        ConflictError: the name is of a suite of the other kind, or there are too many.
    """
    content: suites.Content
    if wanted.kind == "checks":
        content = suites.read_checks(wanted.lines, wanted.threshold)
        num_cases = len(content.cases)
    else:
        thresholds = wanted.performance or suites.PerformanceThresholds()
        content = suites.read_trace(wanted.lines, thresholds, wanted.pace or "recorded")
        num_cases = len(content.trace)
    text = suites.canonical(content)
    await lock_name(session, "eval_suite", str(tenant_id), wanted.name)
    suite = await queries.find_suite_by_name(session, tenant_id, wanted.name)
    if suite is None:
        if await queries.count_suites(session, tenant_id) >= MAX_SUITES:
            raise ConflictError(f"There are {MAX_SUITES} suites already; delete one.")
        suite = EvalSuite(id=uuid7(), tenant_id=tenant_id, name=wanted.name, kind=wanted.kind)
        session.add(suite)
        await session.flush()
    elif suite.kind != wanted.kind:
        raise ConflictError(
            f"kind: {wanted.name} is a suite of kind {suite.kind}; choose another name.",
            param="kind",
        )
    sha256 = suites.digest(text)
    known = await queries.find_version_by_digest(session, suite.id, sha256)
    if known is not None:
        return Imported(suite, known, is_new=False)
    newest = await queries.newest_version(session, suite.id)
    version = EvalSuiteVersion(
        id=uuid7(),
        tenant_id=tenant_id,
        suite_id=suite.id,
        number=1 if newest is None else newest.number + 1,
        sha256=sha256,
        num_cases=num_cases,
        content=text,
    )
    session.add(version)
    await session.flush()
    await session.refresh(version)
    await session.refresh(suite)
    _note(
        session,
        actor,
        "eval_suite.import",
        "eval_suite",
        suite.id,
        tenant_id,
        {"name": suite.name, "version": version.number, "sha256": sha256, "cases": num_cases},
    )
    return Imported(suite, version, is_new=True)


async def get_suite(
    session: AsyncSession, tenant_id: UUID | None, suite_id: str, *, with_platforms: bool = False
) -> EvalSuite:
    """A live suite.

    Raises:
        NotFoundError: the owner has none of this id.
    """
    wanted = parse_id_or_none("eval_suite", suite_id)
    suite = None
    if wanted is not None:
        suite = await queries.find_suite(session, tenant_id, wanted, with_platforms=with_platforms)
    if suite is None:
        raise NotFoundError("No such eval suite.", param="suite_id")
    return suite


async def get_version(
    session: AsyncSession, suite: EvalSuite, number: int | None
) -> EvalSuiteVersion:
    """By number, or the newest.

    Raises:
        NotFoundError: there is none of this number.
    """
    if number is None:
        version = await queries.newest_version(session, suite.id)
    else:
        version = await queries.find_version(session, suite.id, number)
    if version is None:
        raise NotFoundError("No such version of this suite.", param="suite_version")
    return version


async def archive_suite(
    session: AsyncSession, actor: Actor, tenant_id: UUID | None, suite_id: str
) -> None:
    """Take a suite away; what ran of it stays.

    Raises:
        NotFoundError: the owner has none of this id.
        ConflictError: a schedule of the tenant's runs it.
    """
    suite = await get_suite(session, tenant_id, suite_id)
    statement = queries.schedules_of(tenant_id) if tenant_id is not None else None
    if statement is not None:
        used = await session.scalar(statement.where(EvalSchedule.suite_id == suite.id).limit(1))
        if used is not None:
            raise ConflictError(f"The schedule {used.name} runs it; delete that first.")
    suite.archived_at = func.now()
    _note(
        session,
        actor,
        "eval_suite.archive",
        "eval_suite",
        suite.id,
        tenant_id,
        {"name": suite.name},
    )


# ---------------------------------------------------------------------------- runs


async def start_run(
    session: AsyncSession, actor: Actor, tenant_id: UUID, wanted: NewRun
) -> EvalRun:
    """Queue a run.

    Raises:
        NotFoundError: no such suite, version, deployment or revision of this tenant's or the platform's.
        InvalidRequestError: the suite compares with a baseline and none is named.
        ConflictError: too many runs wait.
    """
    return await _queue(session, actor, tenant_id, wanted, None)


async def _queue(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    wanted: NewRun,
    schedule_id: UUID | None,
) -> EvalRun:
    suite = await get_suite(session, tenant_id, wanted.suite_id, with_platforms=True)
    version = await get_version(session, suite, wanted.suite_version)
    target = await find_target(session, tenant_id, wanted.deployment, wanted.revision_id)
    baseline = None
    if wanted.baseline_revision_id is not None:
        baseline = await _get_revision(
            session, tenant_id, wanted.baseline_revision_id, "baseline_revision_id"
        )
    content = suites.load(version.content)
    if isinstance(content, suites.PerformanceContent) and baseline is not None:
        raise InvalidRequestError(
            "baseline_revision_id: a performance suite compares with no baseline; leave it out and "
            "compare two runs.",
            param="baseline_revision_id",
        )
    if isinstance(content, suites.ChecksContent) and baseline is None:
        case = next((case for case in content.cases if case.needs_baseline), None)
        if case is not None:
            raise InvalidRequestError(
                f"baseline_revision_id: the case {case.id} compares with a baseline; name its revision.",
                param="baseline_revision_id",
            )
    await lock_name(session, "eval_runs", str(tenant_id))
    if await queries.count_active(session, tenant_id) >= MAX_ACTIVE_RUNS:
        raise ConflictError(f"{MAX_ACTIVE_RUNS} runs wait already; try again when some have ended.")
    run = EvalRun(
        id=uuid7(),
        tenant_id=tenant_id,
        suite_version_id=version.id,
        deployment_id=target.deployment_id,
        revision_id=target.revision_id,
        baseline_revision_id=None if baseline is None else baseline.revision_id,
        schedule_id=schedule_id,
        options=wanted.options().to_json(),
        num_cases=version.num_cases,
    )
    session.add(run)
    await session.flush()
    await session.refresh(run)
    _note(
        session,
        actor,
        "eval_run.create",
        "eval_run",
        run.id,
        tenant_id,
        {
            "suite": suite.name,
            "version": version.number,
            "model": target.model,
            "revision": target.number,
        },
    )
    return run


async def find_target(
    session: AsyncSession, tenant_id: UUID, deployment: str | None, revision_id: str | None
) -> Target:
    """What is asked: a revision, or the one that a deployment stands for now.

    Raises:
        NotFoundError: neither the tenant nor the platform has it.
    """
    if revision_id is not None:
        return await _get_revision(session, tenant_id, revision_id, "revision_id")
    target = await queries.find_current_target(session, tenant_id, deployment or "")
    if target is None:
        raise NotFoundError("No such deployment.", param="deployment")
    return target


async def _get_revision(
    session: AsyncSession, tenant_id: UUID, revision_id: str, param: str
) -> Target:
    wanted = parse_id_or_none("deployment_revision", revision_id)
    target = None if wanted is None else await queries.find_target(session, tenant_id, wanted)
    if target is None:
        raise NotFoundError("No such deployment revision.", param=param)
    return target


async def get_run(
    session: AsyncSession, tenant_id: UUID, run_id: str, *, for_update: bool = False
) -> EvalRun:
    """A run of the tenant's.

    Raises:
        NotFoundError: there is none.
    """
    wanted = parse_id_or_none("eval_run", run_id)
    run = None
    if wanted is not None:
        run = await queries.find_run(session, tenant_id, wanted, for_update=for_update)
    if run is None:
        raise NotFoundError("No such eval run.", param="run_id")
    return run


async def cancel_run(session: AsyncSession, actor: Actor, tenant_id: UUID, run_id: str) -> EvalRun:
    """End a run: at once if it waits, within seconds if it goes on; results so far are kept.

    Raises:
        NotFoundError: there is none.
        ConflictError: it has ended.
    """
    run = await get_run(session, tenant_id, run_id, for_update=True)
    if run.state not in queries.ACTIVE:
        raise ConflictError(f"This run has ended ({run.state}).")
    run.cancel_requested_at = func.now()
    if run.state == "queued":
        run.state = "cancelled"
        run.ended_at = func.now()
        run.error = "cancelled before it began"
    _note(session, actor, "eval_run.cancel", "eval_run", run.id, tenant_id, {})
    await session.flush()
    await session.refresh(run)
    return run


@dataclass(frozen=True, slots=True)
class Compared:
    """Two runs, their results by case id, and what differs."""

    first: EvalRun
    second: EvalRun
    first_results: dict[str, EvalResult]
    second_results: dict[str, EvalResult]
    found: comparison.Comparison


async def compare_runs(
    session: AsyncSession, tenant_id: UUID, first_id: str, second_id: str
) -> Compared:
    """Two ended runs of one suite side by side, of whichever of its versions.

    Raises:
        NotFoundError: one of them is not the tenant's.
        ConflictError: one has not ended, or they are of two suites, or of a performance suite.
    """
    runs = [await get_run(session, tenant_id, run_id) for run_id in (first_id, second_id)]
    versions = await queries.versions_of_runs(session, [run.suite_version_id for run in runs])
    if len({versions[run.suite_version_id][0] for run in runs}) > 1:
        raise ConflictError("These are runs of two suites; compare two of one suite.", param="with")
    for run in runs:
        if run.state in queries.ACTIVE:
            raise ConflictError(f"{format_id('eval_run', run.id)} has not ended yet.", param="with")
        if "figures" in run.summary:
            raise ConflictError("A performance suite has no cases to compare: read its series.")
    first, second = [
        {row.case_id: row for row in await queries.all_results(session, tenant_id, run.id)}
        for run in runs
    ]
    found = comparison.compare(outcomes_of(first), outcomes_of(second))
    return Compared(runs[0], runs[1], first, second, found)


def outcomes_of(results: dict[str, EvalResult]) -> dict[str, CaseOutcome]:
    """Rows as `comparison` takes them."""
    return {
        case_id: CaseOutcome(
            case_id=case_id,
            status=row.status,
            reason=row.reason,
            output=row.output,
            mean_logprob=row.mean_logprob,
            bits_sha256=row.bits_sha256,
            build_sha256=row.build_sha256,
        )
        for case_id, row in results.items()
    }


# ---------------------------------------------------------------------------- schedules


async def create_schedule(
    session: AsyncSession, actor: Actor, tenant: Tenant, wanted: NewSchedule
) -> EvalSchedule:
    """Have a suite run by itself.

    Raises:
        InvalidRequestError: no such time, or zone.
        NotFoundError: as `start_run`.
        ConflictError: the name is taken, or there are too many.
    """
    suite = await get_suite(session, tenant.id, wanted.suite_id, with_platforms=True)
    await get_version(session, suite, wanted.suite_version)
    target = await find_target(session, tenant.id, wanted.deployment, wanted.revision_id)
    baseline = None
    if wanted.baseline_revision_id is not None:
        baseline = await _get_revision(
            session, tenant.id, wanted.baseline_revision_id, "baseline_revision_id"
        )
    await lock_name(session, "eval_schedules", str(tenant.id))
    found = (await session.scalars(queries.schedules_of(tenant.id))).all()
    if any(schedule.name == wanted.name for schedule in found):
        raise ConflictError(f"name: the schedule {wanted.name} is there already.", param="name")
    if len(found) >= MAX_SCHEDULES:
        raise ConflictError(f"There are {MAX_SCHEDULES} schedules already; delete one.")
    zone = wanted.zone or tenant.billing_tz
    schedule = EvalSchedule(
        id=uuid7(),
        tenant_id=tenant.id,
        name=wanted.name,
        suite_id=suite.id,
        suite_version=wanted.suite_version,
        deployment=wanted.deployment,
        revision_id=None if wanted.revision_id is None else target.revision_id,
        baseline_revision_id=None if baseline is None else baseline.revision_id,
        cron=wanted.cron,
        every_hours=wanted.every_hours,
        zone=zone,
        options=wanted.options().to_json(),
        next_at=_next(wanted.cron, wanted.every_hours, zone),
    )
    session.add(schedule)
    await session.flush()
    await session.refresh(schedule)
    _note(
        session,
        actor,
        "eval_schedule.create",
        "eval_schedule",
        schedule.id,
        tenant.id,
        {"name": schedule.name, "suite": suite.name},
    )
    return schedule


async def get_schedule(
    session: AsyncSession, tenant_id: UUID, schedule_id: str, *, for_update: bool = False
) -> EvalSchedule:
    """A schedule of the tenant's.

    Raises:
        NotFoundError: there is none.
    """
    wanted = parse_id_or_none("eval_schedule", schedule_id)
    schedule = None
    if wanted is not None:
        schedule = await queries.find_schedule(session, tenant_id, wanted, for_update=for_update)
    if schedule is None:
        raise NotFoundError("No such eval schedule.", param="schedule_id")
    return schedule


async def change_schedule(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    schedule_id: str,
    change: ScheduleChange,
    version: int | None,
) -> EvalSchedule:
    """Another time, or on and off. Switched on again it is due at its next time, not at once.

    Raises:
        NotFoundError: there is none.
        InvalidRequestError: no such time, or zone.
        VersionConflictError: it has changed since it was read.
    """
    schedule = await get_schedule(session, tenant_id, schedule_id, for_update=True)
    changes = {
        name: value
        for name, value in change.model_dump(exclude_unset=True).items()
        if value is not None
    }
    before = _facts(schedule)
    check_version(version, schedule.row_version, changes, before)
    if not changes:
        return schedule
    if "cron" in changes:
        schedule.every_hours = None
    if "every_hours" in changes:
        schedule.cron = None
    for name, value in changes.items():
        setattr(schedule, name, value)
    schedule.next_at = _next(schedule.cron, schedule.every_hours, schedule.zone)
    schedule.row_version += 1
    record(
        session,
        actor,
        "eval_schedule.update",
        "eval_schedule",
        format_id("eval_schedule", schedule.id),
        tenant_id=tenant_id,
        before=before,
        after=_facts(schedule),
    )
    await session.flush()
    await session.refresh(schedule)
    return schedule


async def delete_schedule(
    session: AsyncSession, actor: Actor, tenant_id: UUID, schedule_id: str
) -> None:
    """Take it away; its runs stay.

    Raises:
        NotFoundError: there is none.
    """
    schedule = await get_schedule(session, tenant_id, schedule_id, for_update=True)
    await session.delete(schedule)
    _note(
        session,
        actor,
        "eval_schedule.delete",
        "eval_schedule",
        schedule.id,
        tenant_id,
        {"name": schedule.name},
    )


async def start_due(session: AsyncSession, now: datetime) -> bool:
    """Queue the run of one schedule that is due; False if none is.

    What was missed while no worker ran is made up for by one run, not by many. A schedule whose suite or
    deployment is gone keeps why in `last_error` and tries again at its next time.
    """
    schedule = await queries.take_due_schedule(session, now)
    if schedule is None:
        return False
    schedule.next_at = timetable.next_after(
        now, cron=schedule.cron, every_hours=schedule.every_hours, zone=schedule.zone
    )
    wanted = NewRun(
        suite_id=format_id("eval_suite", schedule.suite_id),
        suite_version=schedule.suite_version,
        deployment=schedule.deployment,
        revision_id=None
        if schedule.revision_id is None
        else format_id("deployment_revision", schedule.revision_id),
        baseline_revision_id=None
        if schedule.baseline_revision_id is None
        else format_id("deployment_revision", schedule.baseline_revision_id),
        **schedule.options,
    )
    try:
        async with session.begin_nested():
            run = await _queue(session, SYSTEM, schedule.tenant_id, wanted, schedule.id)
    except PlatformError as error:
        schedule.last_error = error.message
    else:
        schedule.last_run_id, schedule.last_error = run.id, None
    return True


def _next(cron: str | None, every_hours: int | None, zone: str) -> datetime:
    now = datetime.now(UTC)
    try:
        if cron is not None:
            timetable.check(now, cron, zone)
        return timetable.next_after(now, cron=cron, every_hours=every_hours, zone=zone)
    except timetable.TimetableError as error:
        raise InvalidRequestError(str(error), param=str(error).partition(":")[0]) from None


def _facts(schedule: EvalSchedule) -> dict[str, Any]:
    return {
        "cron": schedule.cron,
        "every_hours": schedule.every_hours,
        "zone": schedule.zone,
        "is_enabled": schedule.is_enabled,
    }


# ---------------------------------------------------------------------------- traces


async def trace_of(
    session: AsyncSession, tenant_id: UUID, since: datetime, until: datetime, *, keeps_models: bool
) -> tuple[list[dict[str, Any]], bool]:
    """The tenant's own requests of that time as lines of a performance suite, and whether there were more.

    Args:
        keeps_models: each asks its own deployment again; else all ask the revision under test.

    Raises:
        InvalidRequestError: not a time span, or one that is longer than a trace.
    """
    if not 0 < (until - since).total_seconds() <= 86_400:
        raise InvalidRequestError(
            "end_time: a trace is at most one day, and ends after its start_time.", param="end_time"
        )
    most = suites.MAX_TRACE_LINES
    rows = await queries.settled_requests(
        session, tenant_id, _floor(since), _floor(until), most + 1
    )
    start = rows[0][0] if rows else since
    lines = [
        {
            "at_s": round(max(0.0, (at - start).total_seconds()), 3),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
        }
        | ({"model": model} if keeps_models else {})
        for at, prompt, completion, model in rows[:most]
    ]
    return lines, len(rows) > most


def _floor(at: datetime) -> UUID:
    return uuid7_floor(int(at.timestamp() * 1000))


# ---------------------------------------------------------------------------- insides


def options_of(run: EvalRun) -> RunOptions:
    """How a run is carried out."""
    return RunOptions.from_json(run.options)


def _note(
    session: AsyncSession,
    actor: Actor,
    action: str,
    kind: str,
    object_id: UUID,
    tenant_id: UUID | None,
    detail: dict[str, Any],
) -> None:
    record(
        session, actor, action, kind, format_id(kind, object_id), tenant_id=tenant_id, detail=detail
    )
