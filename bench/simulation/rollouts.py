"""Rollouts whose truth is known: requests of two arms, looked at again and again, until a gate fails.

Requests come from subjects who differ: in how many they send (log-normal, so a few send most), in how often theirs
fail, how long their prompts and answers are, and how likely their answers. Each stays in one arm. Latency has a
Pareto tail. So an arm's requests are correlated and skewed, as they are in service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
from loraplex_platform.rollouts.aggregates import (
    BUCKETS_PER_OCTAVE,
    Histogram,
    Latencies,
    Mix,
    SubjectSums,
)
from loraplex_platform.rollouts.assignment import Subject, chooses_canary
from loraplex_platform.rollouts.gate_kinds import (
    Gate,
    MeanGate,
    MixGate,
    QuantileGate,
    ShareGate,
)
from loraplex_platform.rollouts.verdicts import GatePlan, Observed, compare, overall

REASONS: Final = ("stop", "length", "tool_calls")
MIN_LOG_PROBABILITY: Final = -20.0
_TENANT: Final = UUID(int=7)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """One arm's service, over all subjects.

    Attributes:
        errors, aborts: shares of requests.
        ttft_ms, itl_ms: medians: of an answer the first token, of an answer the 95th percentile between tokens.
        log_probability: mean per token, in nats.
        tokens: of the median answer.
        length: share of answers that their limit ended.
    """

    errors: float = 0.006
    aborts: float = 0.02
    ttft_ms: float = 180.0
    itl_ms: float = 25.0
    log_probability: float = -1.1
    tokens: float = 120.0
    length: float = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who sends requests, and what each arm does with them.

    Attributes:
        outage: the part of all requests, in the middle of them, that fail in either arm.
    """

    stable: Truth = field(default_factory=Truth)
    canary: Truth = field(default_factory=Truth)
    num_requests: int = 5_000
    num_subjects: int = 1_000
    weight_bp: int = 2_000
    outage: float = 0.0


def margins(scale: float = 1.0) -> tuple[Gate, ...]:
    """The seven gates; `scale` 0 tolerates no difference at all."""
    return (
        ShareGate(name="errors", margin=0.01 * scale),
        ShareGate(name="aborts", margin=0.02 * scale),
        QuantileGate(name="ttft", max_ratio=1.1**scale),
        QuantileGate(name="inter-token", max_ratio=1.1**scale),
        MeanGate(name="log-probability", margin=0.2 * scale, worse="lower", unit="nat"),
        MeanGate(name="output tokens", margin=math.log(1.5) * scale, worse="either", is_log=True),
        MixGate(name="finish_reason", categories=REASONS, margin=0.05 * scale),
    )


def at_the_margin(truth: Truth) -> Truth:
    """As much worse, in everything, as `margins()` tolerates."""
    return replace(
        truth,
        errors=truth.errors + 0.01,
        aborts=truth.aborts + 0.02,
        ttft_ms=truth.ttft_ms * 1.1,
        itl_ms=truth.itl_ms * 1.1,
        log_probability=truth.log_probability - 0.2,
        tokens=truth.tokens * 1.5,
        length=truth.length + 0.05,
    )


FAULTS: Final[dict[str, Callable[[Truth], Truth]]] = {
    "errors +5 points": lambda truth: replace(truth, errors=truth.errors + 0.05),
    "time to first token x1.5": lambda truth: replace(truth, ttft_ms=truth.ttft_ms * 1.5),
    "inter-token x1.5": lambda truth: replace(truth, itl_ms=truth.itl_ms * 1.5),
    "log-probability -0.5 nat": lambda truth: replace(
        truth, log_probability=truth.log_probability - 0.5
    ),
    "fluent garbage (-4 nat)": lambda truth: replace(
        truth, log_probability=truth.log_probability - 4
    ),
    "ended by limit +15 points": lambda truth: replace(truth, length=truth.length + 0.15),
    "output x3": lambda truth: replace(truth, tokens=truth.tokens * 3),
}


# ---------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Requests:
    """All of one rollout, in the order in which they came."""

    subjects: npt.NDArray[np.int64]
    is_canary: npt.NDArray[np.bool_]
    is_error: npt.NDArray[np.bool_]
    is_abort: npt.NDArray[np.bool_]
    ttft_ms: Floats
    itl_ms: Floats
    log_probability: Floats
    log_tokens: Floats
    reason: npt.NDArray[np.int64]

    @cached_property
    def values(self) -> dict[str, Floats]:
        """What is summed, by name; shares as 0 and 1."""
        found = {
            "errors": self.is_error.astype(float),
            "aborts": self.is_abort.astype(float),
            "log-probability": np.maximum(self.log_probability, MIN_LOG_PROBABILITY),
            "output tokens": self.log_tokens,
        }
        return found | {
            name: (self.reason == idx).astype(float) for idx, name in enumerate(REASONS)
        }


def draw(world: World, seed: int) -> Requests:
    """One rollout's requests, all of them determined by the seed."""
    rng = np.random.default_rng(seed)
    count, num_subjects = world.num_requests, world.num_subjects
    salt = seed.to_bytes(8, "big")
    arms = np.array(
        [
            chooses_canary(salt, Subject("user", _TENANT, idx.to_bytes(4, "big")), world.weight_bp)
            for idx in range(num_subjects)
        ]
    )
    activity = rng.lognormal(0.0, 1.0, num_subjects)
    subjects = rng.choice(num_subjects, size=count, p=activity / activity.sum())
    is_canary = arms[subjects]

    def of_arm(name: str) -> Floats:
        return np.where(is_canary, getattr(world.canary, name), getattr(world.stable, name))

    def of_subject(spread: float) -> Floats:
        return np.asarray(rng.normal(0.0, spread, num_subjects)[subjects])

    def happens(name: str, icc: float) -> npt.NDArray[np.bool_]:
        """A share of the stable arm spread over subjects by a beta distribution; the canary adds to each alike."""
        base = getattr(world.stable, name)
        size = 1 / icc - 1
        shares = rng.beta(base * size, (1 - base) * size, num_subjects)[subjects]
        added = np.where(is_canary, getattr(world.canary, name) - base, 0.0)
        # Scaled so that the mean moves by exactly that much and nobody's share leaves 0..1.
        shares = shares + added * (1 - shares) / (1 - base)
        return np.asarray(rng.random(count) < shares)

    prompts = of_subject(0.3)
    tail = np.where(rng.random(count) < 0.03, 1 + rng.pareto(1.8, count), 1.0)
    is_length = happens("length", 0.05)
    is_outage = np.abs(np.arange(count) / count - 0.5) < world.outage / 2
    return Requests(
        subjects=subjects,
        is_canary=is_canary,
        is_error=happens("errors", 0.02) | is_outage,
        is_abort=happens("aborts", 0.03),
        ttft_ms=of_arm("ttft_ms") * np.exp(prompts + rng.normal(0.0, 0.6, count)) * tail,
        itl_ms=of_arm("itl_ms") * np.exp(of_subject(0.1) + rng.normal(0.0, 0.25, count)),
        log_probability=of_arm("log_probability")
        + of_subject(0.2)
        + 0.4 * (1 - rng.gamma(2.0, 0.5, count)) / 0.7,  # skewed to the unlikely
        log_tokens=np.log(of_arm("tokens")) + of_subject(0.4) + rng.normal(0.0, 0.8, count),
        reason=np.where(is_length, 1, np.where(rng.random(count) < 0.03, 2, 0)),
    )


# ---------------------------------------------------------------------------- looks


class _Running:
    """`SubjectSums` of one arm, kept up request by request."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._totals: dict[int, float] = {}
        self._num = self._square_requests = 0
        self._total = self._total_squares = self._product = self._square_totals = 0.0

    def add(self, subject: int, value: float) -> None:
        count, total = self._counts.get(subject, 0), self._totals.get(subject, 0.0)
        self._counts[subject], self._totals[subject] = count + 1, total + value
        self._num += 1
        self._square_requests += 2 * count + 1
        self._total += value
        self._total_squares += value * value
        self._product += total + (count + 1) * value
        self._square_totals += value * (2 * total + value)

    def sums(self) -> SubjectSums:
        return SubjectSums(
            num_subjects=len(self._counts),
            num_requests=self._num,
            total=self._total,
            total_squares=self._total_squares,
            square_requests=self._square_requests,
            product=self._product,
            square_totals=self._square_totals,
        )


@dataclass(frozen=True)
class _Arm:
    """One arm, cut at any look."""

    requests: Requests
    places: npt.NDArray[np.int64]  # of its requests, in the order of all
    buckets: dict[str, npt.NDArray[np.int64]]

    @classmethod
    def of(cls, requests: Requests, is_canary: bool) -> _Arm:
        places = np.flatnonzero(requests.is_canary == is_canary)
        times = {"ttft": requests.ttft_ms, "inter-token": requests.itl_ms}
        buckets = {
            name: np.floor(BUCKETS_PER_OCTAVE * np.log2(values[places])).astype(np.int64)
            for name, values in times.items()
        }
        return cls(requests, places, buckets)

    def latencies(self, name: str, quantile: float, num: int) -> Latencies:
        """Of its first `num` requests."""
        buckets = self.buckets[name][:num]
        found, counts = np.unique(buckets, return_counts=True)
        histogram = Histogram(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if not num:
            return Latencies(histogram, SubjectSums.of(()))
        is_tail = (buckets >= histogram.quantile_bucket(quantile)).astype(float)
        subjects = self.requests.subjects[self.places[:num]]
        n = np.bincount(subjects)
        s = np.bincount(subjects, weights=is_tail)
        tail = SubjectSums(
            num_subjects=int(np.count_nonzero(n)),
            num_requests=num,
            total=float(s.sum()),
            total_squares=float(s.sum()),
            square_requests=int((n * n).sum()),
            product=float((n * s).sum()),
            square_totals=float((s * s).sum()),
        )
        return Latencies(histogram, tail)


def looks(
    requests: Requests, gates: Sequence[Gate], every: int
) -> Iterator[tuple[int, int, dict[str, Observed]]]:
    """After each `every` requests: how many there were, how many of the canary, and what each gate is told."""
    arms = [_Arm.of(requests, is_canary) for is_canary in (False, True)]
    names = list(requests.values)
    running = [{name: _Running() for name in names} for _ in arms]
    nums = [0, 0]
    columns = [requests.values[name].tolist() for name in names]
    for place, (subject, is_canary) in enumerate(
        zip(requests.subjects.tolist(), requests.is_canary.tolist(), strict=True)
    ):
        nums[is_canary] += 1
        for sums, column in zip(running[is_canary].values(), columns, strict=True):
            sums.add(subject, column[place])
        if (place + 1) % every == 0:

            def observed(gate: Gate) -> Observed:
                if isinstance(gate, QuantileGate):
                    return Observed(
                        *(
                            arm.latencies(gate.name, gate.quantile, num)
                            for arm, num in zip(arms, nums, strict=True)
                        )
                    )
                if isinstance(gate, MixGate):
                    return Observed(
                        *(Mix({one: arm[one].sums() for one in REASONS}) for arm in running)
                    )
                return Observed(*(arm[gate.name].sums() for arm in running))

            yield place + 1, nums[1], {gate.name: observed(gate) for gate in gates}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one rollout.

    Attributes:
        failed_by: the gate that ended it; None: none did.
        passed_at: requests at the first look at which all gates passed.
        num_requests, num_canary: until the end.
    """

    failed_by: str | None
    passed_at: int | None
    num_requests: int
    num_canary: int


def replay(world: World, plan: GatePlan, seed: int, every: int = 10) -> Outcome:
    """Ask the plan's gates after each `every` requests until one fails or the requests are over."""
    passed_at: int | None = None
    num_requests = num_canary = 0
    for num_requests, num_canary, observed in looks(draw(world, seed), plan.gates, every):
        verdicts = {
            gate.name: plan.weigh(gate, compare(gate, observed[gate.name])).verdict
            for gate in plan.gates
        }
        failed = [name for name, verdict in verdicts.items() if verdict == "fail"]
        if failed:
            return Outcome(failed[0], passed_at, num_requests, num_canary)
        if passed_at is None and overall(set(verdicts.values())) == "pass":
            passed_at = num_requests
    return Outcome(None, passed_at, num_requests, num_canary)


def replay_naively(
    world: World, plan: GatePlan, seed: int, every: int = 10, *, is_once: bool = False
) -> Outcome:
    """What peeking does: tests for a fixed number of independent requests, at the same levels, at every look.

    Shares and means by z, quantiles by how many of the canary lie beyond stable's.

    Args:
        is_once: look only when the requests are over, as such a test means it.
    """
    num_requests = num_canary = 0
    for num_requests, num_canary, observed in looks(
        draw(world, seed), plan.gates, world.num_requests if is_once else every
    ):
        for gate in plan.gates:
            if min(num_canary, num_requests - num_canary) >= gate.min_requests and (
                _naive_p(gate, observed[gate.name]) < plan.gate_alpha
            ):
                return Outcome(gate.name, None, num_requests, num_canary)
    return Outcome(None, None, num_requests, num_canary)


def _naive_p(gate: Gate, observed: Observed) -> float:
    stable, canary = observed.stable, observed.canary
    if isinstance(stable, Latencies) and isinstance(canary, Latencies):
        assert isinstance(gate, QuantileGate)
        shift = BUCKETS_PER_OCTAVE * math.log2(gate.max_ratio)
        beyond = 1 - canary.histogram.share_below(
            stable.histogram.quantile_position(gate.quantile) + shift
        )
        spread = gate.quantile * (1 - gate.quantile)
        nums = (1 / stable.tail.num_requests, 1 / canary.tail.num_requests)
        return _upper_p((beyond - (1 - gate.quantile)) / math.sqrt(spread * sum(nums)))
    if isinstance(stable, Mix) and isinstance(canary, Mix):
        assert isinstance(gate, MixGate)
        worst = max(
            _naive_z(stable.shares[one], canary.shares[one], sign * gate.margin, sign)
            for one in gate.categories
            for sign in (1, -1)
        )
        return min(1.0, 2 * len(gate.categories) * _upper_p(worst))
    assert isinstance(stable, SubjectSums)
    assert isinstance(canary, SubjectSums)
    if isinstance(gate, ShareGate):
        return _upper_p(_naive_z(stable, canary, gate.margin, 1))
    assert isinstance(gate, MeanGate)
    signs = {"higher": (1,), "lower": (-1,), "either": (1, -1)}[gate.worse]
    return min(
        len(signs) * _upper_p(_naive_z(stable, canary, sign * gate.margin, sign)) for sign in signs
    )


def _naive_z(stable: SubjectSums, canary: SubjectSums, d: float, sign: int) -> float:
    variance = sum(arm.square_deviations / arm.num_requests**2 for arm in (stable, canary))
    return sign * (canary.mean - stable.mean - d) / math.sqrt(variance) if variance > 0 else 0.0


def _upper_p(z: float) -> float:
    return math.erfc(z / math.sqrt(2)) / 2
