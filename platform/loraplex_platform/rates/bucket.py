"""A token bucket, with the arithmetic of `lua/admit.lua`: the same doubles in the same order.

Serves where Redis cannot be asked, and as the model that the scripts are tested against.
Units: amounts are requests or tokens, times are microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUTE_US = 60_000_000
NEVER = -1


@dataclass(slots=True)
class Bucket:
    """Fills by `per_minute`, holds at most `burst`. Starts full."""

    per_minute: float
    burst: float
    level: float = math.inf
    last_us: int = 0

    def level_at(self, now_us: int) -> float:
        """What can be taken now. Moves the bucket's time back if the clock was put back."""
        self.last_us = min(self.last_us, now_us)
        return min(self.burst, self.level + (now_us - self.last_us) * self.per_minute / MINUTE_US)

    def wait_us(self, amount: float, now_us: int) -> int:
        """Until `amount` can be taken: 0 now, `NEVER` if it is more than the bucket holds."""
        if self.burst < amount or self.per_minute <= 0:
            return NEVER
        level = self.level_at(now_us)
        if level >= amount:
            return 0
        return math.ceil((amount - level) * MINUTE_US / self.per_minute)

    def take(self, amount: float, now_us: int) -> None:
        """Take without asking. Negative: give back, up to the burst."""
        self.level = min(self.burst, self.level_at(now_us) - amount)
        self.last_us = now_us

    def reset_us(self, now_us: int) -> int:
        """Until it is full."""
        level = self.level_at(now_us)
        if level >= self.burst:
            return 0
        if self.per_minute <= 0:
            return NEVER
        return math.ceil((self.burst - level) * MINUTE_US / self.per_minute)
