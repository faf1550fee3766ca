"""What the scheduler asks of a policy: the waiting queue, its order, and who pays for what is served.

The same order ranks running requests: budget goes to the smallest rank first, and blocks are taken back
from the largest. The scheduler sorts running requests once per step, so a rank may change between steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loraplex_engine.request import Request

Rank = tuple[Any, ...]  # comparable with every other rank of the same policy


@dataclass(frozen=True, slots=True)
class ServiceGap:
    """How far apart the accounts of two waiting tenants of a class have been since the start."""

    widest: float  # seen
    promised: float  # possible, from what the requests admitted might be charged
    # Possible with the tenants of now, whatever they send. It has the least of their weights in it, so it
    # falls when a light tenant leaves; `widest` and `promised` do not.
    bound: float


class Policy(Protocol):
    """One object per scheduler; all calls come from the step thread.

    A request is pushed, then removed or admitted; one that was admitted leaves, and is pushed again if
    it was preempted.
    """

    def __len__(self) -> int:
        """How many requests wait."""
        ...

    def has_place_for(self, tenant_id: str, num_places: int, count: int = 1) -> bool:
        """Whether a tenant may queue `count` more at once, of the `num_places` requests that still may."""
        ...

    def push(self, request: Request) -> None:
        """Queue a request that is new or was preempted."""
        ...

    def remove(self, request: Request) -> None:
        """Take a queued request out: it ended without running (again)."""
        ...

    def admit(self, request: Request) -> None:
        """Take a queued request out: it runs from now on. Its prompt is charged here, less what it
        needs not compute (`num_computed_tokens`) and what was charged before.
        """
        ...

    def charge(self, request: Request) -> None:
        """Charge what a running request has put out since the last call; called once per step."""
        ...

    def leave(self, request: Request) -> None:
        """A running request gives its row back, having ended or to be pushed again."""
        ...

    def in_order(self) -> Iterator[Request]:
        """Queued requests, first to serve first. Lazy: the request that was yielded last, and no other,
        may be admitted or removed before the next is asked for; the order takes that into account.
        """
        ...

    def requests(self) -> Iterator[Request]:
        """Queued requests in no order in particular, without side effects."""
        ...

    def begin_step(self, now_unix_s: float) -> None:
        """A step is being decided."""
        ...

    def rank(self, request: Request) -> Rank:
        """Smaller is served first and preempted last."""
        ...

    def prefill_rank(self, request: Request) -> Rank:
        """The same for prefills, under way or waiting, which are apart: they take turns."""
        ...

    def service_gap(self) -> ServiceGap | None:
        """None: this policy keeps no accounts."""
        ...

    def check(self, running: Sequence[Request]) -> None:
        """Assert that queue and accounts are sound, given who runs."""
        ...


class StaticPolicy:
    """The queue of a policy whose ranks never change: a sorted list."""

    def __init__(self) -> None:
        self._queue: list[Request] = []  # sorted by rank

    def __len__(self) -> int:
        return len(self._queue)

    def has_place_for(self, tenant_id: str, num_places: int, count: int = 1) -> bool:
        return count <= num_places

    def push(self, request: Request) -> None:
        insort(self._queue, request, key=self.rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._queue, self.rank(request), key=self.rank)
        is_there = index < len(self._queue) and self._queue[index] is request
        assert is_there, f"{request.identity} is not queued"
        del self._queue[index]

    def admit(self, request: Request) -> None:
        self.remove(request)

    def charge(self, request: Request) -> None:
        pass

    def leave(self, request: Request) -> None:
        pass

    def in_order(self) -> Iterator[Request]:
        index = 0
        while index < len(self._queue):
            request = self._queue[index]
            yield request
            if index < len(self._queue) and self._queue[index] is request:
                index += 1  # passed over

    def requests(self) -> Iterator[Request]:
        return iter(self._queue)

    def begin_step(self, now_unix_s: float) -> None:
        pass

    def rank(self, request: Request) -> Rank:
        raise NotImplementedError

    def prefill_rank(self, request: Request) -> Rank:
        return self.rank(request)

    def service_gap(self) -> ServiceGap | None:
        return None

    def check(self, running: Sequence[Request]) -> None:
        ranks = [self.rank(request) for request in self._queue]
        assert ranks == sorted(ranks), "the queue is out of order"
