"""How rates stand in Redis, for who only wants to see them. What decides is the script (admit.lua)."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from loraplex_platform.quotas.records import RateLimit
from loraplex_platform.rates import keys
from loraplex_platform.rates.redis_client import DeadlineRedis

_LEVEL = struct.Struct("<dd")  # what is left, and when that was, in microseconds
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Level:
    """Of one rate.

    Attributes:
        used: of what may come at once: requests or tokens; of `concurrency` what runs.
        full_in_s: until nothing of it is used any more; None: that is not a matter of time.
    """

    used: int
    full_in_s: float | None


async def levels_of(redis: DeadlineRedis, limits: Sequence[RateLimit]) -> dict[UUID, Level]:
    """Each limit's level, by its id.

    Raises:
        RedisAwayError: Redis does not answer.
    """
    if not limits:
        return {}
    names = keys.names_of(limits)
    seconds, micros = await redis.command("TIME")
    now_us = int(seconds) * 1_000_000 + int(micros)
    levels = await asyncio.gather(
        *(_level(redis, limit, names[limit.limit_id], now_us) for limit in limits)
    )
    return {limit.limit_id: level for limit, level in zip(limits, levels, strict=True)}


async def _level(redis: DeadlineRedis, limit: RateLimit, name: str, now_us: int) -> Level:
    if limit.metric == "concurrency":
        return Level(int(await redis.command("ZCOUNT", name, f"({now_us}", "+inf")), None)
    raw = await redis.command("GET", name)
    if raw is None:
        return Level(0, 0.0)  # a full bucket and none are the same
    left, at_us = _LEVEL.unpack(raw)
    per_s = limit.value / _MINUTE_S
    left = min(limit.burst, left + max(0.0, now_us - at_us) / 1e6 * per_s)
    used = limit.burst - left
    # As the script rounds: what is left is a whole number, and never more than there is.
    return Level(limit.burst - math.floor(left), used / per_s if per_s else None)
