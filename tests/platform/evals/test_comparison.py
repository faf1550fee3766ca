from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_platform.evals.comparison import (
    CaseOutcome,
    changes_of,
    compare,
    mcnemar_exact,
    paired_interval,
    student_quantile,
)


def outcome(
    case_id: str,
    status: str = "pass",
    *,
    output: str = "x",
    logprob: float | None = None,
    bits: str | None = None,
    build: str | None = None,
) -> CaseOutcome:
    return CaseOutcome(case_id, status, status, output, logprob, bits, build)


@pytest.mark.parametrize(
    ("broken", "mended", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (1, 9, 0.021484375), (5, 5, 1.0)],
)
def test_mcnemar_is_the_binomial_tail(broken: int, mended: int, p: float) -> None:
    assert mcnemar_exact(broken, mended) == pytest.approx(p, abs=1e-15)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_mcnemar_is_a_probability_and_has_no_side(broken: int, mended: int) -> None:
    p = mcnemar_exact(broken, mended)

    assert 0.0 <= p <= 1.0
    assert p == mcnemar_exact(mended, broken)


@pytest.mark.parametrize(
    ("degrees", "t", "tolerance"),
    [
        (1, 12.7062, 1e-4),
        (2, 4.3027, 1e-4),
        (3, 3.1824, 0.005),
        (5, 2.5706, 0.001),
        (60, 2.0003, 1e-4),
    ],
)
def test_students_quantile_is_the_tables(degrees: int, t: float, tolerance: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(t, abs=tolerance)


def test_the_interval_covers_as_often_as_it_says() -> None:
    numbers = random.Random(5)
    covered = 0
    for _ in range(2_000):
        found = paired_interval([numbers.gauss(0.3, 2.0) for _ in range(8)])
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.3 <= found.high

    # 95 %, give or take four standard errors of 2,000 trials.
    assert covered / 2_000 == pytest.approx(0.95, abs=0.0195)


def test_one_pair_has_no_interval() -> None:
    found = paired_interval([0.5])

    assert (found.mean, found.low, found.high, found.count) == (0.5, None, None, 1)
    with pytest.raises(ValueError, match="no pairs"):
        paired_interval([])


def test_flips_are_named_and_an_error_is_no_pass() -> None:
    first = {
        "a": outcome("a", logprob=-1.0),
        "b": outcome("b", "fail"),
        "c": outcome("c", logprob=-2.0),
        "gone": outcome("gone"),
    }
    second = {
        "a": outcome("a", "error", output="y", logprob=-1.5),
        "b": outcome("b"),
        "c": outcome("c", logprob=-1.5),
        "new": outcome("new"),
    }

    found = compare(first, second)

    assert (found.broken, found.mended) == (("a",), ("b",))
    assert (found.only_first, found.only_second) == (("gone",), ("new",))
    assert (found.both, found.same_output, found.p_value) == (3, 2, 1.0)
    assert found.logprob_difference is not None
    assert found.logprob_difference.mean == statistics.fmean([-0.5, 0.5])


def test_the_same_build_must_give_the_same_bits() -> None:
    before = {c: outcome(c, bits="1", build="b") for c in "xyz"}
    after = {
        "x": outcome("x", bits="2", build="b"),  # other bits on the same build
        "y": outcome("y", bits="2", build="other"),  # on another one they may differ
        "z": outcome("z", "fail", bits="2", build="other"),  # but not the verdict
    }

    found = {change.kind: change.case_ids for change in changes_of(before, after)}

    assert found == {"bits": ("x",), "verdict": ("z",)}


def test_what_could_not_be_compared_is_no_change() -> None:
    before = {"a": outcome("a", bits="1", build=None), "b": outcome("b", "fail")}
    after = {
        "a": outcome("a", "error", bits="2", build=None),
        "b": outcome("b"),
        "new": outcome("new", "fail"),
    }

    assert changes_of(before, after) == ()
