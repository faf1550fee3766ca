"""Time by part, nested calls subtracted, so that the parts add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


class PartClock:
    """One thread's. While a part runs inside another, the time is the inner one's alone.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stack: list[str] = []
        self._since = 0.0  # when the part on top went on
        self.seconds: dict[str, float] = {}

    def clear(self) -> None:
        """Forget what was measured."""
        assert not self._stack, "cleared amid a part"
        self.seconds = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted as `part`."""

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever `call` takes and gives
            self._enter(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._leave()

        return run

    def split(
        self, call: Callable[..., Any], take_seconds: Callable[[], Mapping[str, float]]
    ) -> Callable[..., Any]:
        """`call`, which runs inside a part and tells its own parts itself.

        Args:
            take_seconds: what of the last call was whose; the rest is the part's that it runs inside.
        """

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever `call` takes and gives
            out = call(*args, **kwargs)
            whole = self._stack[-1]
            for part, seconds in take_seconds().items():
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds
                self.seconds[whole] = self.seconds.get(whole, 0.0) - seconds
            return out

        return run

    def _enter(self, part: str) -> None:
        now = self._clock()
        if self._stack:
            self._book(self._stack[-1], now)
        self._stack.append(part)
        self._since = now

    def _leave(self) -> None:
        now = self._clock()
        self._book(self._stack.pop(), now)
        self._since = now

    def _book(self, part: str, now: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
