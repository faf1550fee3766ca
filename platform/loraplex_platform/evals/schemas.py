"""Evals on the wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, StrictBool, model_validator

from loraplex_platform.control.schemas import Body, Resource, UnixSeconds
from loraplex_platform.db import EvalResult, EvalRun, EvalSchedule, EvalSuite, EvalSuiteVersion
from loraplex_platform.evals.checks import CaseStatus
from loraplex_platform.evals.comparison import Comparison
from loraplex_platform.evals.records import MAX_CONCURRENCY, RunOptions
from loraplex_platform.evals.suites import (
    MAX_CASES,
    MAX_TRACE_LINES,
    NAME_PATTERN,
    Kind,
    PassThreshold,
    PerformanceThresholds,
)
from loraplex_platform.ids import format_id

RunState = Literal["queued", "running", "passed", "failed", "error", "timeout", "cancelled"]
SuiteId = Annotated[str, Field(max_length=80, description="The suite's id, `evs_...`.")]
RevisionId = Annotated[str, Field(max_length=80, description="A deployment revision, `rev_...`.")]


class NewSuite(Body):
    """A suite's next version: lines of JSON, as its file has them; null for an empty line."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "capitals",
                    "lines": [
                        {
                            "id": "france",
                            "messages": [{"role": "user", "content": "Capital of France?"}],
                            "checks": [{"type": "contains", "value": "Paris"}],
                        }
                    ],
                }
            ]
        },
    )

    name: str = Field(pattern=NAME_PATTERN, description="An existing one gets a version.")
    kind: Kind = "checks"
    lines: list[Any] = Field(
        min_length=1,
        max_length=4 * max(MAX_CASES, MAX_TRACE_LINES),
        description="One object a case (or, of a performance suite, a request).",
    )
    threshold: PassThreshold = Field(
        default=PassThreshold(), description="Of checks: which share of the weights must pass."
    )
    performance: PerformanceThresholds | None = Field(
        default=None, description="Of a performance suite: what its figures must hold."
    )
    pace: Literal["recorded", "none"] | None = Field(
        default=None,
        description="Of a performance suite: as it was recorded (default), or at once.",
    )

    @model_validator(mode="after")
    def _fits_kind(self) -> NewSuite:
        if self.kind == "checks" and (self.performance is not None or self.pace is not None):
            raise ValueError("performance and pace are for kind performance: leave them out.")
        if self.kind == "performance" and "threshold" in self.model_fields_set:
            raise ValueError("threshold is for kind checks: use performance.")
        return self


class SuiteResource(Resource):
    """A suite and its newest version."""

    id: str
    object: Literal["eval_suite"] = "eval_suite"
    name: str
    kind: Kind
    owner: Literal["tenant", "platform"]
    version: int
    sha256: str
    num_cases: int
    created_at: UnixSeconds
    version_created_at: UnixSeconds


class SuiteVersionResource(Resource):
    """One version with all that is in it, as `loraplex eval import` takes it."""

    id: str = Field(description="The suite's id.")
    object: Literal["eval_suite_version"] = "eval_suite_version"
    name: str
    kind: Kind
    version: int
    sha256: str
    num_cases: int
    lines: list[dict[str, Any]]
    threshold: PassThreshold | None
    performance: PerformanceThresholds | None
    pace: str | None
    created_at: UnixSeconds


class RunRequest(Body):
    """How a run is carried out. Requests are answered after everybody else's, and are not billed."""

    concurrency: int = Field(default=4, ge=1, le=MAX_CONCURRENCY)
    case_timeout_s: float = Field(default=60.0, ge=1, le=600)
    run_timeout_s: float = Field(default=1800.0, ge=1, le=86_400)

    def options(self) -> RunOptions:
        """For the run's row."""
        return RunOptions(self.concurrency, self.case_timeout_s, self.run_timeout_s)


class _Aim(RunRequest):
    suite_id: SuiteId
    suite_version: int | None = Field(
        default=None, ge=1, description="null: the newest when it runs."
    )
    deployment: str | None = Field(
        default=None, max_length=128, description="A model id; its current revision is asked."
    )
    revision_id: RevisionId | None = None
    baseline_revision_id: RevisionId | None = Field(
        default=None, description="What pairwise checks and `max_drop` compare with."
    )

    @model_validator(mode="after")
    def _aims_once(self) -> _Aim:
        if (self.deployment is None) == (self.revision_id is None):
            raise ValueError("give deployment or revision_id, one of them.")
        return self


class NewRun(_Aim):
    """Ask a suite of a revision."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"suite_id": f"evs_{'0' * 32}", "deployment": "capitals"}]},
    )


class RunResource(Resource):
    """A run. ``counts` are of the cases that have a result so far; `score` is the share of all weights that passed."""

    id: str
    object: Literal["eval_run"] = "eval_run"
    suite_id: str
    suite: str
    suite_version: int
    deployment_id: str
    revision_id: str
    baseline_revision_id: str | None
    schedule_id: str | None
    state: RunState
    score: float | None
    num_cases: int
    counts: dict[str, int]
    fingerprints: list[str] = Field(description="Of the engines that answered.")
    has_mixed_engines: bool = Field(description="More than one fingerprint answered.")
    summary: dict[str, Any]
    error: str | None
    options: dict[str, Any]
    created_at: UnixSeconds
    started_at: UnixSeconds | None
    ended_at: UnixSeconds | None


class ResultResource(Resource):
    """What became of a case."""

    id: str
    object: Literal["eval_result"] = "eval_result"
    case_index: int
    case_id: str
    status: CaseStatus
    reason: str
    checks: list[dict[str, Any]]
    output: str | None
    baseline_output: str | None
    bits_sha256: str | None
    mean_logprob: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    ttft_ms: float | None
    e2e_ms: float | None
    fingerprint: str | None
    replica_id: str | None
    request_id: str | None


class FlipResource(Resource):
    """A case whose verdict differs, with both answers."""

    case_id: str
    first_status: str
    first_reason: str
    first_output: str | None
    second_status: str
    second_reason: str
    second_output: str | None


class IntervalResource(Resource):
    """A mean and its 95 % confidence interval (Student's, of paired differences)."""

    mean: float
    low: float | None
    high: float | None
    count: int


class ComparisonResource(Resource):
    """Two runs of one suite, case by case. `mcnemar_p` is two-sided and exact."""

    object: Literal["eval_comparison"] = "eval_comparison"
    first_run_id: str
    second_run_id: str
    num_shared: int
    only_first: list[str]
    only_second: list[str]
    same_output: int
    broken: list[FlipResource] = Field(description="Passed in the first, not in the second.")
    mended: list[FlipResource] = Field(description="Passed in the second, not in the first.")
    mcnemar_p: float
    logprob_difference: IntervalResource | None = Field(
        description="Mean log-probability per token, second minus first, in nats."
    )


class SeriesPoint(Resource):
    """A finished run, for a chart."""

    run_id: str
    ended_at: UnixSeconds | None
    state: RunState
    suite_version: int
    deployment: str = Field(description="The revision's model id.")
    revision_id: str
    revision: int = Field(description="Its number.")
    score: float | None
    counts: dict[str, int]
    figures: dict[str, Any] | None = Field(description="Of a performance suite.")
    fingerprints: list[str]


class SeriesResource(Resource):
    """A suite's finished runs over time, oldest first."""

    object: Literal["eval_series"] = "eval_series"
    suite_id: str
    data: list[SeriesPoint]


class NewSchedule(_Aim):
    """Run a suite by itself."""

    name: str = Field(pattern=NAME_PATTERN)
    cron: str | None = Field(default=None, max_length=128, description="As 0 6 * * 1.")
    every_hours: int | None = Field(default=None, ge=1, le=8784)
    zone: str | None = Field(
        default=None, max_length=64, description="Of the cron expression; null: the tenant's."
    )

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "nightly",
                    "suite_id": f"evs_{'0' * 32}",
                    "deployment": "capitals",
                    "cron": "0 3 * * *",
                }
            ]
        },
    )

    @model_validator(mode="after")
    def _has_one_rule(self) -> NewSchedule:
        if (self.cron is None) == (self.every_hours is None):
            raise ValueError("give cron or every_hours, one of them.")
        return self


class ScheduleChange(Body):
    """What is not named stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"is_enabled": False}]}
    )

    cron: str | None = Field(default=None, max_length=128)
    every_hours: int | None = Field(default=None, ge=1, le=8784)
    zone: str | None = Field(default=None, max_length=64)
    is_enabled: StrictBool | None = None

    @model_validator(mode="after")
    def _has_one_rule(self) -> ScheduleChange:
        if self.cron is not None and self.every_hours is not None:
            raise ValueError("give cron or every_hours, one of them.")
        return self


class ScheduleResource(Resource):
    """A schedule. `version` is its ETag, for If-Match."""

    id: str
    object: Literal["eval_schedule"] = "eval_schedule"
    name: str
    suite_id: str
    suite_version: int | None
    deployment: str | None
    revision_id: str | None
    baseline_revision_id: str | None
    cron: str | None
    every_hours: int | None
    zone: str
    options: dict[str, Any]
    is_enabled: bool
    next_at: UnixSeconds
    last_run_id: str | None
    last_error: str | None
    created_at: UnixSeconds
    version: int


class TraceResource(Resource):
    """Requests as numbers, for `kind: performance`; no text was ever kept to be in it."""

    object: Literal["eval_trace"] = "eval_trace"
    lines: list[dict[str, Any]]
    is_cut: bool = Field(description="There were more than a suite holds.")


# ---------------------------------------------------------------------------- rows as resources


def show_suite(suite: EvalSuite, version: EvalSuiteVersion) -> SuiteResource:
    """A suite with its newest version."""
    return SuiteResource(
        id=format_id("eval_suite", suite.id),
        name=suite.name,
        kind=cast(Kind, suite.kind),
        owner="platform" if suite.tenant_id is None else "tenant",
        version=version.number,
        sha256=version.sha256,
        num_cases=version.num_cases,
        created_at=suite.created_at,
        version_created_at=version.created_at,
    )


def show_run(run: EvalRun, suite: tuple[Any, str, int], counts: dict[str, int]) -> RunResource:
    """A run with its suite's id, name and version, and how many cases have which status."""
    suite_id, name, number = suite
    return RunResource(
        id=format_id("eval_run", run.id),
        suite_id=format_id("eval_suite", suite_id),
        suite=name,
        suite_version=number,
        deployment_id=format_id("deployment", run.deployment_id),
        revision_id=format_id("deployment_revision", run.revision_id),
        baseline_revision_id=_maybe("deployment_revision", run.baseline_revision_id),
        schedule_id=_maybe("eval_schedule", run.schedule_id),
        state=cast(RunState, run.state),
        score=run.score,
        num_cases=run.num_cases,
        counts=counts,
        fingerprints=run.fingerprints,
        has_mixed_engines=len(run.fingerprints) > 1,
        summary=run.summary,
        error=run.error,
        options=run.options,
        created_at=run.created_at,
        started_at=run.started_at,
        ended_at=run.ended_at,
    )


def show_result(result: EvalResult) -> ResultResource:
    """A case's."""
    return ResultResource(
        id=format_id("eval_result", result.id),
        case_index=result.case_index,
        case_id=result.case_id,
        status=cast(CaseStatus, result.status),
        reason=result.reason,
        checks=result.checks.get("checks", []),
        output=result.output,
        baseline_output=result.baseline_output,
        bits_sha256=result.bits_sha256,
        mean_logprob=result.mean_logprob,
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        finish_reason=result.finish_reason,
        ttft_ms=result.ttft_ms,
        e2e_ms=result.e2e_ms,
        fingerprint=result.fingerprint,
        replica_id=result.replica_id,
        request_id=_maybe("request", result.request_id),
    )


def show_schedule(schedule: EvalSchedule) -> ScheduleResource:
    """A schedule."""
    return ScheduleResource(
        id=format_id("eval_schedule", schedule.id),
        name=schedule.name,
        suite_id=format_id("eval_suite", schedule.suite_id),
        suite_version=schedule.suite_version,
        deployment=schedule.deployment,
        revision_id=_maybe("deployment_revision", schedule.revision_id),
        baseline_revision_id=_maybe("deployment_revision", schedule.baseline_revision_id),
        cron=schedule.cron,
        every_hours=schedule.every_hours,
        zone=schedule.zone,
        options=schedule.options,
        is_enabled=schedule.is_enabled,
        next_at=schedule.next_at,
        last_run_id=_maybe("eval_run", schedule.last_run_id),
        last_error=schedule.last_error,
        created_at=schedule.created_at,
        version=schedule.row_version,
    )


def show_comparison(
    first: EvalRun,
    second: EvalRun,
    found: Comparison,
    first_results: dict[str, EvalResult],
    second_results: dict[str, EvalResult],
) -> ComparisonResource:
    """Two runs, with both answers of every flip."""

    def flips(case_ids: tuple[str, ...]) -> list[FlipResource]:
        return [
            FlipResource(
                case_id=case_id,
                first_status=first_results[case_id].status,
                first_reason=first_results[case_id].reason,
                first_output=first_results[case_id].output,
                second_status=second_results[case_id].status,
                second_reason=second_results[case_id].reason,
                second_output=second_results[case_id].output,
            )
            for case_id in case_ids
        ]

    difference = found.logprob_difference
    return ComparisonResource(
        first_run_id=format_id("eval_run", first.id),
        second_run_id=format_id("eval_run", second.id),
        num_shared=found.both,
        only_first=list(found.only_first),
        only_second=list(found.only_second),
        same_output=found.same_output,
        broken=flips(found.broken),
        mended=flips(found.mended),
        mcnemar_p=found.p_value,
        logprob_difference=None
        if difference is None
        else IntervalResource(
            mean=difference.mean, low=difference.low, high=difference.high, count=difference.count
        ),
    )


def _maybe(kind: str, value: Any) -> str | None:  # noqa: ANN401 (a UUID or None)
    return None if value is None else format_id(kind, value)
