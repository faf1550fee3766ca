"""SQL of suites, runs, results and schedules. A tenant's things take its id."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Select, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased, defer

from loraplex_platform.db import (
    BaseModel,
    Deployment,
    DeploymentRevision,
    EngineBuild,
    EvalResult,
    EvalRun,
    EvalSchedule,
    EvalSuite,
    EvalSuiteVersion,
    Request,
    Rollout,
)
from loraplex_platform.evals.records import Target
from loraplex_platform.gateway.builds import BuildRule
from loraplex_platform.ids import uuid7

ACTIVE = ("queued", "running")

# ---------------------------------------------------------------------------- suites


def suites_of(tenant_id: UUID | None, *, with_platforms: bool = False) -> Select[EvalSuite]:
    """The tenant's live suites (None: the platform's); `with_platforms`: and the platform's."""
    own = EvalSuite.tenant_id.is_(None) if tenant_id is None else EvalSuite.tenant_id == tenant_id
    if with_platforms:
        own = or_(own, EvalSuite.tenant_id.is_(None))
    return select(EvalSuite).where(own, EvalSuite.archived_at.is_(None))


async def find_suite(
    session: AsyncSession, tenant_id: UUID | None, suite_id: UUID, *, with_platforms: bool = False
) -> EvalSuite | None:
    """By id, only if the owner owns it, or may use it."""
    statement = suites_of(tenant_id, with_platforms=with_platforms).where(EvalSuite.id == suite_id)
    return await session.scalar(statement)


async def find_suite_by_name(
    session: AsyncSession, tenant_id: UUID | None, name: str
) -> EvalSuite | None:
    """By name."""
    return await session.scalar(suites_of(tenant_id).where(EvalSuite.name == name))


async def count_suites(session: AsyncSession, tenant_id: UUID | None) -> int:
    """Live ones."""
    statement = select(func.count()).select_from(suites_of(tenant_id).subquery())
    return int((await session.execute(statement)).scalar_one())


async def newest_version(session: AsyncSession, suite_id: UUID) -> EvalSuiteVersion | None:
    """Of a suite that the caller has found by its owner."""
    return await session.scalar(
        select(EvalSuiteVersion)
        .where(EvalSuiteVersion.suite_id == suite_id)
        .order_by(EvalSuiteVersion.number.desc())
        .limit(1)
    )


async def newest_versions(
    session: AsyncSession, suite_ids: Sequence[UUID]
) -> dict[UUID, EvalSuiteVersion]:
    """The newest of each, without their content."""
    newest = (
        select(EvalSuiteVersion.suite_id, func.max(EvalSuiteVersion.number).label("number"))
        .where(EvalSuiteVersion.suite_id.in_(suite_ids))
        .group_by(EvalSuiteVersion.suite_id)
        .subquery()
    )
    rows = await session.scalars(
        select(EvalSuiteVersion)
        .join(
            newest,
            (newest.c.suite_id == EvalSuiteVersion.suite_id)
            & (newest.c.number == EvalSuiteVersion.number),
        )
        .options(defer(EvalSuiteVersion.content, raiseload=True))
    )
    return {version.suite_id: version for version in rows}


async def find_version(
    session: AsyncSession, suite_id: UUID, number: int
) -> EvalSuiteVersion | None:
    """By number, of a suite that the caller has found by its owner."""
    return await session.scalar(
        select(EvalSuiteVersion).where(
            EvalSuiteVersion.suite_id == suite_id, EvalSuiteVersion.number == number
        )
    )


async def find_version_by_digest(
    session: AsyncSession, suite_id: UUID, sha256: str
) -> EvalSuiteVersion | None:
    """By what is in it."""
    return await session.scalar(
        select(EvalSuiteVersion).where(
            EvalSuiteVersion.suite_id == suite_id, EvalSuiteVersion.sha256 == sha256
        )
    )


# ---------------------------------------------------------------------------- what is asked


_TriedRevision = aliased(DeploymentRevision)
_TriedBuild = aliased(EngineBuild)


def _targets() -> Select[DeploymentRevision, str, BaseModel, str | None, str | None]:
    """Revisions with their names, their own engine build, and the one that a rollout tries beside them."""
    tried = (
        select(_TriedBuild.fingerprint)
        .select_from(Rollout)
        .join(_TriedRevision, _TriedRevision.id == Rollout.canary_revision_id)
        .join(_TriedBuild, _TriedBuild.id == _TriedRevision.engine_build_id)
        .where(
            Rollout.deployment_id == Deployment.id,
            Rollout.state.in_(("evaluating", "shadow", "canary")),
            Rollout.canary_revision_id != DeploymentRevision.id,
            DeploymentRevision.engine_build_id.is_(None),
        )
        .correlate(Deployment, DeploymentRevision)
        .scalar_subquery()
    )
    return (
        select(
            DeploymentRevision,
            Deployment.public_name,
            BaseModel,
            EngineBuild.fingerprint,
            tried,
        )
        .join(Deployment, Deployment.id == DeploymentRevision.deployment_id)
        .join(BaseModel, BaseModel.id == DeploymentRevision.base_model_id)
        .outerjoin(EngineBuild, EngineBuild.id == DeploymentRevision.engine_build_id)
    )


async def find_target(session: AsyncSession, tenant_id: UUID, revision_id: UUID) -> Target | None:
    """A revision of the tenant's, or of the platform's own."""
    statement = _targets().where(
        DeploymentRevision.id == revision_id,
        or_(DeploymentRevision.tenant_id == tenant_id, DeploymentRevision.tenant_id.is_(None)),
    )
    return _to_target((await session.execute(statement)).one_or_none())


async def find_current_target(session: AsyncSession, tenant_id: UUID, name: str) -> Target | None:
    """What a model id of the tenant's stands for now; the platform's own ones are everybody's."""
    statement = (
        _targets()
        .where(
            Deployment.current_revision_id == DeploymentRevision.id,
            Deployment.public_name == name,
            Deployment.archived_at.is_(None),
            or_(Deployment.tenant_id == tenant_id, Deployment.tenant_id.is_(None)),
        )
        .order_by(Deployment.tenant_id.nulls_last())
        .limit(1)
    )
    return _to_target((await session.execute(statement)).one_or_none())


def _to_target(row: Any) -> Target | None:  # noqa: ANN401 (a row of `_targets`)
    if row is None:
        return None
    revision, model, base_model, fingerprint, tried = row
    return Target(
        revision_id=revision.id,
        deployment_id=revision.deployment_id,
        number=revision.number,
        model=model,
        base_model=base_model.name,
        adapter_version_id=revision.adapter_version_id,
        adapter_digest=revision.adapter_digest,
        params=revision.params,
        builds=BuildRule(
            only=fingerprint,
            rather_not=() if tried is None else (tried,),
            base_revision=base_model.revision,
            tokenizer_sha256=base_model.tokenizer_sha256,
        ),
    )


# ---------------------------------------------------------------------------- runs


def runs_of(tenant_id: UUID) -> Select[EvalRun]:
    """The tenant's runs."""
    return select(EvalRun).where(EvalRun.tenant_id == tenant_id)


async def find_run(
    session: AsyncSession, tenant_id: UUID, run_id: UUID, *, for_update: bool = False
) -> EvalRun | None:
    """By id, only if the tenant owns it."""
    statement = runs_of(tenant_id).where(EvalRun.id == run_id)
    return await session.scalar(statement.with_for_update() if for_update else statement)


def only_of_suite(statement: Select[EvalRun], suite_id: UUID) -> Select[EvalRun]:
    """Those of one suite, of whichever version."""
    versions = select(EvalSuiteVersion.id).where(EvalSuiteVersion.suite_id == suite_id)
    return statement.where(EvalRun.suite_version_id.in_(versions))


def named_runs(statement: Select[EvalRun], search: str) -> Select[EvalRun]:
    """Those whose suite's name or deployment's model id holds this."""
    piece = search.strip()
    suite = (
        select(EvalSuiteVersion.id)
        .join(EvalSuite, EvalSuite.id == EvalSuiteVersion.suite_id)
        .where(
            EvalSuiteVersion.id == EvalRun.suite_version_id,
            EvalSuite.name.icontains(piece, autoescape=True),
        )
    )
    deployment = select(Deployment.id).where(
        Deployment.id == EvalRun.deployment_id,
        Deployment.public_name.icontains(piece, autoescape=True),
    )
    return statement.where(or_(suite.exists(), deployment.exists()))


async def count_active(session: AsyncSession, tenant_id: UUID) -> int:
    """Runs that wait or go on."""
    statement = select(func.count()).select_from(
        runs_of(tenant_id).where(EvalRun.state.in_(ACTIVE)).subquery()
    )
    return int((await session.execute(statement)).scalar_one())


def results_of(tenant_id: UUID, run_id: UUID) -> Select[EvalResult]:
    """Of a run."""
    return select(EvalResult).where(EvalResult.tenant_id == tenant_id, EvalResult.run_id == run_id)


async def all_results(session: AsyncSession, tenant_id: UUID, run_id: UUID) -> Sequence[EvalResult]:
    """Of a run, in the order of the suite; as many as a suite has cases at most."""
    statement = results_of(tenant_id, run_id).order_by(EvalResult.case_index)
    return (await session.scalars(statement)).all()


async def status_counts(
    session: AsyncSession, run_ids: Sequence[UUID]
) -> dict[UUID, dict[str, int]]:
    """How many cases of each run have which status."""
    statement = (
        select(EvalResult.run_id, EvalResult.status, func.count())
        .where(EvalResult.run_id.in_(run_ids))
        .group_by(EvalResult.run_id, EvalResult.status)
    )
    found: dict[UUID, dict[str, int]] = {run_id: {} for run_id in run_ids}
    for run_id, status, count in await session.execute(statement):
        found[run_id][status] = count
    return found


async def versions_of_runs(
    session: AsyncSession, version_ids: Sequence[UUID]
) -> dict[UUID, tuple[UUID, str, int]]:
    """Suite id, name and number of versions."""
    statement = (
        select(EvalSuiteVersion.id, EvalSuite.id, EvalSuite.name, EvalSuiteVersion.number)
        .join(EvalSuite, EvalSuite.id == EvalSuiteVersion.suite_id)
        .where(EvalSuiteVersion.id.in_(version_ids))
    )
    return {row[0]: (row[1], row[2], row[3]) for row in await session.execute(statement)}


async def series(
    session: AsyncSession, tenant_id: UUID, suite_id: UUID, limit: int
) -> Sequence[EvalRun]:
    """Finished runs of a suite, oldest first, at most the newest `limit`."""
    newest = (
        only_of_suite(runs_of(tenant_id), suite_id)
        .where(EvalRun.state.not_in(ACTIVE))
        .order_by(EvalRun.id.desc())
        .limit(limit)
    )
    return list(reversed((await session.scalars(newest)).all()))


async def names_of_revisions(
    session: AsyncSession, revision_ids: Sequence[UUID]
) -> dict[UUID, tuple[str, int]]:
    """Model id and number of each."""
    rows = await session.execute(
        select(DeploymentRevision.id, Deployment.public_name, DeploymentRevision.number)
        .join(Deployment, Deployment.id == DeploymentRevision.deployment_id)
        .where(DeploymentRevision.id.in_(revision_ids))
    )
    return {row[0]: (row[1], row[2]) for row in rows}


# ---------------------------------------------------------------------------- the worker's

_CLAIM = text("""
with due as (
    select id from eval_runs
    where state in ('queued', 'running') and (lease_until is null or lease_until <= now())
        and not (id = any(:held))
    order by id
    limit 1
    for update skip locked
)
update eval_runs r
set state = 'running', owner = :owner, lease_token = lease_token + 1,
    lease_until = now() + make_interval(secs => :lease_s),
    started_at = coalesce(started_at, now())
from due where r.id = due.id
returning r.id
""")

_RENEW = text("""
update eval_runs
set lease_until = now() + make_interval(secs => :lease_s)
where id = :id and lease_token = :token and state = 'running'
returning cancel_requested_at is not null
""")


async def claim(
    session: AsyncSession, owner: str, held: Sequence[UUID], lease_s: float
) -> EvalRun | None:
    """Take the oldest run that nobody works on; its lease token is raised, which fences the last owner."""
    parameters = {"owner": owner, "held": list(held), "lease_s": lease_s}
    run_id = (await session.execute(_CLAIM, parameters)).scalar_one_or_none()
    if run_id is None:
        return None
    return await session.get_one(EvalRun, run_id, populate_existing=True)


async def renew(session: AsyncSession, run_id: UUID, token: int, lease_s: float) -> bool | None:
    """Keep a run: whether somebody wants it to end, or None if it is another's by now."""
    parameters = {"id": run_id, "token": token, "lease_s": lease_s}
    wants_end: bool | None = (await session.execute(_RENEW, parameters)).scalar_one_or_none()
    return wants_end


async def release(session: AsyncSession, run_id: UUID, token: int) -> None:
    """Let another worker have it at once: this one stops."""
    await session.execute(
        update(EvalRun)
        .where(EvalRun.id == run_id, EvalRun.lease_token == token, EvalRun.state == "running")
        .values(lease_until=None)
    )


async def lock_held(session: AsyncSession, run_id: UUID, token: int) -> EvalRun | None:
    """The run's row, locked, if it still is its caller's."""
    return await session.scalar(
        select(EvalRun)
        .where(EvalRun.id == run_id, EvalRun.lease_token == token, EvalRun.state == "running")
        .with_for_update()
        .execution_options(populate_existing=True)
    )


async def add_result(session: AsyncSession, token: int, values: dict[str, Any]) -> bool:
    """Keep what became of a case; False if the run is another's by now, or has it already."""
    held = await session.scalar(
        select(EvalRun.id)
        .where(
            EvalRun.id == values["run_id"],
            EvalRun.lease_token == token,
            EvalRun.state == "running",
        )
        .with_for_update(read=True)
    )
    if held is None:
        return False
    statement = (
        insert(EvalResult)
        .values(id=uuid7(), **values)
        .on_conflict_do_nothing(index_elements=[EvalResult.run_id, EvalResult.case_index])
        .returning(EvalResult.id)
    )
    return await session.scalar(statement) is not None


async def done_cases(session: AsyncSession, run_id: UUID) -> set[int]:
    """Places of the cases that have a result."""
    statement = select(EvalResult.case_index).where(EvalResult.run_id == run_id)
    return set((await session.scalars(statement)).all())


async def forget_results(session: AsyncSession, run_id: UUID) -> None:
    """A replay that was cut begins anew: half of its timing is another process's."""
    await session.execute(delete(EvalResult).where(EvalResult.run_id == run_id))


async def run_before(session: AsyncSession, run: EvalRun) -> EvalRun | None:
    """The last whole run of the same suite version on the same revision."""
    return await session.scalar(
        runs_of(run.tenant_id)
        .where(
            EvalRun.suite_version_id == run.suite_version_id,
            EvalRun.revision_id == run.revision_id,
            EvalRun.state.in_(("passed", "failed")),
            EvalRun.id < run.id,
        )
        .order_by(EvalRun.id.desc())
        .limit(1)
    )


# ---------------------------------------------------------------------------- schedules


def schedules_of(tenant_id: UUID) -> Select[EvalSchedule]:
    """The tenant's schedules."""
    return select(EvalSchedule).where(EvalSchedule.tenant_id == tenant_id)


async def find_schedule(
    session: AsyncSession, tenant_id: UUID, schedule_id: UUID, *, for_update: bool = False
) -> EvalSchedule | None:
    """By id, only if the tenant owns it."""
    statement = schedules_of(tenant_id).where(EvalSchedule.id == schedule_id)
    return await session.scalar(statement.with_for_update() if for_update else statement)


async def take_due_schedule(session: AsyncSession, now: datetime) -> EvalSchedule | None:
    """One that is due, locked; nobody else gets it while the transaction lasts."""
    return await session.scalar(
        select(EvalSchedule)
        .where(EvalSchedule.is_enabled, EvalSchedule.next_at <= now)
        .order_by(EvalSchedule.next_at)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


# ---------------------------------------------------------------------------- traces


async def settled_requests(
    session: AsyncSession, tenant_id: UUID, since: UUID, until: UUID, limit: int
) -> Sequence[tuple[datetime, int, int, str]]:
    """When, how long and of which model: numbers of the tenant's own requests, oldest first."""
    rows = await session.execute(
        select(Request.admitted_at, Request.prompt_tokens, Request.completion_tokens, Request.model)
        .where(
            Request.tenant_id == tenant_id,
            Request.id >= since,
            Request.id < until,
            Request.kind == "user",
            Request.state == "settled",
            Request.prompt_tokens > 0,
            Request.completion_tokens > 0,
        )
        .order_by(Request.id)
        .limit(limit)
    )
    return [
        (at, int(prompt or 0), int(completion or 0), model)
        for at, prompt, completion, model in rows
    ]


# ---------------------------------------------------------------------------- a tenant's end


async def erase(session: AsyncSession, tenant_id: UUID) -> dict[str, int]:
    """Everything of a tenant's, counted by kind: prompts, answers and names are its own words."""
    removed = {}
    for kind, model in (
        ("eval_schedules", EvalSchedule),
        ("eval_results", EvalResult),
        ("eval_runs", EvalRun),
        ("eval_suite_versions", EvalSuiteVersion),
        ("eval_suites", EvalSuite),
    ):
        result = await session.execute(delete(model).where(model.tenant_id == tenant_id))
        removed[kind] = int(getattr(result, "rowcount", 0))
    return removed
