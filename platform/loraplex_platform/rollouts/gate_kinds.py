"""The kinds of gates: what each compares, of which sums, against which tolerated difference, and in which words.

A gate makes one or more sides of two arms: directions in which the canary may be worse, each a root z(d) of "worse
by more than d" and the d that is tolerated. `verdicts.py` decides on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from loraplex_platform.rollouts.aggregates import (
    BUCKETS_PER_OCTAVE,
    Latencies,
    Mix,
    SubjectSums,
    value_at,
)
from loraplex_platform.rollouts.evidence import (
    ASSUMED_ICC,
    Root,
    critical_root,
    effective_requests,
    limits,
    mean_difference_root,
    mean_root,
    quantile_root,
    quantile_shift_root,
    relative_information,
    share_difference_root,
    share_root,
)

MIN_REQUESTS: Final = 50
_SHOWN_ALPHA: Final = (
    0.025  # of either limit of one arm's own number, which is shown and decides nothing
)
_MAX_SHIFT: Final = 40.0 * BUCKETS_PER_OCTAVE
_MAX_MEAN: Final = 1e6

Span = tuple[float, float]
"""The least and the greatest difference that is looked at."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its limits, which hold at all looks together."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm's own number.

    Attributes:
        root: z of "it is more than d".
        worth: effective requests.
    """

    value: float
    root: Root
    span: Span
    worth: float

    def estimate(self) -> Estimate:
        """With limits that hold together at 95 %."""
        return estimate(
            self.value, self.root, self.span, relative_information(self.worth), _SHOWN_ALPHA
        )


@dataclass(frozen=True, slots=True)
class Side:
    """One direction in which a canary may be worse.

    Attributes:
        label: what it is of, where a gate has several numbers.
        excess: by how much it is worse, in the gate's own unit; below 0: it is better.
        root: z of "worse by more than d".
        tolerated: the d that decides.
        information: relative, of the comparison.
    """

    label: str
    excess: float
    root: Root
    tolerated: float
    span: Span
    information: float
    stable: Arm
    canary: Arm


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both arms of a gate, of which each may have met no requests yet: then there are no sides."""

    num_stable: int
    num_canary: int
    num_stable_subjects: int
    num_canary_subjects: int
    sides: tuple[Side, ...]


def estimate(
    value: float,
    root: Root,
    span: Span,
    information: float,
    alpha_low: float,
    alpha_high: float | None = None,
) -> Estimate:
    """The one-sided confidence limits of a number at these levels; the second is the first unless given."""
    below = critical_root(alpha_low, information)
    above = below if alpha_high is None else critical_root(alpha_high, information)
    return Estimate(value, *limits(root, *span, below, above))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGate:
    """A share of requests that must not grow: errors, aborts, failed probes.

    Takes `SubjectSums` whose values are 1 for such a request and 0 for any other.

    Attributes:
        name: of what is counted, in words that follow "canary": "errors".
        margin: tolerated growth of the share: 0.01 is one point.
        min_requests: of each arm; fewer decide nothing.
        assumed_icc: see `evidence.py`.
    """

    name: str
    margin: float
    min_requests: int = MIN_REQUESTS
    assumed_icc: float = ASSUMED_ICC

    def __post_init__(self) -> None:
        """Check the thresholds."""
        _check_common(self.name, self.min_requests, self.assumed_icc)
        _check_share_margin(self.name, self.margin)

    def compare(self, stable: SubjectSums, canary: SubjectSums) -> Comparison:
        """More than before is worse."""
        return _compared(
            stable,
            canary,
            lambda: (_share_side("", stable, canary, self.margin, self.assumed_icc),),
        )

    def words(self, stable: Estimate, canary: Estimate, label: str) -> str:
        """The numbers."""
        del label
        return (
            f"canary {self.name} {_percent(canary)} against {100 * stable.value:.3g} %, tolerated"
            f" +{100 * self.margin:.3g} points"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixGate:
    """The shares of kinds that must not move either way: finish reasons.

    Takes `Mix`. Simultaneous limits for a multinomial, a share at a time with the level
    shared out; not one likelihood of the whole mix (Lindon & Malek 2022), as the answer must name what moved, and a
    little of it is tolerated.

    Attributes:
        categories: all of them, each request in one: the last may be "other".
        margin: tolerated move of any share.
    """

    name: str
    categories: tuple[str, ...]
    margin: float
    min_requests: int = MIN_REQUESTS
    assumed_icc: float = ASSUMED_ICC

    def __post_init__(self) -> None:
        """Check the thresholds."""
        _check_common(self.name, self.min_requests, self.assumed_icc)
        _check_share_margin(self.name, self.margin)
        is_mix = len(self.categories) >= 2 and len(set(self.categories)) == len(self.categories)
        _check(is_mix, self.name, "categories", self.categories, "two or more, each once")

    def compare(self, stable: Mix, canary: Mix) -> Comparison:
        """Every category may grow or shrink. Raises ValueError where an arm lacks one or has another."""
        for arm in (stable, canary):
            if arm.shares.keys() != set(self.categories):
                raise ValueError(
                    f"{self.name}: sums of {', '.join(sorted(arm.shares))}; the gate's categories are"
                    f" {', '.join(self.categories)}"
                )

        def sides() -> tuple[Side, ...]:
            found: list[Side] = []
            for one in self.categories:
                grown = self._side(one, stable, canary)
                shrunk = self._side(one, canary, stable)
                found += [grown, replace(shrunk, stable=shrunk.canary, canary=shrunk.stable)]
            return tuple(found)

        first = self.categories[0]
        return _compared(stable.shares[first], canary.shares[first], sides)

    def words(self, stable: Estimate, canary: Estimate, label: str) -> str:
        """The numbers of the category that moved most."""
        return (
            f'canary {self.name} "{label}" {_percent(canary)} against {100 * stable.value:.3g} %,'
            f" tolerated ±{100 * self.margin:.3g} points"
        )

    def _side(self, category: str, stable: Mix, canary: Mix) -> Side:
        return _share_side(
            category,
            stable.shares[category],
            canary.shares[category],
            self.margin,
            self.assumed_icc,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanGate:
    """A mean that must not move: log-probability per token, logarithm of the output's tokens.

    Takes `SubjectSums`. The values must have a variance and no extreme tail: clip log-probabilities to a range, take
    natural logarithms of lengths.

    Attributes:
        margin: tolerated move, in the unit of the values.
        worse: which way is worse.
        unit: of the values, in words.
        is_log: the values are natural logarithms, and words say e to their power.
    """

    name: str
    margin: float
    worse: Literal["lower", "higher", "either"]
    unit: str = ""
    is_log: bool = False
    min_requests: int = MIN_REQUESTS
    assumed_icc: float = ASSUMED_ICC

    def __post_init__(self) -> None:
        """Check the thresholds."""
        _check_common(self.name, self.min_requests, self.assumed_icc)
        is_inside = 0 <= self.margin < _MAX_MEAN
        _check(is_inside, self.name, "margin", self.margin, f"at least 0 and below {_MAX_MEAN:g}")
        is_known = self.worse in ("lower", "higher", "either")
        _check(is_known, self.name, "worse", self.worse, "lower, higher or either")

    def compare(self, stable: SubjectSums, canary: SubjectSums) -> Comparison:
        """As `worse` says."""

        def sides() -> tuple[Side, ...]:
            worth = effective_requests(stable, canary, is_share=False, assumed_icc=self.assumed_icc)

            def higher(d: float) -> float:
                return mean_difference_root(stable, canary, worth, d)

            def lower(d: float) -> float:
                return -mean_difference_root(stable, canary, worth, -d)

            move = canary.mean - stable.mean
            signed = {"higher": [(move, higher)], "lower": [(-move, lower)]}
            signed["either"] = signed["higher"] + signed["lower"]
            return tuple(
                Side(
                    "",
                    excess,
                    root,
                    self.margin,
                    (-_MAX_MEAN, _MAX_MEAN),
                    worth.information,
                    _mean_arm(stable, worth.stable),
                    _mean_arm(canary, worth.canary),
                )
                for excess, root in signed[self.worse]
            )

        return _compared(stable, canary, sides)

    def words(self, stable: Estimate, canary: Estimate, label: str) -> str:
        """The numbers."""
        del label
        unit = f" {self.unit}" if self.unit else ""
        if self.is_log:
            shown = Estimate(*(_exp(x) for x in (canary.value, canary.low, canary.high)))
            down, up = f"x{math.exp(-self.margin):.3g}", f"x{math.exp(self.margin):.3g}"
            tolerated = {"lower": down, "higher": up, "either": f"{down} to {up}"}[self.worse]
            against = _exp(stable.value)
        else:
            shown, against = canary, stable.value
            sign = {"lower": "-", "higher": "+", "either": "+-"}[self.worse]
            tolerated = f"{sign}{self.margin:.3g}{unit}"
        return (
            f"canary {self.name} {_range(shown)}{unit} against {_number(against)}{unit}, tolerated"
            f" {tolerated}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileGate:
    """A latency's quantile that must not grow: time to first token, between tokens.

    Takes `Latencies` of the same quantile. Its own unit is buckets of the histogram.

    Attributes:
        max_ratio: tolerated canary / stable. Buckets are 4.4 % wide: a ratio much nearer to 1 is not resolved.
        unit: of the values, in words.
    """

    name: str
    max_ratio: float
    quantile: float = 0.95
    unit: str = "ms"
    min_requests: int = 2 * MIN_REQUESTS
    assumed_icc: float = ASSUMED_ICC

    def __post_init__(self) -> None:
        """Check the thresholds."""
        _check_common(self.name, self.min_requests, self.assumed_icc)
        _check(0 < self.quantile < 1, self.name, "quantile", self.quantile, "between 0 and 1")
        _check(1 <= self.max_ratio <= 100, self.name, "max_ratio", self.max_ratio, "from 1 to 100")
        least = math.ceil(2 / min(self.quantile, 1 - self.quantile) - 1e-9)
        _check(
            self.min_requests >= least,
            self.name,
            "min_requests",
            self.min_requests,
            f"at least {least}, for fewer have next to nothing beyond this quantile",
        )

    def compare(self, stable: Latencies, canary: Latencies) -> Comparison:
        """Slower is worse."""

        def sides() -> tuple[Side, ...]:
            worth = effective_requests(
                stable.tail, canary.tail, is_share=True, assumed_icc=self.assumed_icc
            )

            def root(d: float) -> float:
                return quantile_shift_root(
                    self.quantile, stable.histogram, canary.histogram, worth, d
                )

            arms = [self._arm(stable, worth.stable), self._arm(canary, worth.canary)]
            return (
                Side(
                    "",
                    arms[1].value - arms[0].value,
                    root,
                    BUCKETS_PER_OCTAVE * math.log2(self.max_ratio),
                    (-_MAX_SHIFT, _MAX_SHIFT),
                    worth.information,
                    *arms,
                ),
            )

        return _compared(stable.tail, canary.tail, sides)

    def words(self, stable: Estimate, canary: Estimate, label: str) -> str:
        """The numbers."""
        del label
        shown = Estimate(*(value_at(x) for x in (canary.value, canary.low, canary.high)))
        return (
            f"canary {self.name} p{100 * self.quantile:g} {_range(shown)} {self.unit} against"
            f" {_number(value_at(stable.value))} {self.unit}, tolerated x{self.max_ratio:.3g}"
        )

    def _arm(self, arm: Latencies, worth: float) -> Arm:
        return Arm(
            arm.histogram.quantile_position(self.quantile),
            lambda d: quantile_root(self.quantile, arm.histogram, worth, d),
            (-_MAX_SHIFT, _MAX_SHIFT),
            worth,
        )


Gate = ShareGate | MixGate | MeanGate | QuantileGate
Observation = SubjectSums | Mix | Latencies
"""What a gate takes of one arm: see each gate."""


def _compared(
    stable: SubjectSums, canary: SubjectSums, sides: Callable[[], tuple[Side, ...]]
) -> Comparison:
    return Comparison(
        stable.num_requests,
        canary.num_requests,
        stable.num_subjects,
        canary.num_subjects,
        sides() if stable.num_requests and canary.num_requests else (),
    )


def _share_side(
    label: str, stable: SubjectSums, canary: SubjectSums, margin: float, assumed_icc: float
) -> Side:
    worth = effective_requests(stable, canary, is_share=True, assumed_icc=assumed_icc)

    def root(d: float) -> float:
        return share_difference_root(stable.mean, worth.stable, canary.mean, worth.canary, d)

    return Side(
        label,
        canary.mean - stable.mean,
        root,
        margin,
        (-1.0, 1.0),
        worth.information,
        _share_arm(stable, worth.stable),
        _share_arm(canary, worth.canary),
    )


def _share_arm(arm: SubjectSums, worth: float) -> Arm:
    return Arm(arm.mean, lambda d: share_root(arm.mean, worth, d), (0.0, 1.0), worth)


def _mean_arm(arm: SubjectSums, worth: float) -> Arm:
    return Arm(arm.mean, lambda d: mean_root(arm, worth, d), (-_MAX_MEAN, _MAX_MEAN), worth)


# ---------------------------------------------------------------------------- checks and words


def _check(is_valid: bool, gate: str, field: str, value: object, allowed: str) -> None:
    if not is_valid:
        raise ValueError(f"gate {gate!r}: {field} is {value!r}; it has to be {allowed}")


def _check_common(name: str, min_requests: int, assumed_icc: float) -> None:
    _check(bool(name), name, "name", name, "a word or more")
    _check(
        min_requests >= 20,
        name,
        "min_requests",
        min_requests,
        "at least 20, for the statistics of fewer are not valid",
    )
    _check(0 <= assumed_icc <= 1, name, "assumed_icc", assumed_icc, "from 0 to 1")


def _check_share_margin(name: str, margin: float) -> None:
    _check(0 <= margin < 1, name, "margin", margin, "at least 0 and below 1 (0.01 is one point)")


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


# A bound that was searched for up to the last bucket and not found: of milliseconds, eleven days.
_NO_BOUND = 1e9


def _number(value: float) -> str:
    """Three digits, or all of those before the point; nought for what a search has left a hair's breadth from it."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{round(value, 6):.3g}"


def _range(found: Estimate) -> str:
    if found.high >= _NO_BOUND:
        return f"{_number(found.value)} ({_number(found.low)} or more)"
    return f"{_number(found.value)} ({_number(found.low)} to {_number(found.high)})"


def _percent(found: Estimate) -> str:
    # A limit that was searched for ends a hair's breadth beside a bound.
    value, low, high = (round(100 * one, 6) for one in (found.value, found.low, found.high))
    return f"{value:.3g} % ({low:.3g} to {high:.3g})"
