"""Who is served first. One interface, one class per policy."""

from loraplex_engine.policies.base import Policy
from loraplex_engine.policies.fcfs import FcfsPolicy

__all__ = ["FcfsPolicy", "Policy"]
