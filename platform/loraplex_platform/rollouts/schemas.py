"""Rollouts on the wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, StrictBool, field_validator

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import Rollout, RolloutEvent
from loraplex_platform.ids import format_id
from loraplex_platform.rollouts.assignment import StickyBy
from loraplex_platform.rollouts.gates import GateSettings
from loraplex_platform.rollouts.looks import Look, SideFigures
from loraplex_platform.rollouts.queries import Named
from loraplex_platform.rollouts.records import (
    MAX_STEPS,
    MAX_WEIGHT_BP,
    EventKind,
    Promotion,
    State,
    StepKind,
)
from loraplex_platform.rollouts.transitions import is_approved_by_hand, settings_of

_HoldS = Annotated[
    int, Field(ge=0, le=30 * 86_400, description="At least so long, whatever the gates say.")
]


class ShadowStep(Body):
    """A share of the requests is asked again of the canary; nobody sees its answers, nobody pays."""

    kind: Literal["shadow"]
    share_bp: int = Field(ge=1, le=10_000, description="Of the requests, in basis points.")
    hold_s: _HoldS


class CanaryStep(Body):
    """The canary answers a share of the subjects."""

    kind: Literal["canary"]
    weight_bp: int = Field(
        ge=1,
        le=MAX_WEIGHT_BP,
        description="Of the subjects, in basis points. Somebody must stay to compare with: what gives the canary "
        "everything is its promotion.",
    )
    hold_s: _HoldS


StepBody = Annotated[ShadowStep | CanaryStep, Field(discriminator="kind")]
RevisionRef = Annotated[
    str | int,
    Field(
        union_mode="left_to_right", description="A revision, by id (`rev_...`) or by its number."
    ),
]


def default_steps() -> list[ShadowStep | CanaryStep]:
    """A tenth of the requests in the shadow, then 1, 5, 25 and 50 % of the subjects."""
    return [
        ShadowStep(kind="shadow", share_bp=1000, hold_s=600),
        *(
            CanaryStep(kind="canary", weight_bp=weight_bp, hold_s=600)
            for weight_bp in (100, 500, 2500, 5000)
        ),
    ]


def _checked_steps(
    steps: list[ShadowStep | CanaryStep] | None,
) -> list[ShadowStep | CanaryStep] | None:
    last = 0
    for number, step in enumerate(steps or ()):
        if isinstance(step, ShadowStep):
            if last:
                raise ValueError(f"step {number} is a shadow after a canary: shadows come first.")
        elif step.weight_bp < last:
            raise ValueError(
                f"step {number} has weight_bp {step.weight_bp} after {last}: weights only grow, so that nobody "
                "is moved back."
            )
        else:
            last = step.weight_bp
    return steps


class NewRollout(Body):
    """Two revisions of one deployment, and how the second one comes to answer."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"deployment": "capitals", "canary": 2}]}
    )

    deployment: str = Field(max_length=128, description="The model id, or the deployment's id.")
    canary: RevisionRef | None = Field(default=None, description="null: the newest revision.")
    stable: RevisionRef | None = Field(default=None, description="null: what answers now.")
    steps: list[StepBody] = Field(
        default_factory=default_steps,
        min_length=1,
        max_length=MAX_STEPS,
        description="Shadows first, then canaries of growing weights.",
    )
    sticky_by: StickyBy = Field(
        default="key", description="Who stays with one side: see the user's guide."
    )
    promotion: Promotion = Field(
        default="automatic", description="approval: after the last step somebody has to promote."
    )
    gate: GateSettings = GateSettings()

    _make_sense = field_validator("steps")(_checked_steps)


class RolloutChange(Body):
    """What to change of a draft; what is not given, or null, stays."""

    canary: RevisionRef | None = None
    stable: RevisionRef | None = None
    steps: list[StepBody] | None = Field(default=None, min_length=1, max_length=MAX_STEPS)
    sticky_by: StickyBy | None = None
    promotion: Promotion | None = None
    gate: GateSettings | None = Field(
        default=None, description="All of it: what is left out is its default."
    )

    _make_sense = field_validator("steps")(_checked_steps)


class Reason(Body):
    """Why, for the history."""

    reason: Annotated[CleanText, Field(max_length=500)] = ""


class RolloutResource(Resource):
    """A rollout: how it is meant, where it is, what its gates said last."""

    object: Literal["rollout"] = "rollout"
    id: str
    tenant_id: str | None = Field(description="null: of the platform's own deployment.")
    deployment_id: str
    deployment: str
    stable_revision_id: str
    stable_number: int
    canary_revision_id: str
    canary_number: int
    state: State
    is_paused: StrictBool = Field(description="It goes no step further; failing gates still abort.")
    step: int | None = Field(description="Of `steps`, from 0; null: none has begun.")
    step_began_at: UnixSeconds | None
    steps: list[dict[str, Any]]
    sticky_by: StickyBy
    promotion: Promotion
    weight_bp: int
    shadow_bp: int
    score_bp: int
    gate: GateSettings
    changes: list[str] = Field(description="What differs between the two revisions.")
    warnings: list[str]
    verdict: dict[str, Any] | None = Field(
        description="Of the last look: each gate's numbers, and in words what it waits for."
    )
    looked_at: UnixSeconds | None
    created_by: str
    created_at: UnixSeconds
    started_at: UnixSeconds | None
    ended_at: UnixSeconds | None
    end_reason: str | None
    version: int = Field(description="As the ETag has it.")


class EventResource(Resource):
    """Something that happened to a rollout."""

    object: Literal["rollout_event"] = "rollout_event"
    id: str = Field(description="Its number, from 1.")
    at: UnixSeconds
    kind: EventKind
    actor: str
    message: str
    detail: dict[str, Any]


class SideResource(Resource):
    """One side of a step, in numbers; null: nothing to say yet."""

    num_subjects: int
    num_requests: int
    num_tokens: int = Field(description="Prompt and completion.")
    subject_share: float | None = Field(description="Of both sides' subjects.")
    request_share: float | None
    token_share: float | None
    error_rate: float | None
    abort_rate: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    finish_reason: dict[str, float] | None = Field(description="Shares of the whole answers.")
    mean_output_tokens: float | None
    mean_logprob: float | None = Field(
        description="Per token, under the stable revision, of the answers that were sampled."
    )
    num_scored: int


class MetricsResource(Resource):
    """Both sides of a step side by side. In a shadow step `canary` is what nobody saw."""

    object: Literal["rollout_metrics"] = "rollout_metrics"
    rollout_id: str
    step: int
    kind: StepKind
    share_bp: int = Field(description="What the step asks for: of subjects, or of requests.")
    stable: SideResource
    canary: SideResource
    verdict: str = Field(description="pass, fail, inconclusive, or none: no gate is asked.")
    gates: list[dict[str, Any]]


def show_rollout(rollout: Rollout, named: Named) -> RolloutResource:
    """The rollout as the API shows it."""
    return RolloutResource(
        id=format_id("rollout", rollout.id),
        tenant_id=None if rollout.tenant_id is None else format_id("tenant", rollout.tenant_id),
        deployment_id=format_id("deployment", rollout.deployment_id),
        deployment=named.deployment,
        stable_revision_id=format_id("deployment_revision", rollout.stable_revision_id),
        stable_number=named.stable_number,
        canary_revision_id=format_id("deployment_revision", rollout.canary_revision_id),
        canary_number=named.canary_number,
        state=cast(State, rollout.state),
        is_paused=rollout.is_paused,
        step=None if rollout.step_began_at is None else rollout.step,
        step_began_at=rollout.step_began_at,
        steps=rollout.steps,
        sticky_by=cast(StickyBy, rollout.sticky_by),
        promotion="approval" if is_approved_by_hand(rollout) else "automatic",
        weight_bp=rollout.weight_bp,
        shadow_bp=rollout.shadow_bp,
        score_bp=rollout.score_bp,
        gate=settings_of(rollout),
        changes=list(rollout.changes),
        warnings=list(rollout.gate["warnings"]),
        verdict=rollout.verdict,
        looked_at=rollout.looked_at,
        created_by=rollout.created_by,
        created_at=rollout.created_at,
        started_at=rollout.started_at,
        ended_at=rollout.ended_at,
        end_reason=rollout.end_reason,
        version=rollout.row_version,
    )


def show_event(event: RolloutEvent) -> EventResource:
    """The event as the API shows it."""
    return EventResource(
        id=str(event.seq),
        at=event.at,
        kind=cast(EventKind, event.kind),
        actor=event.actor,
        message=event.message,
        detail=event.detail,
    )


def show_sides(found: Look) -> tuple[SideResource, SideResource]:
    """Stable and canary, with their shares of what both had."""
    both = (found.stable, found.canary)

    def shares(value: Any) -> list[float | None]:  # noqa: ANN401 (a function of a side)
        values = [value(side) for side in both]
        total = sum(values)
        return [one / total if total else None for one in values]

    subjects = shares(lambda side: side.num_subjects)
    requests = shares(lambda side: side.num_requests)
    tokens = shares(lambda side: side.prompt_tokens + side.completion_tokens)
    shown = [
        _show_side(side, subjects[idx], requests[idx], tokens[idx]) for idx, side in enumerate(both)
    ]
    return shown[0], shown[1]


def _show_side(
    side: SideFigures,
    subject_share: float | None,
    request_share: float | None,
    token_share: float | None,
) -> SideResource:
    by_limit = side.share_of("by_limit")
    num_answers = side.sum_of("by_limit").num_requests
    return SideResource(
        num_subjects=side.num_subjects,
        num_requests=side.num_requests,
        num_tokens=side.prompt_tokens + side.completion_tokens,
        subject_share=subject_share,
        request_share=request_share,
        token_share=token_share,
        error_rate=side.share_of("error"),
        abort_rate=side.share_of("abort"),
        ttft_p50_ms=side.quantile_ms("ttft", 0.5),
        ttft_p95_ms=side.quantile_ms("ttft", 0.95),
        itl_p50_ms=side.quantile_ms("itl", 0.5),
        itl_p95_ms=side.quantile_ms("itl", 0.95),
        finish_reason=None if by_limit is None else {"stop": 1 - by_limit, "length": by_limit},
        mean_output_tokens=side.answer_tokens / num_answers if num_answers else None,
        mean_logprob=side.share_of("logprob"),
        num_scored=side.sum_of("logprob").num_requests,
    )
