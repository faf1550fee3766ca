"""Stops asking a server that does not answer, and asks now and then whether it does again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 5.0


@dataclass(slots=True)
class Breaker:
    """Opens after a few failures in a row; then one call at a time, with growing pauses, may try.

    Without it every request would wait for the deadline of a server that is paused.
    """

    clock: Callable[[], float] = time.monotonic
    _failures: int = field(default=0, init=False)
    _pause_s: float = field(default=0.0, init=False)
    _next_try_s: float = field(default=0.0, init=False)
    _is_trying: bool = field(default=False, init=False)

    @property
    def is_open(self) -> bool:
        """Whether calls are held back."""
        return self._pause_s > 0.0

    def allows(self) -> bool:
        """Whether a call may be made now. While open, a yes is one caller's turn to try."""
        if not self.is_open:
            return True
        now_s = self.clock()
        if now_s < self._next_try_s:
            return False
        self._next_try_s = now_s + self._pause_s
        self._is_trying = True
        return True

    def note_success(self) -> None:
        """It answered."""
        self._failures, self._pause_s, self._is_trying = 0, 0.0, False

    def note_failure(self) -> None:
        """It did not. Calls that were under way when it opened say nothing new."""
        self._failures += 1
        if self._is_trying:
            self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
        elif not self.is_open and self._failures >= FAILURES_TO_OPEN:
            self._pause_s = FIRST_PAUSE_S
        else:
            return
        self._is_trying = False
        self._next_try_s = self.clock() + self._pause_s
