"""The sums that gates are told: what they mean, that SQL can make them, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.rollouts.aggregates import (
    Histogram,
    Latencies,
    Mix,
    SubjectSums,
    bucket_of,
    value_at,
)

values = st.lists(
    st.tuples(st.integers(0, 5), st.floats(-100, 100, allow_nan=False)), min_size=1, max_size=60
)


@given(values)
def test_sums_know_means_and_deviations(pairs: list[tuple[int, float]]) -> None:
    subjects = np.array([subject for subject, _ in pairs])
    x = np.array([value for _, value in pairs])

    sums = SubjectSums.of(pairs)

    deviations = x - x.mean()
    of_subjects = [deviations[subjects == one].sum() for one in set(subjects.tolist())]
    assert sums.mean == pytest.approx(x.mean(), abs=1e-9)
    assert sums.square_deviations == pytest.approx((deviations**2).sum(), abs=1e-6)
    assert sums.square_subject_deviations == pytest.approx(
        sum(one**2 for one in of_subjects), abs=1e-5
    )
    assert 1 <= sums.num_equal_subjects <= sums.num_subjects + 1e-9


def test_one_heavy_subject_among_many_counts_as_about_one() -> None:
    sums = SubjectSums.of([("heavy", 0.0)] * 1_000 + [(one, 0.0) for one in range(20)])

    assert sums.num_subjects == 21
    assert sums.num_equal_subjects == pytest.approx(1.04, abs=0.01)


def test_no_requests_have_sums() -> None:
    sums = SubjectSums.of(())

    assert (sums.mean, sums.square_deviations, sums.num_equal_subjects) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"total": math.nan}, "clip"),
        ({"square_totals": math.inf}, "clip"),
        ({"num_subjects": 5}, "subjects <= requests"),
        ({"square_requests": 2}, "subjects <= requests"),
        ({"square_requests": 17}, "one subject"),
        ({"num_requests": -1, "num_subjects": -1}, "subjects <= requests"),
    ],
)
def test_sums_that_no_requests_have_are_refused(changes: dict[str, float], named: str) -> None:
    sums = SubjectSums.of([("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0)])

    with pytest.raises(ValueError, match=named):
        dataclasses.replace(sums, **changes)  # type: ignore[arg-type]


def test_postgres_makes_the_same_sums_and_buckets(postgres_url: str) -> None:
    rng = np.random.default_rng(5)
    keys = rng.integers(-(2**63), 2**63 - 1, 40)
    pairs = [
        (int(keys[idx]), float(value))
        for idx, value in zip(
            rng.integers(0, 40, 2_000), rng.lognormal(3.0, 1.5, 2_000), strict=True
        )
    ]
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        connection.execute("create temporary table r (subject_key bigint, x double precision)")
        with connection.cursor() as cursor:
            cursor.executemany("insert into r values (%s, %s)", pairs)
        row = connection.execute(
            "select count(*), sum(n)::bigint, sum(s), sum(q), sum(n * n)::bigint, sum(n * s), sum(s * s) from ("
            "select count(*) n, sum(x) s, sum(x * x) q from r group by subject_key) t"
        ).fetchone()
        buckets = connection.execute(
            "select floor(16 * ln(greatest(x, 0.0009765625)) / ln(2.0::float))::int, count(*) from r group by 1"
        ).fetchall()

    assert row is not None
    names = (
        *("num_subjects", "num_requests", "total", "total_squares"),
        *("square_requests", "product", "square_totals"),
    )
    found = dataclasses.asdict(SubjectSums(**dict(zip(names, row, strict=True))))
    assert found == pytest.approx(dataclasses.asdict(SubjectSums.of(pairs)))
    assert dict(buckets) == Histogram.of(value for _, value in pairs).counts


# ---------------------------------------------------------------------------- histograms


def test_a_histograms_quantiles_are_within_a_bucket_of_the_samples() -> None:
    samples = np.random.default_rng(3).lognormal(5.0, 1.0, 20_000)

    found = Histogram.of(samples.tolist())

    for quantile in (0.05, 0.5, 0.95, 0.99):
        exact = float(np.quantile(samples, quantile))
        mine = value_at(found.quantile_position(quantile))
        assert mine == pytest.approx(exact, rel=2 ** (1 / 16) - 1)
        assert found.share_below(found.quantile_position(quantile)) == pytest.approx(quantile)


def test_a_ratio_of_values_is_a_difference_of_positions() -> None:
    samples = np.random.default_rng(4).lognormal(5.0, 1.0, 5_000)
    one, other = (Histogram.of((samples * factor).tolist()) for factor in (1.0, 1.5))

    shift = other.quantile_position(0.95) - one.quantile_position(0.95)

    assert 2 ** (shift / 16) == pytest.approx(1.5, rel=0.03)


def test_shares_below_any_position_rise_from_nothing_to_all() -> None:
    found = Histogram({3: 1, 5: 2, -4: 1, 9: 0})

    shares = [found.share_below(position / 4) for position in range(-40, 60)]

    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    assert found.share_below(4.5) == 0.5  # between filled buckets
    assert found.share_below(5.5) == 0.75


def test_no_requests_have_no_quantile() -> None:
    assert Histogram({}).share_below(3) == 0
    with pytest.raises(ValueError, match="no requests"):
        Histogram({}).quantile_position(0.5)
    with pytest.raises(ValueError, match="negative"):
        Histogram({1: -1})


def test_values_that_have_no_logarithm_go_to_the_lowest_bucket() -> None:
    assert bucket_of(0.0) == bucket_of(-1.0) == bucket_of(2.0**-10) == -160
    assert [bucket_of(value) for value in (1.0, 2.0, 1.99)] == [0, 16, 15]


# ---------------------------------------------------------------------------- latencies and mixes


def test_the_tail_begins_at_the_bucket_of_the_quantile() -> None:
    pairs = [(number % 7, float(number)) for number in range(1, 1_001)]

    found = Latencies.of(pairs, 0.95)

    assert found.tail.num_requests == found.histogram.num_requests == 1_000
    assert 50 <= found.tail.total <= 100  # five percent, and what shares the bucket
    with pytest.raises(ValueError, match="one snapshot"):
        Latencies(found.histogram, SubjectSums.of(pairs[1:]))


def test_each_request_is_in_one_category() -> None:
    kinds = [("a", "stop"), ("b", "length"), ("b", "stop")]

    found = Mix.of(kinds, ("stop", "length", "other"))

    assert [found.shares[one].total for one in ("stop", "length", "other")] == [2, 1, 0]
    with pytest.raises(ValueError, match="exactly one category"):
        Mix.of(kinds, ("length", "other"))
    with pytest.raises(ValueError, match="exactly one category"):
        Mix({})
