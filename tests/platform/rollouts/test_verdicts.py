"""Verdicts: what fails, what passes, what holds, and in which words."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loraplex_platform.rollouts.aggregates import Latencies, Mix, SubjectSums
from loraplex_platform.rollouts.gate_kinds import (
    Gate,
    MeanGate,
    MixGate,
    Observation,
    QuantileGate,
    ShareGate,
)
from loraplex_platform.rollouts.verdicts import (
    GatePlan,
    GateResult,
    Observed,
    Verdict,
    compare,
    overall,
)

ERRORS = ShareGate(name="errors", margin=0.01)
TTFT = QuantileGate(name="time to first token", max_ratio=1.25)
LIKELIHOOD = MeanGate(name="log-probability", margin=0.2, worse="lower", unit="nat")
LENGTH = MeanGate(name="output tokens", margin=math.log(1.5), worse="either", is_log=True)
MIX = MixGate(name="finish_reason", categories=("stop", "length", "other"), margin=0.05)


def share(num: int, hits: int) -> SubjectSums:
    """Of subjects with one request each."""
    return SubjectSums.of((idx, float(idx < hits)) for idx in range(num))


def normal(num: int, mean: float, seed: int, spread: float = 0.5) -> SubjectSums:
    values = np.random.default_rng(seed).normal(mean, spread, num)
    return SubjectSums.of(enumerate(values.tolist()))


def latencies(num: int, median_ms: float, seed: int) -> Latencies:
    values = np.random.default_rng(seed).lognormal(math.log(median_ms), 0.6, num)
    return Latencies.of(enumerate(values.tolist()), 0.95)


def mix(num: int, *shares: float) -> Mix:
    bounds = [round(num * share) for share in np.cumsum(shares)]
    kinds = [
        (idx, next(one for one, bound in zip(MIX.categories, bounds, strict=True) if idx < bound))
        for idx in range(num)
    ]
    return Mix.of(kinds, MIX.categories)


def ask(gate: Gate, stable: Observation, canary: Observation, **plan: Any) -> GateResult:
    return GatePlan(gates=(gate,), num_steps=1, **plan).ask(gate, Observed(stable, canary))


# ---------------------------------------------------------------------------- verdicts

CASES: list[tuple[Gate, Observation, Observation, Verdict]] = [
    (ERRORS, share(5_000, 30), share(500, 40), "fail"),
    (ERRORS, share(20_000, 120), share(4_000, 24), "pass"),
    (ERRORS, share(5_000, 30), share(200, 4), "inconclusive"),
    (TTFT, latencies(3_000, 200, 1), latencies(600, 400, 2), "fail"),
    (TTFT, latencies(20_000, 200, 1), latencies(9_000, 200, 2), "pass"),
    (TTFT, latencies(3_000, 200, 1), latencies(300, 210, 2), "inconclusive"),
    (LIKELIHOOD, normal(500, -1.1, 1), normal(100, -1.6, 2), "fail"),
    (LIKELIHOOD, normal(2_000, -1.1, 1), normal(500, -1.1, 2), "pass"),
    (LIKELIHOOD, normal(2_000, -1.1, 1), normal(500, 0.9, 2), "pass"),
    (LIKELIHOOD, normal(500, -1.1, 1), normal(100, -1.3, 2), "inconclusive"),
    (LENGTH, normal(2_000, 5.0, 1), normal(300, 6.0, 2), "fail"),
    (LENGTH, normal(2_000, 5.0, 1), normal(300, 4.0, 2), "fail"),
    (LENGTH, normal(2_000, 5.0, 1), normal(300, 5.0, 2), "pass"),
    (MIX, mix(5_000, 0.85, 0.12, 0.03), mix(800, 0.65, 0.32, 0.03), "fail"),
    (MIX, mix(5_000, 0.85, 0.12, 0.03), mix(4_000, 0.85, 0.12, 0.03), "pass"),
    (MIX, mix(5_000, 0.85, 0.12, 0.03), mix(200, 0.80, 0.17, 0.03), "inconclusive"),
]


@pytest.mark.parametrize(("gate", "stable", "canary", "verdict"), CASES)
def test_a_gates_verdict_and_its_limits_agree(
    gate: Gate, stable: Observation, canary: Observation, verdict: Verdict
) -> None:
    found = ask(gate, stable, canary)

    assert found.verdict == verdict
    assert found.excess is not None
    assert found.tolerated is not None
    assert found.excess.low <= found.excess.value <= found.excess.high
    assert (found.excess.low > found.tolerated) == (verdict == "fail")
    assert (found.excess.high < found.tolerated) == (verdict == "pass")
    for arm in (found.stable, found.canary):
        assert arm is not None
        assert arm.low <= arm.value <= arm.high


@pytest.mark.parametrize(
    ("gate", "stable", "canary"),
    [
        (ERRORS, share(5_000, 0), share(49, 49)),
        (ERRORS, share(49, 0), share(5_000, 5_000)),
        (TTFT, latencies(3_000, 200, 1), latencies(99, 20_000, 2)),
        (LIKELIHOOD, normal(500, -1.1, 1), normal(49, -9.0, 2)),
    ],
)
def test_too_few_requests_of_either_arm_decide_nothing(
    gate: Gate, stable: Observation, canary: Observation
) -> None:
    found = ask(gate, stable, canary)

    assert found.verdict == "inconclusive"
    assert f"at least {gate.min_requests} of each wanted" in found.summary


def test_a_canary_without_requests_holds() -> None:
    plan = GatePlan(gates=(ERRORS, LIKELIHOOD, MIX, TTFT), num_steps=1)
    none = SubjectSums.of(())
    observed = {
        "errors": Observed(share(100, 0), none),
        "finish_reason": Observed(Mix.of([], MIX.categories), mix(100, 0.5, 0.5, 0)),
        "time to first token": Observed(latencies(100, 5, 1), Latencies.of([], 0.95)),
    }

    found = plan.decide(observed)

    assert found.verdict == "inconclusive"
    assert [one.canary for one in found.results] == [None] * 4
    assert all("nothing to compare yet" in one.summary for one in found.results)
    assert "errors" in found.summary


def test_one_subject_alone_fails_a_canary_only_when_it_is_blatant() -> None:
    """All 300 requests are of one key: that many independent ones would be enough at a tenth of errors."""
    stable = share(5_000, 30)

    def canary(num_errors: int) -> SubjectSums:
        return SubjectSums.of(("key", float(idx < num_errors)) for idx in range(300))

    assert ask(ERRORS, stable, canary(300)).verdict == "fail"
    assert ask(ERRORS, stable, share(300, 30)).verdict == "fail"
    few = [("key", 0.0)] * 5_000
    few_errors = SubjectSums.of([*few, ("key", 1.0)])
    assert ask(ERRORS, few_errors, canary(30)).verdict == "inconclusive"


def test_gates_share_alpha_with_each_other_and_over_the_steps() -> None:
    plan = GatePlan(gates=(ERRORS, LIKELIHOOD), num_steps=5, alpha=0.1)
    stable, canary = share(5_000, 30), share(500, 18)

    alone = ask(ERRORS, stable, canary, alpha=0.1)
    shared = plan.ask(ERRORS, Observed(stable, canary))

    assert plan.gate_alpha == pytest.approx(0.01)
    assert alone.log_e_fail == shared.log_e_fail
    assert -math.log(0.1) < shared.log_e_fail < -math.log(0.01)
    assert (alone.verdict, shared.verdict) == ("fail", "inconclusive")


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["inconclusive", "fail", "pass"], "fail"),
    ],
)
def test_any_fail_is_one_and_all_must_pass(verdicts: list[Verdict], expected: Verdict) -> None:
    assert overall(set(verdicts)) == expected


def test_a_decision_names_what_decided() -> None:
    plan = GatePlan(gates=(ERRORS, LIKELIHOOD), num_steps=1)
    observed = {
        "errors": Observed(share(5_000, 30), share(600, 4)),
        "log-probability": Observed(normal(500, -1.1, 1), normal(100, -5.0, 2)),
    }

    found = plan.decide(observed)

    assert found.verdict == "fail"
    assert found.summary.startswith("fail: canary log-probability -5")
    assert "errors" not in found.summary


def test_a_bound_that_there_is_none_of_is_not_said_as_a_number() -> None:
    found = ask(TTFT, latencies(3_000, 200, 1), latencies(10, 200, 2)).summary

    assert re.search(r"\(\d+ or more\) ms", found), found
    assert not re.search(r"\d{9}", found), found


def test_a_bound_that_is_a_hairs_breadth_from_nought_is_said_as_nought() -> None:
    found = ask(TTFT, latencies(5, 200, 1), latencies(4, 200, 2)).summary

    assert re.search(r"\(0 or more\) ms", found), found


def test_weighing_and_asking_agree() -> None:
    for gate, stable, canary, verdict in CASES:
        plan = GatePlan(gates=(gate,), num_steps=1)

        assert plan.weigh(gate, compare(gate, Observed(stable, canary))).verdict == verdict


# ---------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("gate", "stable", "canary", "words"),
    [
        (ERRORS, share(5_000, 30), share(500, 20), r"^canary errors 4 % \(.* to .*\) against 0.6 %, tolerated \+1 points \(500 requests of 500 subjects, stable 5000 of 5000\)$"),
        (TTFT, latencies(3_000, 200, 1), latencies(600, 400, 2), r"^canary time to first token p95 1\d{3} \(\d+ to \d+\) ms against 5\d\d ms, tolerated x1.25 \("),
        (LIKELIHOOD, normal(500, -1.1, 1), normal(100, -1.6, 2), r"^canary log-probability -1.\d* \(-1.* to -1.*\) nat against -1.\d* nat, tolerated -0.2 nat \("),
        (LENGTH, normal(2_000, 5.0, 1), normal(300, 6.0, 2), r"^canary output tokens \d{3} \(.*\) against 1\d\d, tolerated x0.667 to x1.5 \("),
        (MIX, mix(5_000, 0.85, 0.12, 0.03), mix(800, 0.65, 0.32, 0.03), r'^canary finish_reason "(stop|length)" .* % \(.*\) against .* %, tolerated ±5 points \('),
    ],
)  # fmt: skip
def test_a_result_says_its_numbers(
    gate: Gate, stable: Observation, canary: Observation, words: str
) -> None:
    found = ask(gate, stable, canary).summary

    assert re.search(words, found), found


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ShareGate(name="", margin=0.1), "name"),
        (lambda: ShareGate(name="errors", margin=1.0), "'errors': margin is 1.0"),
        (lambda: ShareGate(name="errors", margin=math.nan), "margin is nan"),
        (lambda: ShareGate(name="errors", margin=0.1, min_requests=19), "at least 20"),
        (lambda: ShareGate(name="errors", margin=0.1, assumed_icc=2.0), "from 0 to 1"),
        (lambda: MeanGate(name="m", margin=-1.0, worse="lower"), "margin is -1.0"),
        (lambda: MeanGate(name="m", margin=1.0, worse="up"), "lower, higher or either"),  # type: ignore[arg-type]
        (lambda: QuantileGate(name="q", max_ratio=0.9), "max_ratio is 0.9"),
        (lambda: QuantileGate(name="q", max_ratio=1.2, quantile=1.0), "quantile is 1.0"),
        (lambda: QuantileGate(name="q", max_ratio=1.2, quantile=0.99), "at least 200"),
        (lambda: MixGate(name="x", categories=("stop",), margin=0.1), "categories"),
        (lambda: MixGate(name="x", categories=("a", "a"), margin=0.1), "categories"),
        (lambda: GatePlan(gates=(), num_steps=1), "gates is empty"),
        (lambda: GatePlan(gates=(ERRORS, ERRORS), num_steps=1), "errors is there twice"),
        (lambda: GatePlan(gates=(ERRORS,), num_steps=0), "num_steps is 0"),
        (lambda: GatePlan(gates=(ERRORS,), num_steps=1, alpha=0.0), "alpha is 0.0"),
        (lambda: GatePlan(gates=(ERRORS,), num_steps=1, beta=0.5), "beta is 0.5"),
    ],
)
def test_thresholds_out_of_range_are_named(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()


def test_observations_of_no_gate_or_of_another_kind_are_refused() -> None:
    plan = GatePlan(gates=(ERRORS, MIX), num_steps=1)
    one = Observed(share(100, 1), share(100, 1))

    with pytest.raises(ValueError, match="no gate is called speed"):
        plan.decide({"speed": one})
    with pytest.raises(TypeError, match="'finish_reason' takes Mix"):
        plan.decide({"finish_reason": one})
    other = dataclasses.replace(MIX, categories=("stop", "length", "tool_calls"))
    with pytest.raises(ValueError, match="categories are stop, length, tool_calls"):
        ask(other, mix(100, 0.5, 0.5, 0), mix(100, 0.5, 0.5, 0))
