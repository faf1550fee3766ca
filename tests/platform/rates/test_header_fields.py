"""`RateLimit-Policy` and `RateLimit`, to the letter of RFC 9651 (structured fields)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.rates.admission import LimitView, RateLimitedError, rate_headers
from loraplex_platform.rates.header_fields import MAX_INTEGER

from tests.platform.rates.stand import ACME_KEY, claim, limit, shared

# Of a list as we write it: strings without escapes, parameters that are integers or such strings.
_STRING = r'"[\x20\x21\x23-\x5b\x5d-\x7e]*"'
_INTEGER = r"-?[0-9]{1,15}"
_ITEM = rf"{_STRING}(?:;[a-z*][a-z0-9_.*-]*=(?:{_INTEGER}|{_STRING}))*"
_LIST = re.compile(rf"{_ITEM}(?:, {_ITEM})*")


def parsed(field: str) -> dict[str, dict[str, Any]]:
    """Parameters by item, in order; fails where it is no such list, or names an item twice."""
    assert _LIST.fullmatch(field), field
    items: dict[str, dict[str, Any]] = {}
    for text in field.split(", "):
        name, *parameters = text.split(";")
        assert name not in items
        pairs = [one.split("=") for one in parameters]
        items[name.strip('"')] = {
            key: value.strip('"') if value.startswith('"') else int(value) for key, value in pairs
        }
        assert len(items[name.strip('"')]) == len(pairs)
    return items


def test_requests_and_concurrency_are_told_and_tokens_are_not() -> None:
    views = [
        LimitView(limit("rpm", 60), remaining=12, reset_us=47_100_000),
        LimitView(limit("concurrency", 8, scope_kind="key", scope_id=ACME_KEY), 5, 0),
        LimitView(limit("tpm_total", 1000), 100, 1_000_000),
        LimitView(shared("rpm", 5), 1, 1_000_000),
    ]

    headers = rate_headers(views)

    assert headers["RateLimit-Policy"] == (
        '"tenant-requests";q=60;qu="requests";w=60, "key-concurrency";q=8;qu="concurrent-requests"'
    )
    assert headers["RateLimit"] == '"tenant-requests";r=12;t=48, "key-concurrency";r=5'
    assert "RateLimit" not in rate_headers(views[2:])


def test_a_burst_is_a_quota_of_the_time_in_which_it_comes_back() -> None:
    views = [
        LimitView(limit("rpm", 60, burst=10), 10, 0),
        LimitView(limit("rpm", 7, burst=100, scope_kind="key", scope_id=ACME_KEY), 100, 0),
        LimitView(limit("rpm", 0, scope_kind="project"), 0, -1, -1),
    ]

    headers = rate_headers(views)

    assert parsed(headers["RateLimit-Policy"]) == {
        "tenant-requests": {"q": 10, "qu": "requests", "w": 10},
        "key-requests": {"q": 100, "qu": "requests", "w": 858},
        "project-requests": {"q": 0, "qu": "requests", "w": 60},
    }
    assert headers["RateLimit"] == (
        '"tenant-requests";r=10;t=0, "key-requests";r=100;t=0, "project-requests";r=0'
    )


def test_the_tighter_of_two_limits_of_one_scope_is_shown() -> None:
    usual, raised = limit("rpm", 60), limit("rpm", 600)

    headers = rate_headers([LimitView(raised, 590, 0), LimitView(usual, 50, 0)])

    assert parsed(headers["RateLimit-Policy"]) == {
        "tenant-requests": {"q": 60, "qu": "requests", "w": 60}
    }
    assert parsed(headers["RateLimit"])["tenant-requests"]["r"] == 50


def test_a_refusal_says_when_a_request_fits_and_retry_after_is_not_earlier() -> None:
    blocking = LimitView(limit("rpm", 6), 0, reset_us=60_000_000, wait_us=9_000_001)
    views = [
        blocking,
        LimitView(limit("concurrency", 8), 5, 0),
        LimitView(
            limit("rpm", 1, burst=99, scope_kind="key", scope_id=ACME_KEY), 50, 2_940_000_000
        ),
    ]

    headers = RateLimitedError(claim(), views).headers

    assert parsed(headers["RateLimit"]) == {
        "tenant-requests": {"r": 0, "t": 10},
        "tenant-concurrency": {"r": 5},
        "key-requests": {"r": 50},
    }
    assert int(headers["Retry-After"]) >= 10


@pytest.mark.parametrize("is_refused", [True, False])
@given(
    value=st.integers(0, 10**20),
    burst=st.integers(1, 10**20),
    remaining=st.integers(0, 10**20),
    reset_us=st.integers(-1, 10**25),
    wait_us=st.integers(-1, 10**25),
)
def test_whatever_the_numbers_both_fields_are_lists_of_the_same_policies(
    is_refused: bool, value: int, burst: int, remaining: int, reset_us: int, wait_us: int
) -> None:
    views = [
        LimitView(limit("rpm", value, burst=burst), remaining, reset_us, wait_us),
        LimitView(limit("concurrency", value), remaining, 0, wait_us),
    ]

    headers = rate_headers(views, is_refused=is_refused)

    policy, state = parsed(headers["RateLimit-Policy"]), parsed(headers["RateLimit"])
    assert list(policy) == list(state) == ["tenant-requests", "tenant-concurrency"]
    for item in policy.values():
        assert 0 <= item["q"] <= MAX_INTEGER
        assert item.get("w", 1) >= 1
    for item in state.values():
        assert set(item) <= {"r", "t"}
        assert min(item.values()) >= 0
