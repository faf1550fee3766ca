"""Which gates a rollout has and how strict they are: the settings of people, and the plan they make.

The settings are what `rollouts.gate` keeps as JSON. Of what each gate compares, `gate_kinds.py` knows more, of
the levels `verdicts.py`, and of which requests count in it `looks.py`.

| field | what is compared | in shadow steps |
|---|---|---|
| error_rate | share of requests that ended in an engine's or the adapter's fault, a 5xx or nothing at all | yes |
| abort_rate | share of answers that the client ended | no: nobody reads a shadow |
| ttft, itl | a quantile of time to first token, and of the 95th percentile between tokens | no: shadows wait |
| finish_reason | shares of answers ended by the model and by their limit | yes |
| output_length | geometric mean of the answers' tokens | yes |
| logprob | mean log-probability of the answers under the stable revision, a token | yes |
| offline | an eval suite that the canary must pass before anything is sent to it | before |
| golden | an eval suite asked of the canary again and again; a failed run aborts | yes |
"""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from loraplex_platform.control.schemas import Body
from loraplex_platform.evals.schemas import RunRequest, SuiteId
from loraplex_platform.rollouts.gate_kinds import (
    Gate,
    MeanGate,
    MixGate,
    QuantileGate,
    ShareGate,
)
from loraplex_platform.rollouts.records import StepKind
from loraplex_platform.rollouts.verdicts import GatePlan

# Ends that say something of an answer's length; errors and aborts have gates of their own.
REASONS: Final = ("stop", "length")
# A log-probability of -inf would be all there is in a sum: what is less likely than this counts as this.
LEAST_LOGPROB: Final = -20.0

_MinRequests = Annotated[
    int, Field(ge=20, le=10_000_000, description="Of each side, in one step; fewer decide nothing.")
]


class ShareSettings(Body):
    """A share that must not grow."""

    max_increase: float = Field(
        ge=0, lt=1, description="Tolerated growth of the share: 0.01 is one point."
    )
    min_requests: _MinRequests = 50


class LatencySettings(Body):
    """A latency's quantile that must not grow."""

    max_ratio: float = Field(
        default=1.25,
        ge=1,
        le=100,
        description="Tolerated canary / stable. Under 1.05 is finer than what is measured.",
    )
    quantile: float = Field(default=0.95, gt=0, lt=1)
    min_requests: _MinRequests = 100

    @model_validator(mode="after")
    def _is_enough(self) -> LatencySettings:
        QuantileGate(
            name="min_requests",
            max_ratio=self.max_ratio,
            quantile=self.quantile,
            min_requests=self.min_requests,
        )
        return self


class FinishSettings(Body):
    """Shares of answers by how they ended, which must not move either way."""

    max_shift: float = Field(default=0.05, ge=0, lt=1, description="0.05 is five points.")
    min_requests: _MinRequests = 50


class LengthSettings(Body):
    """The answers' length, which must not move either way."""

    max_ratio: float = Field(
        default=1.5, gt=1, le=100, description="Tolerated growth; shrinking likewise."
    )
    min_requests: _MinRequests = 50


class LogprobSettings(Body):
    """How likely the canary's answers are to the stable revision: fluent nonsense is not."""

    max_drop: float = Field(
        default=0.2, ge=0, le=20, description="Tolerated fall, in nats a token."
    )
    sample_bp: int = Field(
        default=1000,
        ge=1,
        le=10_000,
        description="Of both sides' answers so many are computed, in basis points.",
    )
    min_requests: _MinRequests = 50


class SuiteSettings(RunRequest):
    """An eval suite that is asked of the canary."""

    suite_id: SuiteId
    suite_version: int | None = Field(
        default=None, ge=1, description="null: the newest when the rollout is made."
    )
    tenant_id: str | None = Field(
        default=None,
        max_length=80,
        description="Of a platform rollout: in whose books the run's (unbilled) requests are.",
    )


class GoldenSettings(SuiteSettings):
    """One that is asked again while the rollout goes on."""

    every_s: int = Field(default=300, ge=10, le=86_400, description="From one run's start on.")


class GateSettings(Body):
    """All gates; null switches one off."""

    model_config = ConfigDict(extra="forbid")

    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Probability of aborting a canary that is nowhere worse than tolerated, at most: over all "
        "gates, steps and looks together.",
    )
    beta: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Probability of letting a canary that is worse than tolerated through a step, at most.",
    )
    error_rate: ShareSettings | None = ShareSettings(max_increase=0.01)
    abort_rate: ShareSettings | None = ShareSettings(max_increase=0.02)
    ttft: LatencySettings | None = LatencySettings()
    itl: LatencySettings | None = LatencySettings()
    finish_reason: FinishSettings | None = FinishSettings()
    output_length: LengthSettings | None = LengthSettings()
    logprob: LogprobSettings | None = LogprobSettings()
    offline: SuiteSettings | None = None
    golden: GoldenSettings | None = None

    @property
    def score_bp(self) -> int:
        """Share of both sides' answers whose likelihood is computed."""
        return 0 if self.logprob is None else self.logprob.sample_bp

    @property
    def suites(self) -> list[tuple[Literal["offline", "golden"], SuiteSettings]]:
        """Those that are asked for, by field."""
        found: list[tuple[Literal["offline", "golden"], SuiteSettings | None]] = [
            ("offline", self.offline),
            ("golden", self.golden),
        ]
        return [(name, suite) for name, suite in found if suite is not None]

    def gates(self, kind: StepKind) -> tuple[Gate, ...]:
        """Those that are asked in a step of this kind, by the settings' own names."""
        found: list[Gate] = []
        if self.error_rate is not None:
            found.append(_share("error_rate", self.error_rate))
        if self.abort_rate is not None and kind == "canary":
            found.append(_share("abort_rate", self.abort_rate))
        if self.ttft is not None and kind == "canary":
            found.append(_latency("ttft", self.ttft))
        if self.itl is not None and kind == "canary":
            found.append(_latency("itl", self.itl))
        if self.finish_reason is not None:
            found.append(
                MixGate(
                    name="finish_reason",
                    categories=REASONS,
                    margin=self.finish_reason.max_shift,
                    min_requests=self.finish_reason.min_requests,
                )
            )
        if self.output_length is not None:
            found.append(
                MeanGate(
                    name="output_length",
                    margin=math.log(self.output_length.max_ratio),
                    worse="either",
                    unit="tokens",
                    is_log=True,
                    min_requests=self.output_length.min_requests,
                )
            )
        if self.logprob is not None:
            found.append(
                MeanGate(
                    name="logprob",
                    margin=self.logprob.max_drop,
                    worse="lower",
                    unit="nat",
                    min_requests=self.logprob.min_requests,
                )
            )
        return tuple(found)

    def plan(self, kind: StepKind, num_steps: int) -> GatePlan | None:
        """How a step of this kind is judged; None: no gate is asked in it.

        Args:
            num_steps: of the whole rollout, among which alpha is shared out.
        """
        gates = self.gates(kind)
        if not gates:
            return None
        return GatePlan(gates=gates, num_steps=num_steps, alpha=self.alpha, beta=self.beta)


def _share(name: str, settings: ShareSettings) -> ShareGate:
    return ShareGate(name=name, margin=settings.max_increase, min_requests=settings.min_requests)


def _latency(name: str, settings: LatencySettings) -> QuantileGate:
    return QuantileGate(
        name=name,
        max_ratio=settings.max_ratio,
        quantile=settings.quantile,
        min_requests=settings.min_requests,
    )
