"""Who is served first. One interface, one class per policy."""

from __future__ import annotations

from loraplex_engine.config import PolicyName
from loraplex_engine.policies.base import Policy, ServiceGap
from loraplex_engine.policies.fair import FairPolicy, max_charge
from loraplex_engine.policies.fcfs import FcfsPolicy
from loraplex_engine.policies.priority import PriorityPolicy

__all__ = [
    "FairPolicy",
    "FcfsPolicy",
    "Policy",
    "PriorityPolicy",
    "ServiceGap",
    "make_policy",
    "max_charge",
]


def make_policy(name: PolicyName, *, aging_s: float, most_charged: float) -> Policy:
    """The policy that the settings name."""
    match name:
        case "fair":
            return FairPolicy(aging_s, most_charged)
        case "priority":
            return PriorityPolicy(aging_s)
        case "fcfs":
            return FcfsPolicy()
