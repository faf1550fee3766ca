"""How long loads take, by where the files came from: the last one, and quantiles of the last few hundred.

A mean over a replica's life says nothing: one load from a store that was away for a minute outweighs a day of fast
ones, and the first load after a restart is in it for ever. Prometheus has the histogram of all.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from loraplex_engine.lora.loader import LoadTier
from loraplex_engine.protocol import AdapterLoadTimes

WINDOW: Final = 256  # loads of a tier


class LoadMeter:
    """All calls come from the step thread."""

    def __init__(self) -> None:
        self._counts: dict[LoadTier, int] = {}
        self._recent_s: dict[LoadTier, deque[float]] = {}

    def note(self, tier: LoadTier, seconds: float) -> None:
        """An adapter came to host memory after so long."""
        self._counts[tier] = self._counts.get(tier, 0) + 1
        self._recent_s.setdefault(tier, deque(maxlen=WINDOW)).append(seconds)

    def read(self) -> dict[str, AdapterLoadTimes]:
        """By tier, of those that any load came from."""
        return {tier: self._times(tier, recent) for tier, recent in self._recent_s.items()}

    def _times(self, tier: LoadTier, recent_s: deque[float]) -> AdapterLoadTimes:
        in_order = sorted(recent_s)

        def quantile(share: float) -> float:  # one that was measured: no value between two
            return in_order[math.ceil(share * len(in_order)) - 1]

        return AdapterLoadTimes(
            loads_total=self._counts[tier],
            last_s=recent_s[-1],
            p50_s=quantile(0.5),
            p95_s=quantile(0.95),
        )
