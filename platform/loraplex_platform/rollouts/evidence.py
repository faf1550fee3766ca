"""Evidence that one arm is worse than another, valid however often it is looked at.

**Roots.** Each comparison is reduced to a signed root z(d): how many standard errors the arms' difference lies above
d. For shares and quantiles it is the signed root of the deviance (twice the log likelihood ratio of the free fit and
of the best fit that has the difference d), for means that of a t statistic; both are near normal where Wald's ratio
is not: rare errors, small arms.

**Looks.** As requests come, a difference of two means has independent increments in its information 1/variance, so
z times the root of the information is a Brownian motion with drift (Jennison & Turnbull 2000, ch. 11; Waudby-Smith,
Arbour, Sinha, Kennedy & Ramdas 2024, "Time-uniform central limit theory and asymptotic confidence sequences"). Its
likelihood ratio, mixed over a half-normal prior of the drift (Robbins 1970; Johari et al. 2017; Howard, Ramdas,
McAuliffe & Sekhon 2021, sec. 3), is a non-negative supermartingale while the true difference is at most d. By Ville's
inequality it ever reaches 1/alpha with a probability of at most alpha. The prior fixes only when it is sharpest.
This holds asymptotically: a normal limit stands behind it, hence the least numbers of requests in `verdicts.py`.

**Subjects.** Requests of one subject are correlated. An arm of n requests counts as n / D, with Kish's design effect
D = 1 + (sum n_c^2 / n - 1) icc, which makes the variance the cluster-robust one (`effective_requests`). Over time
such a process is positively correlated with its own past at least as much as a Brownian motion of the same variance
while subjects keep their shares of traffic, so by Slepian's inequality it crosses a boundary no more often.
The intra-class correlation icc is measured over both arms together, because few subjects in the canary say little of
it; where even both have too few, it is taken to be no less than an assumed one, so that few subjects decide only
what is blatant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from loraplex_platform.rollouts.aggregates import Histogram, SubjectSums

ASSUMED_ICC: Final = 0.1
MIN_EQUAL_SUBJECTS: Final = 30.0  # fewer, in both arms together, do not tell the correlation
MIN_EVENTS: Final = 10.0  # as do fewer errors, or fewer requests without one
SHARPEST_AT: Final = 20.0  # harmonic effective requests
_BISECTIONS: Final = 60
_FIT_BISECTIONS: Final = 40  # a share to 1e-12; near its top a likelihood is flat
_QUANTILE_STEPS: Final = 32
_TINY: Final = 1e-300

Root = Callable[[float], float]
"""z as a function of the difference d; it falls as d rises."""


# ---------------------------------------------------------------------------- looks


def log_e_value(z: float, information: float) -> float:
    """Natural logarithm of the evidence for "above d", of a root z at a relative information.

    At 1/alpha or more, in any look, "at most d" is rejected at level alpha. Evidence for "below d" is that of -z.

    Args:
        information: of `relative_information`; 0 is no evidence.
    """
    if information <= 0:
        return 0.0
    if math.isinf(z):
        return z
    weight = information / (1 + information)
    log_half_normal = math.log(2) + _log_normal_cdf(z * math.sqrt(weight))
    return z * z / 2 * weight - math.log1p(information) / 2 + log_half_normal


def critical_root(alpha: float, information: float) -> float:
    """The root whose evidence is 1/alpha; infinite without information."""
    if information <= 0:
        return math.inf
    wanted = -math.log(alpha)
    weight = information / (1 + information)
    # There the half-normal's part is positive, so the evidence is more than what is wanted.
    high = math.sqrt(2 / weight * (wanted + math.log1p(information) / 2))
    return _bisected(lambda z: log_e_value(z, information) < wanted, 0.0, high)


def relative_information(stable: float, canary: float | None = None) -> float:
    """Of effective requests: 1 where the evidence is sharpest. Without a canary: of one arm alone."""
    if canary is None:
        return stable / SHARPEST_AT
    return stable * canary / (stable + canary) / SHARPEST_AT if stable and canary else 0.0


def _log_normal_cdf(x: float) -> float:
    if x > -30:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi))


def _bisected(
    is_left: Callable[[float], bool], low: float, high: float, steps: int = _BISECTIONS
) -> float:
    """Where `is_left` turns from true to false."""
    for _ in range(steps):
        middle = (low + high) / 2
        if is_left(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def limits(root: Root, low: float, high: float, below: float, above: float) -> tuple[float, float]:
    """The differences between which the root is no more than `below` and no less than `-above`.

    With critical roots at alpha these are the two one-sided confidence limits at alpha.

    Args:
        low, high: differences outside which nothing lies.
    """
    return (
        _bisected(lambda difference: root(difference) > below, low, high),
        _bisected(lambda difference: root(difference) > -above, low, high),
    )


# ---------------------------------------------------------------------------- subjects


@dataclass(frozen=True, slots=True)
class EffectiveRequests:
    """What two arms' correlated requests are worth, in independent ones.

    Attributes:
        icc: the intra-class correlation that was used.
        is_assumed: too little was known to measure it, so it is at least the assumed one.
    """

    stable: float
    canary: float
    icc: float
    is_assumed: bool

    @property
    def information(self) -> float:
        """Of the comparison."""
        return relative_information(self.stable, self.canary)


def effective_requests(
    stable: SubjectSums,
    canary: SubjectSums,
    *,
    is_share: bool,
    assumed_icc: float = ASSUMED_ICC,
) -> EffectiveRequests:
    """Kish's effective number of requests of each arm.

    Args:
        is_share: the values are 0 and 1; then the correlation is not believed before some are of either.
    """
    arms = (stable, canary)
    excess = possible = 0.0
    for arm in arms:
        num_subjects = arm.num_equal_subjects
        if num_subjects < 2:
            continue  # with the mean taken from the subject itself, nothing is left of it to deviate
        variance = arm.square_deviations / arm.num_requests
        between = arm.square_subject_deviations * num_subjects / (num_subjects - 1)
        excess += between - arm.num_requests * variance
        possible += variance * (arm.square_requests - arm.num_requests)
    icc = min(1.0, max(0.0, excess / possible)) if possible > 0 else 0.0
    is_assumed = sum(arm.num_equal_subjects for arm in arms) < MIN_EQUAL_SUBJECTS
    if is_share:
        events = math.fsum(arm.total for arm in arms)
        others = sum(arm.num_requests for arm in arms) - events
        is_assumed = is_assumed or min(events, others) < MIN_EVENTS
    if is_assumed:
        icc = max(icc, assumed_icc)
    worth = [arm.num_requests / (1 + (arm.requests_per_request - 1) * icc) for arm in arms]
    return EffectiveRequests(worth[0], worth[1], icc, is_assumed)


# ---------------------------------------------------------------------------- roots


def share_difference_root(
    stable_share: float, stable_num: float, canary_share: float, canary_num: float, d: float
) -> float:
    """Signed root of the deviance of "canary's share - stable's share = d", for -1 < d < 1.

    Args:
        stable_num, canary_num: effective requests; the quasi-binomial likelihood has them as its size.
    """
    stable_hits, canary_hits = stable_share * stable_num, canary_share * canary_num

    def is_left(share: float) -> bool:
        """Whether the likelihood of (share, share + d) rises here: it is concave."""
        slope = stable_hits / max(share, _TINY) + canary_hits / max(share + d, _TINY)
        slope -= (stable_num - stable_hits) / max(1 - share, _TINY)
        slope -= (canary_num - canary_hits) / max(1 - share - d, _TINY)
        return slope > 0

    fitted = _bisected(is_left, max(0.0, -d), min(1.0, 1 - d), _FIT_BISECTIONS)
    deviance = stable_num * divergence(stable_share, fitted)
    deviance += canary_num * divergence(canary_share, fitted + d)
    return math.copysign(math.sqrt(2 * deviance), canary_share - stable_share - d)


def share_root(share: float, num: float, d: float) -> float:
    """Signed root of the deviance of "this arm's share is d"."""
    return math.copysign(math.sqrt(2 * num * divergence(share, d)), share - d)


def mean_difference_root(
    stable: SubjectSums, canary: SubjectSums, worth: EffectiveRequests, d: float
) -> float:
    """Signed root of the likelihood ratio of a t statistic for "canary's mean - stable's mean = d".

    An arm that has not met its own tail yet looks more certain than it is, so neither arm's variance is taken to be
    less than that of both around their own means.
    """
    pooled = (stable.square_deviations + canary.square_deviations) / max(
        1, stable.num_requests + canary.num_requests - 2
    )
    parts = [
        max(pooled, arm.square_deviations / max(1, arm.num_requests - 1)) / num
        for arm, num in ((stable, worth.stable), (canary, worth.canary))
    ]
    degrees = sum(parts) ** 2 / max(
        parts[0] ** 2 / max(1.0, worth.stable - 1) + parts[1] ** 2 / max(1.0, worth.canary - 1),
        _TINY,
    )
    return _t_root(canary.mean - stable.mean - d, sum(parts), degrees)


def mean_root(arm: SubjectSums, num: float, d: float) -> float:
    """The same for "this arm's mean is d"; `num`: its effective requests."""
    variance = arm.square_deviations / max(1, arm.num_requests - 1) / num
    return _t_root(arm.mean - d, variance, max(1.0, num - 1))


def _t_root(difference: float, variance: float, degrees: float) -> float:
    if difference == 0:
        return 0.0
    if variance <= 0:
        return math.copysign(math.inf, difference)
    t_square = difference * difference / variance
    # The likelihood ratio with the variance free: normal in the limit, and shorter-tailed than t itself.
    return math.copysign(math.sqrt((degrees + 1) * math.log1p(t_square / degrees)), difference)


def quantile_shift_root(
    quantile: float, stable: Histogram, canary: Histogram, worth: EffectiveRequests, d: float
) -> float:
    """Signed root of the deviance of "canary's quantile lies d buckets above stable's".

    Below its quantile lies a binomial number of an arm's requests, whatever their distribution (Howard & Ramdas
    2022, "Sequential estimation of quantiles"); the best place for both quantiles lies between the two estimates.
    """
    stable_at = stable.quantile_position(quantile)
    canary_at = canary.quantile_position(quantile) - d
    deviance = min(
        worth.stable * divergence(stable.share_below(at), quantile)
        + worth.canary * divergence(canary.share_below(at + d), quantile)
        for at in (
            stable_at + (canary_at - stable_at) * step / _QUANTILE_STEPS
            for step in range(_QUANTILE_STEPS + 1)
        )
    )
    return math.copysign(math.sqrt(2 * deviance), canary_at - stable_at)


def quantile_root(quantile: float, arm: Histogram, num: float, d: float) -> float:
    """The same for "this arm's quantile lies at d"; `num`: its effective requests."""
    deviance = num * divergence(arm.share_below(d), quantile)
    return math.copysign(math.sqrt(2 * deviance), arm.quantile_position(quantile) - d)


def divergence(share: float, expected: float) -> float:
    """Kullback and Leibler's, of two coins, in nats."""
    found = 0.0
    if share > 0:
        found += share * math.log(share / max(expected, _TINY))
    if share < 1:
        found += (1 - share) * math.log((1 - share) / max(1 - expected, _TINY))
    return max(0.0, found)
