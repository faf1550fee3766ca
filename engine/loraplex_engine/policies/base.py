"""What the scheduler asks of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraplex_engine.request import Request


class Policy(Protocol):
    """The waiting queue and its order; the same order ranks running requests for preemption."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Queue a request that is new or was preempted."""
        ...

    def remove(self, request: Request) -> None:
        """Take a queued request out: it runs, or it ended."""
        ...

    def in_order(self) -> Sequence[Request]:
        """All queued requests, first to serve first; `push` and `remove` do not change the result."""
        ...

    def rank(self, request: Request) -> tuple[int, ...]:
        """Smaller is served first and preempted last. Must not change while the request runs."""
        ...
