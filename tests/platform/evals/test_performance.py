from __future__ import annotations

import pytest
from loraplex_platform.evals.performance import (
    Sample,
    figures,
    gaps_of,
    misses,
    quantile,
    synthetic_prompt,
)
from loraplex_platform.evals.suites import PerformanceThresholds


def test_tokens_that_came_at_once_share_their_gap() -> None:
    assert gaps_of([(10.0, 1), (16.0, 2), (20.0, 1)]) == [3.0, 3.0, 4.0]
    assert gaps_of([(10.0, 4)]) == []


def test_a_quantile_is_a_value_that_was_there() -> None:
    assert quantile([], 0.5) is None
    assert quantile([5.0], 0.95) == 5.0
    assert quantile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert quantile([2.0, 1.0], 0.5) == 1.0


def test_the_figures_are_of_all_requests() -> None:
    samples = [
        Sample(100.0, [10.0, 20.0], 3, is_aborted=False),
        Sample(300.0, [30.0], 2, is_aborted=False),
        Sample(None, [], 0, is_aborted=True),
    ]

    found = figures(samples, elapsed_s=2.0, concurrency=4, max_in_flight=2, kv_usage=[0.1, 0.3])

    assert (found.num_requests, found.num_aborted) == (3, 1)
    assert found.abort_rate == pytest.approx(1 / 3)
    assert (found.ttft_p50_ms, found.ttft_p95_ms) == (100.0, 300.0)
    assert (found.itl_p50_ms, found.itl_p95_ms) == (20.0, 30.0)
    assert (found.output_tokens, found.output_tokens_per_s) == (5, 2.5)
    assert found.kv_usage_mean == pytest.approx(0.2)
    assert found.kv_usage_max == 0.3


def test_what_is_missed_is_said_and_what_was_not_measured_is_missed() -> None:
    wanted = PerformanceThresholds(
        ttft_p95_ms=200, itl_p95_ms=50, output_tokens_per_s=3, abort_rate=0.5
    )
    samples = [Sample(300.0, [10.0], 2, is_aborted=False)]
    slow = figures(samples, elapsed_s=1.0, concurrency=1, max_in_flight=1, kv_usage=[])
    nothing = figures([], elapsed_s=1.0, concurrency=1, max_in_flight=0, kv_usage=[])

    assert misses(slow, wanted) == [
        "ttft_p95_ms is 300, wanted 200 or less",
        "output_tokens_per_s is 2, wanted 3 or more",
    ]
    assert "ttft_p95_ms could not be measured, wanted 200" in misses(nothing, wanted)
    assert misses(slow, PerformanceThresholds()) == []


def test_a_synthetic_prompt_is_its_seeds_own() -> None:
    ids = range(100, 164)

    first, again, other = (synthetic_prompt(50, seed, ids) for seed in (1, 1, 2))

    assert first == again
    assert len(first) == 50
    assert set(first) <= set(ids)
    assert first[:8] != other[:8]
    assert synthetic_prompt(50, 1, ids)[:20] == synthetic_prompt(20, 1, ids)
