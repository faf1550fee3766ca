"""What grammars cost, and what became of requests under them: counts since the start, for metrics.

Owns counts only. Compilations are noted on the compiler's thread and look-ups on the step thread, each
figure by one thread alone; a reader may be an event behind. No numpy: metrics load before it may.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

# Upper bounds of the histogram of compile times; one more bucket is for what took longer.
COMPILE_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)


class GrammarMeter:
    """One engine's."""

    def __init__(self) -> None:
        self.num_queries = (
            0  # grammars that requests brought, and were not refused for a full queue
        )
        self.num_hits = (
            0  # those of them that were compiled, being compiled or known to fail already
        )
        self.compile_counts = [0] * (len(COMPILE_BUCKETS_S) + 1)  # by time, failed ones included
        self.compile_seconds_total = 0.0
        self.failures: Counter[str] = Counter()  # requests that their grammar ended, by error code
        self.num_masks = 0
        self.mask_seconds_total = (
            0.0  # of the step thread's CPU: masks, drafts, following the output
        )
        self.num_deferred = 0  # rows and steps that a row was left out of: `mask_budget.py`

    def note_query(self, *, is_hit: bool) -> None:
        """A request brought a grammar."""
        self.num_queries += 1
        self.num_hits += is_hit

    def note_compile(self, seconds: float) -> None:
        """A grammar was compiled, or could not be; it took so long from its turn on."""
        self.compile_counts[bisect_left(COMPILE_BUCKETS_S, seconds)] += 1
        self.compile_seconds_total += seconds

    def note_masks(self, count: int, seconds: float) -> None:
        """A row's grammar took so long of a step, for so many masks."""
        self.num_masks += count
        self.mask_seconds_total += seconds
