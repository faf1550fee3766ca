"""Rates of one gateway alone, for while Redis does not answer.

Each gateway enforces its part: limit / number of live gateways, at least one of each. So all of them
together allow the limit, or one each where the limit is smaller than their number. Buckets start full
when Redis goes away; requests that were running then keep their places.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from uuid import UUID

from loraplex_platform.quotas.records import RateLimit
from loraplex_platform.rates import keys
from loraplex_platform.rates.admission import Claim, LimitView, TokenUse
from loraplex_platform.rates.bucket import NEVER, Bucket

_PLACE_WAIT_US = 1_000_000


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class LocalRates:
    """Knows the places of all requests of this gateway, and has buckets only while it must."""

    def __init__(self, clock_us: Callable[[], int] = _monotonic_us) -> None:
        self._clock_us = clock_us
        self._buckets: dict[str, Bucket] = {}
        self._places: dict[str, set[UUID]] = {}

    def admit(
        self, claim: Claim, limits: Sequence[RateLimit], num_gateways: int
    ) -> tuple[bool, list[LimitView]]:
        """Take from all limits, or from none; whether it was taken, and how they stand."""
        now_us = self._clock_us()
        names = keys.names_of(claim.limits.rates)
        named = [
            (x, names[x.limit_id], self._bucket(x, names[x.limit_id], num_gateways)) for x in limits
        ]
        waits = [self._wait_us(claim, *one, now_us) for one in named]
        is_admitted = not any(waits)
        views = []
        for (limit, name, bucket), wait_us in zip(named, waits, strict=True):
            if limit.metric == "concurrency":
                num_free = bucket.burst - len(self._places.get(name, ())) - is_admitted
                views.append(LimitView(limit, max(0, int(num_free)), 0, wait_us))
                continue
            if is_admitted:
                bucket.take(claim.amount(limit.metric), now_us)
            remaining = max(0, int(bucket.level_at(now_us)))
            views.append(LimitView(limit, remaining, bucket.reset_us(now_us), wait_us))
        return is_admitted, views

    def hold(self, claim: Claim) -> None:
        """The request runs: note its places, whoever admitted it."""
        names = keys.names_of(claim.limits.rates)
        for limit in claim.limits.rates:
            if limit.metric == "concurrency":
                self._places.setdefault(names[limit.limit_id], set()).add(claim.request_id)

    def release(self, claim: Claim, used: TokenUse | None) -> None:
        """The request is over."""
        now_us = self._clock_us()
        names = keys.names_of(claim.limits.rates)
        for limit in claim.limits.rates:
            name = names[limit.limit_id]
            if limit.metric == "concurrency":
                places = self._places.get(name)
                if places is not None:
                    places.discard(claim.request_id)
                    if not places:
                        del self._places[name]
            elif name in self._buckets:
                self._buckets[name].take(-claim.refund(limit.metric, used), now_us)

    def forget_buckets(self) -> None:
        """Redis answers again."""
        self._buckets.clear()

    def _wait_us(
        self, claim: Claim, limit: RateLimit, name: str, bucket: Bucket, now_us: int
    ) -> int:
        amount = claim.amount(limit.metric)
        if limit.capacity < amount:
            return NEVER
        if limit.metric == "concurrency":
            is_free = len(self._places.get(name, ())) + amount <= bucket.burst
            return 0 if is_free else _PLACE_WAIT_US
        # What is too much for a part is not too much for the limit: it waits for a full bucket.
        return bucket.wait_us(min(amount, bucket.burst), now_us)

    def _bucket(self, limit: RateLimit, name: str, num_gateways: int) -> Bucket:
        """This gateway's part of a limit; of places only the burst means something."""
        part, burst = (_divided(n, num_gateways) for n in (limit.value, limit.capacity))
        if limit.metric == "concurrency":
            # All limits of a scope count the same places, each against its own value.
            return Bucket(part, burst)
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(part, burst)
        bucket.per_minute, bucket.burst = part, burst
        return bucket


def _divided(value: int, num_gateways: int) -> int:
    return max(1, value // max(1, num_gateways)) if value > 0 else 0
