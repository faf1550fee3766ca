"""How many threads the engine may really use: affinity and the cgroup's CPU quota, not the core count.

More threads than the quota allows get the whole process throttled in the middle of a step.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(root: Path = _CGROUP_ROOT) -> int:
    """CPUs this process may run on, at least 1; a fractional quota is rounded up."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota(root)
    return max(1, min(num_cpus or 1, math.ceil(quota) if quota is not None else num_cpus or 1))


def cpu_quota(root: Path = _CGROUP_ROOT) -> float | None:
    """CPUs' worth of time per period; None: no limit, or no cgroup to ask (version 2, then 1)."""
    fields = _read_words(root / "cpu.max")
    if len(fields) == 2:
        return None if fields[0] == "max" else _ratio(fields[0], fields[1])
    quota = _read_words(root / "cpu" / "cpu.cfs_quota_us")
    period = _read_words(root / "cpu" / "cpu.cfs_period_us")
    if len(quota) == 1 and len(period) == 1:
        return _ratio(quota[0], period[0])
    return None


def _ratio(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []
