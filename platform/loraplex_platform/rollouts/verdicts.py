"""What gates decide: the canary is worse than tolerated, or it is not, or nobody can say yet.

Each gate compares canary with stable against a tolerated difference (`gate_kinds.py`). It **fails** when the evidence
that the canary is worse than tolerated reaches its level, **passes** when the evidence that it is not does, and else
is **inconclusive**, which holds the rollout where it stands. Evidence is valid at every look (`evidence.py`), so
gates may be asked after each request.

Levels: a rollout whose canary is nowhere worse than tolerated is aborted with a probability of at most `alpha`, over
all its gates, steps and looks together: alpha is shared out evenly (Bonferroni). One whose canary is worse than
tolerated at some gate gets through a step with a probability of at most `beta`: all gates must pass, so each may use
beta whole.

Which requests: of the step in question, admitted while its weight holds. Under one weight both arms meet the same
hours; sums across weights would compare hours instead. Only those that the rollout assigned: pinned ones were not
drawn. What has not ended counts as soon as it can no longer end well, or a canary that hangs would never be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from loraplex_platform.rollouts.aggregates import Latencies, Mix, SubjectSums
from loraplex_platform.rollouts.evidence import log_e_value
from loraplex_platform.rollouts.gate_kinds import (
    Comparison,
    Estimate,
    Gate,
    MixGate,
    Observation,
    QuantileGate,
    Side,
    estimate,
)

Verdict = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Observed:
    """Both arms of one gate, of one step's requests."""

    stable: Observation
    canary: Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """For and against, at one look: natural logarithms.

    Attributes:
        worst: the side that decided a fail, else the one that is farthest from a pass; None without requests.
        log_e_fail: "the canary is worse than tolerated"; it fails at -ln of the side's alpha. Of the side that has most of it.
        log_e_pass: "it is not", of the side that has least of it; all pass at -ln of beta.
    """

    verdict: Verdict
    worst: Side | None
    log_e_fail: float = 0.0
    log_e_pass: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """What one gate says at one look. The estimates are None while an arm has no requests.

    Attributes:
        excess: by how much the canary is worse, in the direction in which it is worst: `low` above `tolerated` is a
            fail, `high` below it a pass. Its unit is that of the gate; of a quantile, sixteenths of an octave.
        summary: all of it in words.
    """

    gate: str
    verdict: Verdict
    stable: Estimate | None
    canary: Estimate | None
    excess: Estimate | None
    tolerated: float | None
    num_stable: int
    num_canary: int
    num_stable_subjects: int
    num_canary_subjects: int
    log_e_fail: float
    log_e_pass: float
    summary: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What all gates say together."""

    verdict: Verdict
    results: tuple[GateResult, ...]

    @property
    def summary(self) -> str:
        """What decided, in words."""
        deciding = [one.summary for one in self.results if one.verdict == self.verdict]
        return f"{self.verdict}: {'; '.join(deciding)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePlan:
    """A rollout's gates and how sure they have to be.

    Attributes:
        gates: their names differ.
        num_steps: that the gates are asked in, shadow steps too; each is judged by its own requests.
        alpha: probability of aborting a rollout whose canary is nowhere worse than tolerated, at most.
        beta: probability of passing a step with a canary that is, at most.
    """

    gates: tuple[Gate, ...]
    num_steps: int
    alpha: float = 0.05
    beta: float = 0.05

    def __post_init__(self) -> None:
        """Check the plan.

        Raises:
            ValueError: names the field and what it has to be.
        """
        if not self.gates:
            raise ValueError("gates is empty; a rollout without gates needs no plan")
        names = [gate.name for gate in self.gates]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"gates: {', '.join(twice)} is there twice; names have to differ")
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it has to be at least 1")
        for field, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 < value < 0.5:
                raise ValueError(f"{field} is {value}; it has to be above 0 and below 0.5")

    @property
    def gate_alpha(self) -> float:
        """Of one gate in one step."""
        return self.alpha / (len(self.gates) * self.num_steps)

    def decide(self, observed: Mapping[str, Observed]) -> Decision:
        """Ask all gates of a step.

        Args:
            observed: by gate's name; a gate that is not there has met no requests.

        Raises:
            ValueError: observations for no gate, or sums that cannot be.
            TypeError: sums of another kind than the gate takes.
        """
        unknown = sorted(observed.keys() - {gate.name for gate in self.gates})
        if unknown:
            raise ValueError(f"no gate is called {', '.join(unknown)}")
        results = tuple(self.ask(gate, observed.get(gate.name)) for gate in self.gates)
        return Decision(overall({result.verdict for result in results}), results)

    def ask(self, gate: Gate, observed: Observed | None) -> GateResult:
        """One gate, with its numbers. Raises as `decide` does."""
        if observed is None:
            return _without_requests(gate, Comparison(0, 0, 0, 0, ()))
        comparison = compare(gate, observed)
        evidence = self.weigh(gate, comparison)
        worst = evidence.worst
        if worst is None:
            return _without_requests(gate, comparison)
        stable, canary = worst.stable.estimate(), worst.canary.estimate()
        excess = estimate(
            worst.excess,
            worst.root,
            worst.span,
            worst.information,
            self.gate_alpha / len(comparison.sides),
            self.beta,
        )
        return GateResult(
            gate=gate.name,
            verdict=evidence.verdict,
            stable=stable,
            canary=canary,
            excess=excess,
            tolerated=worst.tolerated,
            num_stable=comparison.num_stable,
            num_canary=comparison.num_canary,
            num_stable_subjects=comparison.num_stable_subjects,
            num_canary_subjects=comparison.num_canary_subjects,
            log_e_fail=evidence.log_e_fail,
            log_e_pass=evidence.log_e_pass,
            summary=f"{gate.words(stable, canary, worst.label)}{_counts(gate, comparison)}",
        )

    def weigh(self, gate: Gate, comparison: Comparison) -> Evidence:
        """The verdict alone: a hundredth of the work of `ask`, which takes its own from here."""
        if not comparison.sides:
            return Evidence(verdict="inconclusive", worst=None)
        fails, passes = [], []
        for side in comparison.sides:
            z = side.root(side.tolerated)
            fails.append(log_e_value(z, side.information))
            passes.append(log_e_value(-z, side.information))
        verdict: Verdict = "inconclusive"
        worst = comparison.sides[passes.index(min(passes))]
        if min(comparison.num_stable, comparison.num_canary) >= gate.min_requests:
            if max(fails) >= -math.log(self.gate_alpha / len(comparison.sides)):
                verdict = "fail"
                worst = comparison.sides[fails.index(max(fails))]
            elif min(passes) >= -math.log(self.beta):
                verdict = "pass"
        return Evidence(verdict=verdict, worst=worst, log_e_fail=max(fails), log_e_pass=min(passes))


def overall(verdicts: set[Verdict]) -> Verdict:
    """Any fail is one, and only passes alone are one."""
    if "fail" in verdicts:
        return "fail"
    return "pass" if verdicts == {"pass"} else "inconclusive"


def compare(gate: Gate, observed: Observed) -> Comparison:
    """Both arms as the gate sees them.

    Raises:
        ValueError: sums that cannot be.
        TypeError: sums of another kind than the gate takes.
    """
    if isinstance(gate, QuantileGate):
        return gate.compare(*_both(gate, observed, Latencies))
    if isinstance(gate, MixGate):
        return gate.compare(*_both(gate, observed, Mix))
    return gate.compare(*_both(gate, observed, SubjectSums))


_Kind = TypeVar("_Kind")


def _both(gate: Gate, observed: Observed, kind: type[_Kind]) -> tuple[_Kind, _Kind]:
    stable, canary = observed.stable, observed.canary
    if not isinstance(stable, kind) or not isinstance(canary, kind):
        raise TypeError(f"gate {gate.name!r} takes {kind.__name__} of both arms")
    return stable, canary


def _without_requests(gate: Gate, comparison: Comparison) -> GateResult:
    return GateResult(
        gate=gate.name,
        verdict="inconclusive",
        stable=None,
        canary=None,
        excess=None,
        tolerated=None,
        num_stable=comparison.num_stable,
        num_canary=comparison.num_canary,
        num_stable_subjects=comparison.num_stable_subjects,
        num_canary_subjects=comparison.num_canary_subjects,
        log_e_fail=0.0,
        log_e_pass=0.0,
        summary=f"{gate.name}: nothing to compare yet{_counts(gate, comparison)}",
    )


def _counts(gate: Gate, comparison: Comparison) -> str:
    few = min(comparison.num_stable, comparison.num_canary) < gate.min_requests
    least = f", at least {gate.min_requests} of each wanted" if few else ""
    return (
        f" ({comparison.num_canary} requests of {comparison.num_canary_subjects} subjects, stable"
        f" {comparison.num_stable} of {comparison.num_stable_subjects}{least})"
    )
