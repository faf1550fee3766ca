"""The worker's part: looks at every rollout that is under way, and does what its look says.

A look at a step is good for twenty times as long as it took, so that looking costs a twentieth of one core, but
for half a minute at most. Any number of workers may run: a look is claimed (SKIP LOCKED) and what it decides is written only if
nobody has changed the rollout meanwhile. A worker that dies between two statements leaves the rollout as it
was, and the next look, of whomever, decides anew.

| state | what is looked at | what follows |
|---|---|---|
| evaluating | can every replica that may serve it? did it pass the offline suite? | its first step, or aborted |
| shadow, canary | gates, golden suite; then hold time, pause, replicas | held, the next step, promoted, or aborted |
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.db import Deployment, EvalRun, Rollout
from loraplex_platform.db.base import Json
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.errors import PlatformError, UnavailableError
from loraplex_platform.evals import queries as eval_queries
from loraplex_platform.evals import service as evals
from loraplex_platform.evals import suites
from loraplex_platform.evals.schemas import NewRun
from loraplex_platform.gateway.failpoints import INERT, Failpoints
from loraplex_platform.ids import format_id, parse_id
from loraplex_platform.rollouts import looks, queries
from loraplex_platform.rollouts.gates import GoldenSettings, SuiteSettings
from loraplex_platform.rollouts.looks import Look
from loraplex_platform.rollouts.queries import Side
from loraplex_platform.rollouts.schemas import show_sides
from loraplex_platform.rollouts.serving import Fleet
from loraplex_platform.rollouts.transitions import (
    end,
    enter_step,
    is_approved_by_hand,
    lock_deployment,
    note,
    settings_of,
    steps_of,
)
from loraplex_platform.rollouts.verdicts import Decision, GateResult

log = structlog.get_logger(__name__)

LEAST_INTERVAL_S: Final = 2.0
COST_SHARE: Final = 0.05
# A busy machine makes a look long that costs little; a canary that fails must not wait for it to be idle.
MOST_INTERVAL_S: Final = 30.0
MAX_LOOKS_A_ROUND: Final = 1_000
PATIENCE_S: Final = 10.0
_SHOWN_CASES: Final = 20
# What a verdict has of one step alone.
_OF_A_STEP: Final = (
    "verdict",
    "summary",
    "gates",
    "stable",
    "canary",
    "looks",
    "told",
    "problem_since",
)

SuiteName = Literal["offline", "golden"]
# passed: of an offline run for good, of golden ones the last. waits: the words say for what.
SuiteOutcome = Literal["passed", "waits", "failed"]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A rollout as it was claimed, and what was found out about it before it is locked."""

    rollout: Rollout
    canary: Side
    problem: str | None
    found: Look | None = None
    decision: Decision | None = None
    took_s: float = 0.0


@dataclass(slots=True)
class RolloutDriver:
    """Looks and acts; `run_once` is a round over all that is due.

    Attributes:
        cost_share: of its interval that a look may take.
        patience_s: how long replicas may lack the canary before that is told.
        on_look: told how long each look took, in seconds.
    """

    sessions: SessionFactory
    fleet: Fleet
    failpoints: Failpoints = INERT
    least_interval_s: float = LEAST_INTERVAL_S
    cost_share: float = COST_SHARE
    patience_s: float = PATIENCE_S
    on_look: Callable[[float], object] = field(default=lambda took_s: took_s)

    async def run_once(self) -> int:
        """How many rollouts were looked at.

        Raises:
            UnavailableError: no database.
        """
        for count in range(MAX_LOOKS_A_ROUND):
            async with self.sessions.begin() as session:
                rollout = await queries.claim(session, self.least_interval_s)
            if rollout is None:
                return count
            self.failpoints.hit("rollout_claimed")
            try:
                await self._attend(rollout)
            except UnavailableError:
                raise
            except Exception:
                # One odd rollout holds up no other; it is due again after its interval.
                log.exception("rollout_look_failed", rollout_id=str(rollout.id))
        return MAX_LOOKS_A_ROUND

    async def _attend(self, rollout: Rollout) -> None:
        async with self.sessions() as session:
            deployment = await session.get_one(Deployment, rollout.deployment_id)
            canary = await queries.find_side(
                session, rollout.deployment_id, revision_id=rollout.canary_revision_id
            )
        assert canary is not None  # noqa: S101 # a key of the table
        problem = self.fleet.problem(canary, deployment.public_name)
        act = self._evaluate
        seen = _Seen(rollout, canary, problem)
        if rollout.state != "evaluating":
            seen, act = await self._look(seen), self._go_on
        self.failpoints.hit("rollout_looked")

        async def work(session: AsyncSession) -> str | None:
            # The deployment before the rollout's row, as everybody does who may point it elsewhere.
            await lock_deployment(session, deployment)
            held = await queries.lock_as_seen(session, rollout.id, rollout.row_version)
            if held is None:
                log.info("rollout_changed_meanwhile", rollout_id=str(rollout.id))
                return None
            before = (held.state, held.step)
            current = await session.get_one(Deployment, held.deployment_id, populate_existing=True)
            if current.archived_at is not None:
                await end(session, held, SYSTEM, "aborted", "its deployment was archived")
            elif current.current_revision_id != held.stable_revision_id:
                reason = "its deployment was pointed at another revision"
                await end(session, held, SYSTEM, "aborted", reason)
            else:
                await act(session, held, seen)
            if before == (held.state, held.step):
                return None
            await session.flush()
            self.failpoints.hit("inside_transition")
            return held.state

        state = await run_transaction(self.sessions, work)
        if state is not None:
            log.info("rollout_moved", rollout_id=str(rollout.id), state=state)
            self.failpoints.hit("after_transition")

    async def _look(self, seen: _Seen) -> _Seen:
        rollout = seen.rollout
        steps, settings = steps_of(rollout), settings_of(rollout)
        kind = steps[rollout.step].kind
        plan = settings.plan(kind, len(steps))
        began_s = time.perf_counter()
        found = await looks.look(self.sessions, rollout.id, rollout.step, kind, plan)
        decision = None
        if plan is not None:
            # Milliseconds of arithmetic, beside which the worker has other loops.
            decision = await asyncio.to_thread(plan.decide, found.observed)
        took_s = time.perf_counter() - began_s
        self.on_look(took_s)
        return _Seen(rollout, seen.canary, seen.problem, found, decision, took_s)

    # ------------------------------------------------------------------ evaluating

    async def _evaluate(self, session: AsyncSession, held: Rollout, seen: _Seen) -> None:
        verdict: Json = {"interval_s": self.least_interval_s, **(held.verdict or {})}
        offline = settings_of(held).offline
        waits_for = seen.problem
        if waits_for is None and offline is not None:
            outcome, words = await _offline(session, held, verdict, offline)
            if outcome == "failed":
                held.verdict = verdict
                await end(session, held, SYSTEM, "aborted", words, {"offline": verdict["offline"]})
                return
            waits_for = words if outcome == "waits" else None
        if waits_for is None and held.is_paused:
            waits_for = "it is paused"
        verdict["waits_for"] = waits_for
        await self._note_problem(session, held, verdict, seen.problem)
        if waits_for is None:
            await self._enter(session, held, verdict, 0)
        held.verdict = verdict

    # ------------------------------------------------------------------ steps

    async def _go_on(self, session: AsyncSession, held: Rollout, seen: _Seen) -> None:
        assert seen.found is not None  # noqa: S101 # looked at before
        decision = seen.decision
        before = held.verdict or {}
        verdict: Json = {**before, **_shown(held, seen)}
        verdict["looks"] = before.get("looks", 0) + 1
        wanted_s = min(seen.took_s / self.cost_share, MOST_INTERVAL_S)
        verdict["interval_s"] = max(self.least_interval_s, wanted_s)
        if decision is not None and decision.verdict == "fail":
            held.verdict = verdict
            detail = {"step": held.step, "gates": _decisive(decision)}
            await end(session, held, SYSTEM, "aborted", decision.summary, detail)
            return
        golden = settings_of(held).golden
        if golden is not None:
            outcome, words = await _golden(session, held, verdict, golden)
            if outcome == "failed":
                held.verdict = verdict
                await end(session, held, SYSTEM, "aborted", words, {"golden": verdict["golden"]})
                return
        if decision is not None and decision.verdict != before.get("verdict", "inconclusive"):
            await note(
                session,
                held,
                SYSTEM,
                "verdict",
                decision.summary,
                {"step": held.step, "verdict": decision.verdict, "gates": _decisive(decision)},
            )
        await self._advance(session, held, seen, verdict)
        held.verdict = verdict

    async def _advance(
        self, session: AsyncSession, held: Rollout, seen: _Seen, verdict: Json
    ) -> None:
        steps = steps_of(held)
        now = await queries.now_of(session)
        assert held.step_began_at is not None  # noqa: S101 # a step is under way
        left = held.step_began_at + timedelta(seconds=steps[held.step].hold_s) - now
        is_last = held.step + 1 == len(steps)
        verdict["waits_for"] = None
        problem = None if is_last else seen.problem
        if left <= timedelta(0):
            await self._note_problem(session, held, verdict, problem)
        if left > timedelta(0):
            verdict["waits_for"] = f"its step's time: {math.ceil(left.total_seconds())} s are left"
        elif seen.decision is not None and seen.decision.verdict != "pass":
            why = f"the gates cannot tell yet: {seen.decision.summary.partition(': ')[2]}"
            verdict["waits_for"] = why
            await _hold(session, held, verdict, why, key="inconclusive")
        elif held.is_paused:
            verdict["waits_for"] = "it is paused"
        elif problem is not None:
            verdict["waits_for"] = problem
        elif not is_last:
            await self._enter(session, held, verdict, held.step + 1)
        elif is_approved_by_hand(held):
            verdict["waits_for"] = "somebody's approval: promote it, or abort it"
            await _hold(session, held, verdict, "all steps are passed: it waits for approval")
        else:
            reason = f"all {len(steps)} steps are passed"
            await end(session, held, SYSTEM, "promoted", reason)

    async def _note_problem(
        self, session: AsyncSession, held: Rollout, verdict: Json, problem: str | None
    ) -> None:
        """An adapter that loads is no news; one that still does after a while is."""
        if problem is None:
            verdict.pop("problem_since", None)
            return
        now = await queries.now_of(session)
        since = datetime.fromisoformat(verdict.setdefault("problem_since", now.isoformat()))
        if now - since >= timedelta(seconds=self.patience_s):
            await _hold(session, held, verdict, problem)

    async def _enter(
        self, session: AsyncSession, held: Rollout, verdict: Json, number: int
    ) -> None:
        """The next step; of the last one's look nothing stays that would be taken for its own."""
        for name in _OF_A_STEP:
            verdict.pop(name, None)
        verdict["waits_for"] = None
        verdict["interval_s"] = self.least_interval_s
        await enter_step(session, held, SYSTEM, number)


# ---------------------------------------------------------------------------- holds


async def _hold(
    session: AsyncSession, held: Rollout, verdict: Json, why: str, *, key: str | None = None
) -> None:
    """Say once a step that it waits, and for what."""
    told = list(verdict.get("told", []))
    if (key or why) in told:
        return
    verdict["told"] = [*told, key or why][-_SHOWN_CASES:]
    await note(session, held, SYSTEM, "hold", why, {"step": held.step, "state": held.state})


# ---------------------------------------------------------------------------- suites


async def _offline(
    session: AsyncSession, held: Rollout, verdict: Json, wanted: SuiteSettings
) -> tuple[SuiteOutcome, str]:
    """Its run is queued once, waited for and told of."""
    known: Json | None = verdict.get("offline")
    if known is None:
        try:
            verdict["offline"] = await _queue(session, held, "offline", wanted)
        except PlatformError as error:
            return "waits", f"its eval cannot be queued: {error.message}"
        return "waits", "its offline eval is queued"
    run = await _run_of(session, known)
    if run is None:
        return "failed", "its offline eval run is gone"
    if run.state in eval_queries.ACTIVE:
        return "waits", f"its offline eval {known['run_id']} is {run.state}"
    return await _ended(session, held, verdict, "offline", run)


async def _golden(
    session: AsyncSession, held: Rollout, verdict: Json, wanted: GoldenSettings
) -> tuple[SuiteOutcome, str]:
    """The last run's outcome; the next one is queued when it is time, and the last has ended."""
    known: Json | None = verdict.get("golden")
    if known is not None:
        run = await _run_of(session, known)
        if run is not None and run.state in eval_queries.ACTIVE:
            return "waits", ""
        if run is not None and known["state"] == "queued":
            outcome, words = await _ended(session, held, verdict, "golden", run)
            if outcome == "failed" and run.state == "failed":
                return outcome, words
        now = await queries.now_of(session)
        asked_at = datetime.fromisoformat(known["asked_at"])
        if now - asked_at < timedelta(seconds=wanted.every_s):
            return "passed", ""
    try:
        verdict["golden"] = await _queue(session, held, "golden", wanted)
    except PlatformError as error:
        await _hold(session, held, verdict, f"its golden prompts cannot be asked: {error.message}")
    return "waits", ""


async def _queue(
    session: AsyncSession, held: Rollout, name: SuiteName, wanted: SuiteSettings
) -> Json:
    """Queue a run of a suite on the canary, at whichever engine build that is served by.

    Raises:
        PlatformError: it cannot be, now.
    """
    assert wanted.tenant_id is not None  # noqa: S101 # set when the rollout was made
    tenant_id = parse_id("tenant", wanted.tenant_id)
    async with session.begin_nested():
        suite = await evals.get_suite(session, tenant_id, wanted.suite_id, with_platforms=True)
        version = await evals.get_version(session, suite, wanted.suite_version)
        content = suites.load(version.content)
        baseline = None
        if isinstance(content, suites.ChecksContent):
            baseline = format_id("deployment_revision", held.stable_revision_id)
        run = await evals.start_run(
            session,
            SYSTEM,
            tenant_id,
            NewRun(
                suite_id=wanted.suite_id,
                suite_version=version.number,
                revision_id=format_id("deployment_revision", held.canary_revision_id),
                baseline_revision_id=baseline,
                concurrency=wanted.concurrency,
                case_timeout_s=wanted.case_timeout_s,
                run_timeout_s=wanted.run_timeout_s,
            ),
        )
    run_id = format_id("eval_run", run.id)
    what = f"{suite.name} version {version.number}"
    if name == "offline":
        await note(session, held, SYSTEM, "eval", f"asked {what} of the canary", {"run_id": run_id})
    now = await queries.now_of(session)
    return {
        "run_id": run_id,
        "tenant_id": wanted.tenant_id,
        "suite": what,
        "state": "queued",
        "asked_at": now.isoformat(),
    }


async def _run_of(session: AsyncSession, known: Json) -> EvalRun | None:
    return await eval_queries.find_run(
        session, parse_id("tenant", known["tenant_id"]), parse_id("eval_run", known["run_id"])
    )


async def _ended(
    session: AsyncSession, held: Rollout, verdict: Json, name: SuiteName, run: EvalRun
) -> tuple[SuiteOutcome, str]:
    """Note, once, how a run has ended; the words name the cases that did not pass."""
    known = verdict[name]
    if known["state"] == "passed":
        return "passed", ""
    results = await eval_queries.all_results(session, run.tenant_id, run.id)
    cases = [row.case_id for row in results if row.status != "pass"][:_SHOWN_CASES]
    verdict[name] = {**known, "state": run.state, "score": run.score, "cases": cases}
    words = f"the canary's {name} eval {known['suite']}: {run.state}"
    if run.score is not None:
        words += f", score {run.score:.4g}"
    if run.state != "passed":
        missed = run.summary.get("missed", [])
        details = [*missed, *([] if not cases else [f"not passed: {', '.join(cases)}"])]
        if run.error:
            details.append(run.error)
        words = f"{words} ({'; '.join(details)})" if details else words
    is_first_pass = run.state == "passed" and known.get("was") != "passed"
    if name == "offline" or run.state != "passed" or is_first_pass:
        await note(
            session, held, SYSTEM, "eval", words, {"run_id": known["run_id"], "cases": cases}
        )
    return ("passed" if run.state == "passed" else "failed"), words


# ---------------------------------------------------------------------------- what is kept of a look


def _shown(held: Rollout, seen: _Seen) -> Json:
    found, decision = seen.found, seen.decision
    assert found is not None  # noqa: S101 # the caller's
    stable, canary = show_sides(found)
    return {
        "step": held.step,
        "verdict": "pass" if decision is None else decision.verdict,
        "summary": "no gate is asked" if decision is None else decision.summary,
        "gates": [] if decision is None else [show_gate(result) for result in decision.results],
        "stable": stable.model_dump(),
        "canary": canary.model_dump(),
        "look_ms": round(seen.took_s * 1000, 1),
    }


def show_gate(result: GateResult) -> Json:
    """A gate's result as JSON, which knows no infinity."""
    return {name: _finite(value) for name, value in asdict(result).items()}


def _decisive(decision: Decision) -> list[Json]:
    return [show_gate(result) for result in decision.results if result.verdict == decision.verdict]


def _finite(value: Any) -> Any:  # noqa: ANN401 (any of a result's)
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
