"""Evidence under many looks, the roots, and what correlated requests are worth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.rollouts.aggregates import Histogram, Latencies, SubjectSums
from loraplex_platform.rollouts.evidence import (
    ASSUMED_ICC,
    SHARPEST_AT,
    EffectiveRequests,
    critical_root,
    divergence,
    effective_requests,
    limits,
    log_e_value,
    mean_difference_root,
    mean_root,
    quantile_root,
    quantile_shift_root,
    relative_information,
    share_difference_root,
    share_root,
)

NORMAL = statistics.NormalDist()
GRID = np.linspace(-36, 36, 16_001)
DENSITY = np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi)


def worth(stable: float, canary: float) -> EffectiveRequests:
    return EffectiveRequests(stable, canary, 0.0, False)


# ---------------------------------------------------------------------------- looks


@pytest.mark.parametrize("information", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("z", [-3.0, 0.0, 2.0, 5.0])
def test_evidence_is_the_likelihood_ratio_mixed_over_half_a_normal(
    z: float, information: float
) -> None:
    # The drift's prior has variance `information` where the root's own is 1.
    drifts = np.linspace(0, 12 * math.sqrt(information), 40_001)
    prior = 2 * np.exp(-(drifts**2) / (2 * information)) / math.sqrt(2 * math.pi * information)

    mixed = np.trapezoid(prior * np.exp(drifts * z - drifts**2 / 2), drifts)

    assert log_e_value(z, information) == pytest.approx(math.log(mixed), abs=1e-4)


@pytest.mark.parametrize("information", [0.1, 1.0, 30.0])
def test_evidence_is_one_on_average_where_nothing_differs(information: float) -> None:
    found = [math.exp(log_e_value(z, information)) for z in GRID.tolist()]

    assert np.trapezoid(DENSITY * np.array(found), GRID) == pytest.approx(1, abs=1e-3)


@given(st.floats(1e-9, 0.5), st.floats(1e-3, 1e8))
def test_the_critical_root_has_just_enough_evidence(alpha: float, information: float) -> None:
    found = critical_root(alpha, information)

    assert log_e_value(found, information) == pytest.approx(-math.log(alpha), rel=1e-6, abs=1e-6)
    assert found >= NORMAL.inv_cdf(1 - alpha) - 1e-6  # looks are never free


def test_without_information_nothing_is_decided() -> None:
    assert log_e_value(100.0, 0.0) == 0
    assert critical_root(0.05, 0.0) == math.inf
    assert relative_information(100, 0) == 0
    assert relative_information(2 * SHARPEST_AT, 2 * SHARPEST_AT) == pytest.approx(1)


def test_looking_always_is_safe_with_evidence_and_not_with_a_fixed_test() -> None:
    """2,000 Brownian motions without drift, looked at 4,000 times."""
    rng = np.random.default_rng(11)
    alpha, num_paths = 0.05, 2_000
    sums = np.zeros(num_paths)
    crossed, naive = np.zeros(num_paths, bool), np.zeros(num_paths, bool)
    for num in range(1, 4_001):
        sums += rng.standard_normal(num_paths)
        z = sums / math.sqrt(num)
        crossed |= z >= critical_root(alpha, num / SHARPEST_AT)
        naive |= z >= NORMAL.inv_cdf(1 - alpha)

    assert crossed.mean() <= alpha + 3 * math.sqrt(alpha / num_paths)
    assert crossed.mean() > alpha / 5  # it is not idle either
    assert naive.mean() > 6 * alpha


@pytest.mark.parametrize("z", [-1e6, -50.0, 50.0, 1e6, math.inf, -math.inf])
def test_huge_roots_do_not_overflow(z: float) -> None:
    found = log_e_value(z, 1e9)

    assert not math.isnan(found)
    assert (found > 0) == (z > 0)


# ---------------------------------------------------------------------------- subjects


def test_requests_of_a_subject_each_are_worth_themselves() -> None:
    rng = np.random.default_rng(1)
    arms = [SubjectSums.of(enumerate(rng.normal(0, 1, num).tolist())) for num in (300, 50)]

    found = effective_requests(*arms, is_share=False)

    assert (found.stable, found.canary) == (300, 50)


def test_a_subjects_equal_answers_are_worth_one() -> None:
    rng = np.random.default_rng(2)

    def arm(num: int) -> SubjectSums:
        of_subjects = rng.normal(0, 1, num)
        return SubjectSums.of(
            (subject, of_subjects[subject]) for subject in range(num) for _ in range(10)
        )

    found = effective_requests(arm(100), arm(40), is_share=False)

    assert found.icc == pytest.approx(1, abs=0.02)
    assert found.stable == pytest.approx(100, rel=0.02)
    assert found.canary == pytest.approx(40, rel=0.02)
    assert not found.is_assumed


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_the_correlation_is_found_and_the_variance_with_it(spread: float) -> None:
    """Over many draws, the mean's true variance is what its effective requests say."""
    rng = np.random.default_rng(3)
    num_draws, num_subjects, each = 400, 60, 8
    means, said, iccs = [], [], []
    for _ in range(num_draws):
        effects = rng.normal(0, spread, num_subjects)
        x = effects[:, None] + rng.normal(0, 1, (num_subjects, each))
        arm = SubjectSums.of(
            (subject, float(value)) for subject in range(num_subjects) for value in x[subject]
        )
        found = effective_requests(arm, arm, is_share=False)
        means.append(arm.mean)
        said.append(arm.square_deviations / arm.num_requests / found.stable)
        iccs.append(found.icc)

    true_icc = spread**2 / (1 + spread**2)
    assert statistics.fmean(iccs) == pytest.approx(true_icc, abs=0.02)
    assert statistics.fmean(said) == pytest.approx(statistics.variance(means), rel=0.25)


def test_few_subjects_are_taken_to_be_correlated() -> None:
    arm = SubjectSums.of((number % 4, float(number % 3)) for number in range(1_000))

    found = effective_requests(arm, arm, is_share=False)

    assert found.is_assumed
    assert found.icc == ASSUMED_ICC
    assert found.stable == pytest.approx(1_000 / (1 + 249 * ASSUMED_ICC))
    assert effective_requests(arm, arm, is_share=False, assumed_icc=0.0).stable == 1_000


def test_errors_too_few_to_tell_are_taken_to_be_correlated() -> None:
    def arm(num_errors: int) -> SubjectSums:
        return SubjectSums.of((idx % 200, float(idx < num_errors)) for idx in range(1_000))

    assert effective_requests(arm(4), arm(5), is_share=True).is_assumed
    assert not effective_requests(arm(5), arm(5), is_share=True).is_assumed


def test_one_subject_of_the_canary_is_judged_by_what_stable_tells() -> None:
    rng = np.random.default_rng(4)
    effects = rng.normal(0, 1, 200)
    stable = SubjectSums.of(
        (subject, effects[subject] + rng.normal()) for subject in range(200) for _ in range(5)
    )
    canary = SubjectSums.of([("one", rng.normal()) for _ in range(100)])

    found = effective_requests(stable, canary, is_share=False)

    assert not found.is_assumed
    assert found.canary == pytest.approx(2, abs=0.7)  # icc is a half: 100 / (1 + 99 / 2)


# ---------------------------------------------------------------------------- roots


@pytest.mark.parametrize("d", [0.0, 0.01, -0.02])
def test_the_root_of_a_difference_of_shares_is_walds_where_arms_are_large(d: float) -> None:
    stable, canary, num = 0.30, 0.31 + d, 40_000.0
    variance = (stable * (1 - stable) + canary * (1 - canary)) / num

    found = share_difference_root(stable, num, canary, num, d)

    assert found == pytest.approx(0.01 / math.sqrt(variance), rel=0.01)


def test_the_root_of_a_difference_of_shares_is_the_best_fit() -> None:
    stable_num, canary_num, d = 950.0, 50.0, 0.01
    grid = np.linspace(1e-6, 0.2, 20_001).tolist()

    best = min(
        stable_num * divergence(0.01, share) + canary_num * divergence(0.08, share + d)
        for share in grid
    )

    found = share_difference_root(0.01, stable_num, 0.08, canary_num, d)
    assert found == pytest.approx(math.sqrt(2 * best), rel=1e-4)


def test_a_small_stable_arm_without_errors_is_no_alarm() -> None:
    """Late in a rollout stable is the small arm; Wald's ratio would be 3.6 here."""
    assert 0 < share_difference_root(0.0, 50, 0.03, 950, 0.01) < 1.5


def test_no_errors_are_no_proof_before_there_are_many() -> None:
    few = share_difference_root(0.0, 950, 0.0, 50, 0.01)
    many = share_difference_root(0.0, 19_000, 0.0, 1_000, 0.01)

    assert few == pytest.approx(-math.sqrt(2 * 50 * 0.01005), rel=0.01)
    assert many == pytest.approx(-math.sqrt(2 * 1_000 * 0.01005), rel=0.01)


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(20, 1e9),
    st.floats(20, 1e9),
    st.floats(-0.99, 0.99),
)
def test_roots_of_shares_are_finite_and_fall(
    stable: float, canary: float, stable_num: float, canary_num: float, d: float
) -> None:
    found = share_difference_root(stable, stable_num, canary, canary_num, d)
    further = share_difference_root(stable, stable_num, canary, canary_num, d + 0.005)

    assert math.isfinite(found)
    assert further <= found + 1e-4 * (1 + abs(found))


def sums_of(values: np.ndarray) -> SubjectSums:
    return SubjectSums.of(enumerate(values.tolist()))


def test_the_root_of_means_is_students_where_arms_are_small_and_normals_where_large() -> None:
    rng = np.random.default_rng(6)
    small = [sums_of(rng.normal(0, 1, 6)) for _ in range(2)]
    large = [sums_of(rng.normal(0, 1, 50_000)) for _ in range(2)]

    def t(arms: list[SubjectSums], d: float) -> float:
        variance = sum(
            arm.square_deviations / (arm.num_requests - 1) / arm.num_requests for arm in arms
        )
        return (arms[1].mean - arms[0].mean - d) / math.sqrt(variance)

    assert abs(mean_difference_root(*small, worth(6, 6), -9.0)) < 0.6 * abs(t(small, -9.0))
    found = mean_difference_root(*large, worth(50_000, 50_000), -0.02)
    assert found == pytest.approx(t(large, -0.02), rel=0.01)


def test_means_of_a_thousand_million_requests_keep_their_digits() -> None:
    num = 10**9

    def arm(mean: float) -> SubjectSums:
        return SubjectSums(
            num_subjects=num,
            num_requests=num,
            total=num * mean,
            total_squares=num * (mean**2 + 1),
            square_requests=num,
            product=num * mean,
            square_totals=num * (mean**2 + 1),
        )

    arms = arm(5.0), arm(5.001)
    found = effective_requests(*arms, is_share=False)

    assert found.stable == pytest.approx(num)
    root = mean_difference_root(*arms, found, 0.0)
    assert root == pytest.approx(0.001 / math.sqrt(2 / num), rel=1e-4)
    assert log_e_value(root, found.information) > 200


def test_values_that_never_vary_differ_for_certain_or_not_at_all() -> None:
    same, other = sums_of(np.full(60, 16.0)), sums_of(np.full(60, 17.0))

    assert mean_difference_root(same, same, worth(60, 60), 0.0) == 0
    assert mean_difference_root(same, other, worth(60, 60), 0.5) == math.inf
    assert mean_difference_root(same, other, worth(60, 60), 1.5) == -math.inf


def test_the_root_of_quantiles_is_near_normal_and_blind_to_the_distribution() -> None:
    """Of equal arms with a heavy tail it has mean 0 and variance 1, also after a shift that is asked for."""
    rng = np.random.default_rng(8)
    roots = []
    for _ in range(600):
        stable, canary = (rng.pareto(1.2, num) + 1 for num in (800, 200))
        arms = [Histogram.of((100 * values).tolist()) for values in (stable, 1.5 * canary)]
        roots.append(
            quantile_shift_root(0.95, arms[0], arms[1], worth(800, 200), 16 * math.log2(1.5))
        )

    assert statistics.fmean(roots) == pytest.approx(0, abs=0.2)
    assert statistics.variance(roots) == pytest.approx(1, abs=0.25)
    assert sum(abs(root) > 2.58 for root in roots) <= 0.01 * 600 + 3 * math.sqrt(6)


def test_quantiles_of_equal_arms_do_not_differ() -> None:
    arm = Histogram.of(np.random.default_rng(9).lognormal(5, 1, 500).tolist())

    assert quantile_shift_root(0.95, arm, arm, worth(500, 500), 0.0) == pytest.approx(0, abs=1e-5)
    assert quantile_shift_root(0.95, arm, arm, worth(500, 500), 4.0) < 0
    assert quantile_shift_root(0.95, arm, arm, worth(500, 500), -4.0) > 0


# ---------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("root", "truth"),
    [
        (lambda d: share_root(0.04, 500, d), 0.04),
        (
            lambda d: mean_root(sums_of(np.random.default_rng(1).normal(0.3, 1, 500)), 500, d),
            0.3,
        ),
        (
            lambda d: quantile_root(
                0.95, Histogram.of(np.random.default_rng(2).lognormal(0, 1, 500).tolist()), 500, d
            ),
            16 * math.log2(math.exp(1.645)),
        ),
    ],
    ids=["share", "mean", "quantile"],
)
def test_limits_are_where_the_evidence_is_just_enough(
    root: Callable[[float], float], truth: float
) -> None:
    information = relative_information(500)
    critical = critical_root(0.025, information)

    low, high = limits(
        root, 0.0 if truth == 0.04 else -100, 1.0 if truth == 0.04 else 100, critical, critical
    )

    assert low < truth < high
    assert log_e_value(root(low), information) == pytest.approx(-math.log(0.025), abs=0.15)
    assert log_e_value(-root(high), information) == pytest.approx(-math.log(0.025), abs=0.15)


def test_slow_requests_of_a_few_subjects_are_worth_few() -> None:
    rng = np.random.default_rng(10)
    spread = Latencies.of(
        ((number % 100, float(value)) for number, value in enumerate(rng.lognormal(5, 1, 2_000))),
        0.95,
    )
    gathered = Latencies.of(
        (
            (number % 100, float(value) * (100 if number % 100 < 5 else 1))
            for number, value in enumerate(rng.lognormal(5, 1, 2_000))
        ),
        0.95,
    )

    one, other = (
        effective_requests(arm.tail, arm.tail, is_share=True).stable for arm in (spread, gathered)
    )

    assert one > 1_000
    assert other < 200
