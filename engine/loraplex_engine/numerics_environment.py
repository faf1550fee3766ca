"""What the libraries below torch must be told by environment variables, before they are loaded.

Each variable that is set already is left alone; `row_rule.py` says at start where that breaks the row rule.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")
_ONEDNN_LIMIT: Final = "ONEDNN_MAX_CPU_ISA"
_SETTINGS: Final = {
    # OpenMP's threads spin at each barrier for about a millisecond, which is ruinous where other processes want
    # the same cores, as in `loraplex up`: with 12 runnable processes on 2 cores, linears ran at 20 a second;
    # spinning for some microseconds only, at 120.
    "GOMP_SPINCOUNT": "2000",
    # numpy's counts the machine's cores, not the cgroup's, and its threads would take the step's time while an
    # adapter loads.
    "OPENBLAS_NUM_THREADS": "1",
    # With AMX, oneDNN multiplies few rows in vectors and many in tiles, in another order of additions.
    _ONEDNN_LIMIT: "AVX512_CORE_BF16",
}


def prepare_numerics(cpu_info: Path = _CPU_INFO) -> None:
    """Set them for this process and its children. Call it before torch or numpy is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if _is_intel(cpu_info):
        # Intel's MKL cuts fp32 products along k by their number of rows, unless told that a row must not change
        # with it. On CPUs of others that setting takes its slowest kernels, and needs no telling.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def unlimited_environment() -> dict[str, str] | None:
    """For a child that asks what the machine can do: nothing keeps its oneDNN from AMX. None: nothing does here."""
    if _ONEDNN_LIMIT not in os.environ:
        return None
    return {name: value for name, value in os.environ.items() if name != _ONEDNN_LIMIT}


def _is_intel(cpu_info: Path) -> bool:
    try:
        return "GenuineIntel" in cpu_info.read_text(encoding="utf-8")
    except OSError:
        return False
