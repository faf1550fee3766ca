"""First come, first served, within priority."""

from __future__ import annotations

from loraplex_engine.policies.base import Rank, StaticPolicy
from loraplex_engine.request import Request


class FcfsPolicy(StaticPolicy):
    """Larger priority first, then earlier arrival. A preempted request keeps its arrival, so it is
    ahead of everything of its priority that came after it. A lower priority waits for as long as
    higher ones keep coming: `PriorityPolicy` bounds that.
    """

    def rank(self, request: Request) -> Rank:
        return (-request.generate.priority, request.seq)
