"""What the CPU that tests run on has."""

from __future__ import annotations

from pathlib import Path


def cpu_flags() -> set[str]:
    """Names of its features, as Linux gives them; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}
