"""How the waiting queue moves: waits, classes, reasons for skips, and when a refused client should retry.

Owns counts only; the queue itself is the policy's. Times are the scheduler's clock, in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

from loraplex_engine.request import BlockReason, Request

# Upper bounds of the histogram of waits; one more bucket is for what waited longer.
WAIT_BUCKETS_S: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)

_WINDOW_S = 2.0  # over which the rate is taken, and then averaged with what it was before
_RETRY_SHARE = 10  # refused clients are to come when one in so many of the queue has been served
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class QueueMeter:
    """All calls come from the step thread."""

    def __init__(self) -> None:
        self.num_by_priority: Counter[int] = Counter()  # waiting now
        self.skips_by_reason: Counter[str] = Counter()  # requests and steps, since the start
        self.wait_counts = [0] * (len(WAIT_BUCKETS_S) + 1)  # first admissions by time in the queue
        self.wait_seconds_total = 0.0
        self._rate: float | None = None  # requests that leave the queue per second, while some wait
        self._window_began_s: float | None = None
        self._num_left = 0  # in this window

    def enter(self, request: Request) -> None:
        """A request was queued."""
        self.num_by_priority[request.generate.priority] += 1

    def leave(self, request: Request) -> None:
        """A request is not in the queue any more, for whatever reason."""
        priority = request.generate.priority
        self.num_by_priority[priority] -= 1
        if not self.num_by_priority[priority]:
            del self.num_by_priority[priority]
        self._num_left += 1

    def note_wait(self, seconds: float) -> None:
        """A request runs for the first time, after so long."""
        seconds = max(0.0, seconds)  # the clock may have been set back
        self.wait_counts[bisect_left(WAIT_BUCKETS_S, seconds)] += 1
        self.wait_seconds_total += seconds

    def note_skip(self, reason: BlockReason) -> None:
        """A blocked request was passed over."""
        self.skips_by_reason[reason.value] += 1

    def begin_step(self, now_s: float) -> None:
        """Take the rate. Time without a queue says nothing about how fast one moves."""
        if self._window_began_s is None or not self.num_by_priority:
            self._window_began_s, self._num_left = now_s, 0
        elif now_s - self._window_began_s >= _WINDOW_S:
            rate = self._num_left / (now_s - self._window_began_s)
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._window_began_s, self._num_left = now_s, 0

    def retry_after_s(self, num_waiting: int) -> float:
        """When a client that found the queue full should come again, at the rate it moves now."""
        if self._rate is None:
            return _MIN_RETRY_S
        num_before = max(1.0, num_waiting / _RETRY_SHARE)
        if self._rate * _MAX_RETRY_S <= num_before:
            return _MAX_RETRY_S
        return max(_MIN_RETRY_S, num_before / self._rate)
