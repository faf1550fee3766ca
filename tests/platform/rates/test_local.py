from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.rates.admission import Claim, TokenUse
from loraplex_platform.rates.bucket import NEVER, Bucket
from loraplex_platform.rates.local import LocalRates

from tests.platform.rates.stand import claim, limit

if TYPE_CHECKING:
    from loraplex_platform.quotas.records import RateLimit

MINUTE_US = 60_000_000


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now_us = 0

    def __call__(self) -> int:
        return self.now_us


def take(rates: LocalRates, one: Claim, num_gateways: int = 1) -> bool:
    is_admitted, _ = rates.admit(one, one.limits.rates, num_gateways)
    if is_admitted:
        rates.hold(one)
    return is_admitted


def num_taken(rates: LocalRates, *limits: RateLimit, num_gateways: int = 1, tries: int = 99) -> int:
    return sum(take(rates, claim(*limits), num_gateways) for _ in range(tries))


@given(st.integers(1, 60), st.integers(1, 8))
def test_all_parts_together_are_the_limit_or_one_each(value: int, num_gateways: int) -> None:
    clock = Clock()
    gateways = [LocalRates(clock) for _ in range(num_gateways)]
    limits = (limit("rpm", value), limit("concurrency", value))

    total = sum(num_taken(g, *limits, num_gateways=num_gateways, tries=value + 1) for g in gateways)

    assert total <= max(value, num_gateways)
    assert total > value - num_gateways


def test_two_limits_of_one_scope_hold_each_in_whatever_order() -> None:
    for metric in ("concurrency", "rpm"):
        strict, loose = limit(metric, 2), limit(metric, 10)  # type: ignore[arg-type] # both are one

        assert num_taken(LocalRates(Clock()), strict, loose, tries=15) == 2
        assert num_taken(LocalRates(Clock()), loose, strict, tries=15) == 2


def test_a_bucket_fills_with_time() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    one = limit("rpm", 60, burst=2)

    assert num_taken(rates, one) == 2
    clock.now_us += MINUTE_US // 60 + 1
    assert num_taken(rates, one) == 1
    clock.now_us += 10 * MINUTE_US
    assert num_taken(rates, one) == 2


def test_a_request_larger_than_a_gateways_part_passes_when_the_limit_allows_it() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    one = limit("tpm_out", 150)  # 50 for each of three, and the request may take 100

    assert take(rates, claim(one), 3)
    assert not take(rates, claim(one), 3)
    clock.now_us += MINUTE_US
    assert not take(rates, claim(one), 3), "the debt is paid first"
    clock.now_us += MINUTE_US
    assert take(rates, claim(one), 3)
    assert not take(rates, claim(limit("tpm_out", 99)), 1), "not even the whole limit does"


def test_tokens_that_were_not_used_come_back() -> None:
    rates = LocalRates(Clock())
    one = limit("tpm_total", 220)
    first = claim(one)
    assert take(rates, first)
    assert take(rates, claim(one))
    assert not take(rates, claim(one))

    rates.release(first, TokenUse(0, 0))

    assert take(rates, claim(one))


def test_a_refusal_takes_nothing() -> None:
    rates = LocalRates(Clock())
    wide, narrow = limit("rpm", 100), limit("concurrency", 1)
    assert take(rates, claim(wide, narrow))

    assert num_taken(rates, wide, narrow) == 0

    assert num_taken(rates, wide) == 99


def test_a_clock_that_is_put_back_stops_nobody() -> None:
    bucket = Bucket(60, 1)
    bucket.take(1, 10 * MINUTE_US)

    assert bucket.wait_us(1, 0) == MINUTE_US // 60
    assert bucket.wait_us(1, MINUTE_US // 60) == 0
    assert bucket.wait_us(2, 0) == NEVER
    assert Bucket(0, 5).wait_us(1, 0) == NEVER
