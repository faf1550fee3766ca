"""How evenly the tokens of one answer came, without keeping a number for each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex_platform.rollouts.aggregates import Histogram, bucket_of, value_at


@dataclass(slots=True)
class TokenTimes:
    """Gaps between the tokens of one choice as they reached us.

    Tokens that came together count as many gaps of the same part of the time since the ones before. The mean
    is exact. The 95th percentile is taken from a histogram whose buckets are 4.4 % wide, evenly filled: at
    most so far from a gap that occurred, and usually half of that.
    """

    _counts: dict[int, int] = field(default_factory=dict)  # by bucket of milliseconds
    _total_ms: float = 0.0

    def note(self, gap_s: float, count: int) -> None:
        """So many gaps of so many seconds."""
        gap_ms = gap_s * 1000
        bucket = bucket_of(gap_ms)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._total_ms += gap_ms * count

    @property
    def mean_ms(self) -> float | None:
        """None: there are no gaps."""
        count = sum(self._counts.values())
        return self._total_ms / count if count else None

    @property
    def p95_ms(self) -> float | None:
        """None: there are no gaps."""
        if not self._counts:
            return None
        return value_at(Histogram(self._counts).quantile_position(0.95))
