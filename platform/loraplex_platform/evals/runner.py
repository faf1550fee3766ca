"""The worker's part: take runs that nobody works on, carry them out, write down how they ended.

A run is leased like a request: the lease is renewed while it goes on, and whoever takes an expired one
over raises its token, so that the first owner's writes are refused from then on. What has a result stays
as it is; the cases that are missing are asked. A replay's timing cannot be continued: it begins anew.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import EvalResult, EvalRun, EvalSuiteVersion
from loraplex_platform.db.errors import DatabaseUnavailableError
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.errors import PlatformError
from loraplex_platform.evals import comparison, performance, queries, service, suites
from loraplex_platform.evals.asking import Asker
from loraplex_platform.evals.cases import CaseResult, CaseRunner
from loraplex_platform.evals.records import Target
from loraplex_platform.evals.replay import Replay
from loraplex_platform.gateway.routing import Router
from loraplex_platform.gateway.tokenization import BaseTokenizer
from loraplex_platform.ids import format_id
from loraplex_platform.outbox.service import enqueue

log = structlog.get_logger(__name__)

MAX_RUNS: Final = 2  # at a time, of one worker
LEASE_S: Final = 30.0
MAX_SCHEDULES_A_ROUND: Final = 50
_SHOWN_CASES: Final = 20

Ending = Literal["done", "timeout", "cancelled"]


class _LeaseLostError(Exception):
    """Another worker has the run."""


@dataclass(slots=True)
class _Held:
    token: int
    task: asyncio.Task[None]
    stop: asyncio.Event


@dataclass(slots=True)
class EvalWorker:
    """Carries runs out in the background; `run_once` is a round of looking after them."""

    sessions: SessionFactory
    router: Router
    tokenizer: BaseTokenizer
    base_model: str
    owner: str
    lease_s: float = LEASE_S
    _held: dict[UUID, _Held] = field(default_factory=dict)

    async def run_once(self) -> None:
        """Renew what goes on, and take what waits."""
        for run_id, held in list(self._held.items()):
            if held.task.done():
                del self._held[run_id]
                continue
            wants_end = await self._renew(run_id, held.token)
            if wants_end is None:
                log.warning("eval_run_lost", run_id=str(run_id))
                held.task.cancel()
            elif wants_end:
                held.stop.set()
        while len(self._held) < MAX_RUNS:
            async with self.sessions.begin() as session:
                run = await queries.claim(session, self.owner, list(self._held), self.lease_s)
            if run is None:
                return
            stop = asyncio.Event()
            if run.cancel_requested_at is not None:
                stop.set()
            task = asyncio.create_task(self._carry_out(run, stop), name=f"eval run {run.id}")
            self._held[run.id] = _Held(run.lease_token, task, stop)

    async def start_due(self) -> None:
        """Queue the runs of schedules that are due."""
        for _ in range(MAX_SCHEDULES_A_ROUND):
            async with self.sessions.begin() as session:
                if not await service.start_due(session, datetime.now(UTC)):
                    return

    async def close(self) -> None:
        """Stop; others take the runs over at once."""
        held, self._held = self._held, {}
        for one in held.values():
            one.task.cancel()
        await asyncio.gather(*(one.task for one in held.values()), return_exceptions=True)
        try:
            async with self.sessions.begin() as session:
                for run_id, one in held.items():
                    await queries.release(session, run_id, one.token)
        except DatabaseUnavailableError as error:
            log.warning("eval_runs_not_released", reason=error.message)

    async def _renew(self, run_id: UUID, token: int) -> bool | None:
        async with self.sessions.begin() as session:
            return await queries.renew(session, run_id, token, self.lease_s)

    # ------------------------------------------------------------------ one run

    async def _carry_out(self, run: EvalRun, stop: asyncio.Event) -> None:
        log.info("eval_run_began", run_id=str(run.id), token=run.lease_token)
        try:
            await self._work(run, stop)
        except _LeaseLostError:
            log.warning("eval_run_lost", run_id=str(run.id))
        except DatabaseUnavailableError as error:
            # Its lease runs out, and whoever finds it then goes on.
            log.warning("eval_run_waits", run_id=str(run.id), reason=error.message)
        except PlatformError as error:
            await self._fail(run, error.message)
        except Exception as error:
            # Whatever it is, it would be so again: the run must not go round for ever.
            log.exception("eval_run_crashed", run_id=str(run.id))
            await self._fail(run, f"the worker failed: {type(error).__name__}")

    async def _work(self, run: EvalRun, stop: asyncio.Event) -> None:
        async with self.sessions() as session:
            version = await session.get_one(EvalSuiteVersion, run.suite_version_id)
            target = await queries.find_target(session, run.tenant_id, run.revision_id)
            baseline = None
            if run.baseline_revision_id is not None:
                baseline = await queries.find_target(
                    session, run.tenant_id, run.baseline_revision_id
                )
            done = await queries.done_cases(session, run.id)
            now = (await session.execute(select(func.now()))).scalar_one()
        content = await asyncio.to_thread(suites.load, version.content)
        for one in (target, baseline):
            if one is not None and one.base_model != self.base_model:
                await self._fail(
                    run,
                    f"this fleet's worker speaks for {self.base_model}, not for {one.base_model}: "
                    "set LORAPLEX_BASE_MODEL and LORAPLEX_MODEL_DIR of a worker to that model",
                )
                return
        if target is None or (run.baseline_revision_id is not None and baseline is None):
            await self._fail(run, "the revision is gone")
            return
        options = service.options_of(run)
        asker = Asker(
            self.sessions,
            self.router,
            self.tokenizer,
            self.base_model,
            run.tenant_id,
            self.owner,
            secrets.token_bytes(32),
        )
        began = run.started_at or now
        left_s = options.run_timeout_s - (now - began).total_seconds()
        models = _Models(self.sessions, run.tenant_id, self.base_model)
        if isinstance(content, suites.PerformanceContent):
            if done:
                async with self.sessions.begin() as session:
                    if await queries.lock_held(session, run.id, run.lease_token) is None:
                        raise _LeaseLostError
                    await queries.forget_results(session, run.id)

            async def keep(index: int, case_id: str, result: CaseResult) -> None:
                await self._keep(run, index, case_id, result)

            replay = Replay(asker, target, options, models.find, keep)
            ending = await _until(replay.run(content), stop, left_s)
            await self._finish(run, content, ending, replay)
            return
        runner = CaseRunner(asker, target, baseline, options.case_timeout_s, models.find)
        missing = iter([i for i in range(len(content.cases)) if i not in done])

        async def one_after_another() -> None:
            for index in missing:
                case = content.cases[index]
                await self._keep(run, index, case.id, await runner.run(case))

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(options.concurrency):
                    group.create_task(one_after_another())

        ending = await _until(all_of_them(), stop, left_s)
        await self._finish(run, content, ending, None)

    async def _keep(self, run: EvalRun, index: int, case_id: str, result: CaseResult) -> None:
        values = {
            "run_id": run.id,
            "tenant_id": run.tenant_id,
            "case_index": index,
            "case_id": case_id,
            **result.to_row(),
        }

        async def work(session: AsyncSession) -> bool:
            return await queries.add_result(session, run.lease_token, values)

        if not await run_transaction(self.sessions, work):
            async with self.sessions() as session:
                if index not in await queries.done_cases(session, run.id):
                    raise _LeaseLostError

    # ------------------------------------------------------------------ its end

    async def _fail(self, run: EvalRun, reason: str) -> None:
        async def work(session: AsyncSession) -> None:
            held = await queries.lock_held(session, run.id, run.lease_token)
            if held is None:
                return
            held.state, held.error, held.ended_at = "error", reason, func.now()
            held.lease_until = None

        await run_transaction(self.sessions, work, is_idempotent=True)
        log.warning("eval_run_failed", run_id=str(run.id), reason=reason)

    async def _finish(
        self, run: EvalRun, content: suites.Content, ending: Ending, replay: Replay | None
    ) -> None:
        async def work(session: AsyncSession) -> str | None:
            held = await queries.lock_held(session, run.id, run.lease_token)
            if held is None:
                return None
            results = await queries.all_results(session, run.tenant_id, run.id)
            held.fingerprints = sorted({row.fingerprint for row in results if row.fingerprint})
            if replay is not None and isinstance(content, suites.PerformanceContent):
                _sum_up_replay(held, content, ending, replay)
            elif isinstance(content, suites.ChecksContent):
                _sum_up(held, content, ending, results)
            # With the state, before another statement: the table wants both or neither.
            held.ended_at = func.now()
            held.lease_until = None
            state = held.state
            if state in ("passed", "failed") and replay is None:
                await _compare_with_before(session, held, results)
            return state

        state = await run_transaction(self.sessions, work, is_idempotent=True)
        log.info("eval_run_ended", run_id=str(run.id), state=state)


@dataclass(slots=True)
class _Models:
    """What model names of judges and traces stand for: looked up once a run, so that one run is one."""

    sessions: SessionFactory
    tenant_id: UUID
    base_model: str
    _found: dict[str, Target | None] = field(default_factory=dict)

    async def find(self, name: str) -> Target | None:
        """By public name; None for one that is not there, or of another base."""
        if name not in self._found:
            async with self.sessions() as session:
                target = await queries.find_current_target(session, self.tenant_id, name)
            is_ours = target is not None and target.base_model == self.base_model
            self._found[name] = target if is_ours else None
        return self._found[name]


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event, timeout_s: float) -> Ending:
    """`work` to its end, or until `stop` or the time is over; then it is cancelled and waited for.

    Raises:
        Whatever `work` raised first.
    """
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(
            [task, stopping], timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED
        )
        if task.done():
            _raise_first(task.exception())
            return "done"
        return "cancelled" if stop.is_set() else "timeout"
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.wait([task, stopping])
        if not task.cancelled():
            task.exception()  # looked at, so that nobody reports it as forgotten


def _raise_first(error: BaseException | None) -> None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


def _sum_up(
    run: EvalRun,
    content: suites.ChecksContent,
    ending: Ending,
    results: Any,  # noqa: ANN401
) -> None:
    by_index = {row.case_index: row for row in results}
    total = sum(case.weight for case in content.cases)
    passed = could_pass = 0.0
    lacking: list[str] = []
    is_lacking_certain = False
    for index, case in enumerate(content.cases):
        row = by_index.get(index)
        status = "missing" if row is None else row.status
        passed += case.weight * (status == "pass")
        could_pass += case.weight * (status != "fail")
        if case.required and status != "pass":
            lacking.append(case.id)
            is_lacking_certain = is_lacking_certain or status == "fail"
    run.score = passed / total
    share = content.threshold.share
    # Sums of weights are rounded: a share that is reached to twelve digits is reached.
    is_reached = run.score >= share - 1e-12
    run.summary = {"threshold": share, "required_not_passed": lacking[:_SHOWN_CASES]}
    if ending != "done":
        run.state = ending
        run.error = _unfinished(ending, len(results), len(content.cases))
    elif is_reached and not lacking:
        run.state = "passed"
    elif is_lacking_certain or could_pass / total < share - 1e-12:
        run.state = "failed"
    else:
        run.state = "error"
        run.error = "it is open whether it would pass: cases could not be asked or judged, see them"


def _sum_up_replay(
    run: EvalRun, content: suites.PerformanceContent, ending: Ending, replay: Replay
) -> None:
    found = replay.figures()
    missed = performance.misses(found, content.thresholds)
    run.summary = {
        "figures": found.to_json(),
        "missed": missed,
        "shortened": replay.num_shortened,
        "pace": content.pace,
    }
    if found.num_requests:
        run.score = 1.0 - found.abort_rate
    if ending != "done":
        run.state = ending
        run.error = _unfinished(ending, found.num_requests, len(content.trace))
    elif found.num_aborted == found.num_requests:
        run.state, run.error = "error", "no request was answered, see them"
    else:
        run.state = "failed" if missed else "passed"


def _unfinished(ending: Ending, done: int, total: int) -> str:
    why = "it was cancelled" if ending == "cancelled" else "its time was over"
    return f"{why} after {done} of {total} cases"


async def _compare_with_before(session: AsyncSession, run: EvalRun, results: Any) -> None:  # noqa: ANN401
    """A revision never changes: where its result does, that is an alarm."""
    before = await queries.run_before(session, run)
    if before is None:
        return
    earlier = await queries.all_results(session, run.tenant_id, before.id)
    changes = comparison.changes_of(
        service.outcomes_of(_by_case(earlier)), service.outcomes_of(_by_case(results))
    )
    if not changes:
        return
    told = [
        {
            "kind": change.kind,
            "count": len(change.case_ids),
            "cases": list(change.case_ids[:_SHOWN_CASES]),
        }
        for change in changes
    ]
    run.summary = {
        **run.summary,
        "changed": told,
        "changed_since": format_id("eval_run", before.id),
    }
    payload = {
        "kind": "eval_changed",
        "tenant_id": str(run.tenant_id),
        "run_id": str(run.id),
        "before_run_id": str(before.id),
        "revision_id": str(run.revision_id),
        "suite_version_id": str(run.suite_version_id),
        "changes": told,
    }
    await enqueue(session, "alert", f"eval_changed:{run.id}", payload)
    log.error("eval_result_changed", run_id=str(run.id), changes=told)


def _by_case(results: Any) -> dict[str, EvalResult]:  # noqa: ANN401 (rows)
    return {row.case_id: row for row in results}
