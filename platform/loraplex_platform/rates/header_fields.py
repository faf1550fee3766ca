"""The IETF's `RateLimit-Policy` and `RateLimit`: what a caller's limits are, and how they stand.

Lists of structured fields (RFC 9651): one string for each policy, with parameters. The quota units that the
draft knows are requests, bytes and concurrent requests, so limits on tokens are not told here; `x-ratelimit-*`
has them. A bucket that holds `burst` and fills by `value` a minute is a quota of `burst` in the time in
which it fills.
Source: draft-ietf-httpapi-ratelimit-headers, revisions 09 and 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex_platform.quotas.records import RateLimit
    from loraplex_platform.rates.admission import LimitView

MAX_INTEGER = 999_999_999_999_999  # of structured fields
_NAMES = {"rpm": "requests", "concurrency": "concurrency"}


def ratelimit_fields(views: Iterable[LimitView], *, is_refused: bool) -> dict[str, str]:
    """Both fields, or none where there is no limit on requests.

    Of two limits of one scope and kind (a raise for some time) the tighter one is shown.

    Args:
        views: of the caller's own limits.
        is_refused: whether the answer says when to come back: then `t` is when a request fits, and only
            what blocks has it, for `Retry-After` may not lie before any `t`.
    """
    shown: dict[str, LimitView] = {}
    for view in views:
        if view.limit.metric in _NAMES:
            name = _name(view.limit)
            known = shown.get(name)
            if known is None or view.fraction_left < known.fraction_left:
                shown[name] = view
    if not shown:
        return {}
    return {
        "RateLimit-Policy": ", ".join(_policy(view.limit) for view in shown.values()),
        "RateLimit": ", ".join(_state(view, is_refused=is_refused) for view in shown.values()),
    }


def _name(limit: RateLimit) -> str:
    return f"{limit.scope_kind}-{_NAMES[limit.metric]}"


@lru_cache(maxsize=4096)
def _policy(limit: RateLimit) -> str:
    quota = min(limit.capacity if limit.value > 0 else 0, MAX_INTEGER)
    if limit.metric == "concurrency":
        return f'"{_name(limit)}";q={quota};qu="concurrent-requests"'
    window_s = math.ceil(quota * 60 / limit.value) if limit.value > 0 else 60
    return f'"{_name(limit)}";q={quota};qu="requests";w={window_s}'


def _state(view: LimitView, *, is_refused: bool) -> str:
    is_closed = view.limit.value <= 0
    remaining = 0 if is_closed else min(max(0, view.remaining), MAX_INTEGER)
    item = f'"{_name(view.limit)}";r={remaining}'
    wait_us = view.wait_us if is_refused else view.reset_us
    # Nobody knows when a place gets free.
    if (
        view.limit.metric == "concurrency"
        or is_closed
        or wait_us < 0
        or (is_refused and not wait_us)
    ):
        return item
    return f"{item};t={min(math.ceil(wait_us / 1e6), MAX_INTEGER)}"
