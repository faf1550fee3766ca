"""The pace of an answer, from a few dozen counts."""

from __future__ import annotations

import random

import pytest
from loraplex_platform.gateway.token_times import TokenTimes


def test_nothing_is_said_of_an_answer_without_gaps() -> None:
    times = TokenTimes()

    assert (times.mean_ms, times.p95_ms) == (None, None)


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_is_exact_and_the_percentile_near(seed: int) -> None:
    rng = random.Random(seed)
    gaps_ms = [rng.lognormvariate(2, 0.7) for _ in range(999)]
    times = TokenTimes()
    for gap_ms in gaps_ms:
        times.note(gap_ms / 1000, 1)

    assert times.mean_ms == pytest.approx(sum(gaps_ms) / len(gaps_ms))
    exact = sorted(gaps_ms)[round(0.95 * len(gaps_ms)) - 1]
    assert times.p95_ms == pytest.approx(exact, rel=0.045)
    assert len(times._counts) < 200


def test_tokens_that_come_together_share_their_gap() -> None:
    together, alone = TokenTimes(), TokenTimes()
    together.note(0.01, 4)
    for _ in range(4):
        alone.note(0.01, 1)

    assert together.mean_ms == alone.mean_ms == pytest.approx(10)
    assert together.p95_ms == alone.p95_ms == pytest.approx(10, rel=0.045)
