"""Priority classes with aging: urgent requests pass the others, but not for ever."""

from __future__ import annotations

from loraplex_engine.policies.base import Rank, StaticPolicy
from loraplex_engine.request import Request


class PriorityPolicy(StaticPolicy):
    """Waiting for `aging_s` seconds is worth one step of priority.

    At time t a request that arrived at a counts as priority + (t - a) / aging_s. Of two requests the
    difference does not depend on t, so a rank never changes: it is the arrival, moved back by aging_s
    for each step of priority.

    Bound: a request is served before everything that arrived more than
    (the other's priority - its own) * aging_s seconds after it; a preempted one keeps its arrival. So
    what may ever be ahead of it is fixed when that time is over, and none of it waits for ever.
    """

    def __init__(self, aging_s: float) -> None:
        if not aging_s > 0:
            raise ValueError(f"aging_s is {aging_s}: it must be above 0")
        super().__init__()
        self.aging_s = aging_s

    def overtaking_window_s(self, priority: int, other: int) -> float:
        """For how long after a request of `priority` one of `other` may still arrive and pass it."""
        return max(0, other - priority) * self.aging_s

    def rank(self, request: Request) -> Rank:
        return (
            request.arrived_at_unix_s - request.generate.priority * self.aging_s,
            request.seq,
        )
