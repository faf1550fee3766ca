"""Who is served first. One interface, one class per policy."""

from loraplex_engine.policies.base import Policy
from loraplex_engine.policies.fair import FairPolicy, service_gap_bound
from loraplex_engine.policies.fcfs import FcfsPolicy
from loraplex_engine.policies.priority import PriorityPolicy

__all__ = ["FairPolicy", "FcfsPolicy", "Policy", "PriorityPolicy", "service_gap_bound"]
