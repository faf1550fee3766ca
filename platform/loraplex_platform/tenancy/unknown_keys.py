"""Slows down whoever shows keys that are nobody's: by address, over all gateways.

Counted in Redis, and in this gateway's memory beside it, which alone serves while Redis does not answer.
An IPv6 customer owns a /64, so that counts as one address.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from loraplex_platform.errors import TooManyAttemptsError
from loraplex_platform.rates import keys, scripts
from loraplex_platform.rates.bucket import Bucket
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisAwayError
from loraplex_platform.users.visitor import network_of

# From one address: so many at once, so many a minute.
BURST = 60
PER_MINUTE = 60
MAX_ADDRESSES = 10_000


class UnknownKeys:
    """One gateway's view.

    Args:
        redis: None: this gateway counts alone.
    """

    def __init__(
        self, redis: DeadlineRedis | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = redis
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # by network

    async def check(self, address: str) -> None:
        """Whether a key from there may be looked up.

        Raises:
            TooManyAttemptsError: too many of them were unknown.
        """
        network = network_of(address)
        bucket = self._buckets.get(network)
        wait_us = 0 if bucket is None else bucket.wait_us(1, self._now_us())
        if not wait_us:  # what is too much for one gateway is too much
            with contextlib.suppress(RedisAwayError):
                wait_us = await self._ask(network, 0)
        if wait_us > 0:
            raise TooManyAttemptsError(
                "Too many unknown API keys from this address; try again later.",
                retry_after_s=math.ceil(wait_us / 1e6),
            )

    async def note(self, address: str) -> None:
        """One that was shown from there is unknown."""
        network, now_us = network_of(address), self._now_us()
        bucket = self._buckets.pop(network, None) or Bucket(PER_MINUTE, BURST)
        self._buckets[network] = bucket
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        # Many that were looked up side by side do not shut the address for longer than the rate says.
        bucket.take(max(0.0, min(1.0, bucket.level_at(now_us))), now_us)
        with contextlib.suppress(RedisAwayError):
            await self._ask(network, 1)

    async def _ask(self, network: str, amount: int) -> int:
        if self._redis is None:
            return 0
        names = [keys.unknown_keys(network)]
        return int(await self._redis.run(scripts.THROTTLE, names, [PER_MINUTE, BURST, amount]))

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)
