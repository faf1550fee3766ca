"""First come, first served, within priority."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from loraplex_engine.request import Request


class FcfsPolicy:
    """Larger priority first, then earlier arrival. A preempted request keeps its arrival, so it is
    ahead of everything of its priority that came after it.
    """

    def __init__(self) -> None:
        self._queue: list[Request] = []  # sorted by rank

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=self.rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._queue, self.rank(request), key=self.rank)
        is_there = index < len(self._queue) and self._queue[index] is request
        assert is_there, f"{request.identity} is not queued"
        del self._queue[index]

    def in_order(self) -> Sequence[Request]:
        return tuple(self._queue)

    def rank(self, request: Request) -> tuple[int, ...]:
        return (-request.generate.priority, request.seq)
