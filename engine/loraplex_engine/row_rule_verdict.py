"""Remembers that the row rule holds here, so that a warm start need not prove it again.

The self-check takes seconds, and its outcome is a function of what it runs on: the CPU, torch and its
threads, numpy, what steers their libraries, our own code, the compiled kernels, the model and the backends. A verdict is kept under a digest of all of these;
change one and the check runs again. Only "holds" is kept: a failure is found, and said, at each start.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import loraplex_kernels
import numpy as np
import structlog
import torch
from loraplex_kernels.cpu.build import library_name

import loraplex_engine

log = structlog.get_logger(__name__)

_SOURCES = ("*.py", "*.c", "*.h")

# By which the libraries below torch choose their inner loops and how they cut work up.
_VARIABLES = ("ONEDNN_", "DNNL_", "MKL_", "OMP_", "GOMP_", "KMP_", "ATEN_", "OPENBLAS_", "NPY_")


def recall_or_check(folder: Path, subject: Mapping[str, object], check: Callable[[], bool]) -> bool:
    """Whether the rule holds for `subject` on this machine; runs `check` when nobody has yet.

    Args:
        folder: where verdicts are kept; made when missing, done without when it cannot be.
        subject: the model and the backends, JSON-able.
    """
    path = folder / f"{_digest(subject)}.json"
    if path.is_file():
        log.info("row_rule_recalled", verdict=path.name)
        return True
    holds = check()
    if holds:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"holds": True, "checked_at_unix_s": time.time()}))
        except OSError as error:
            log.info("row_rule_verdict_not_kept", error=str(error))
    return holds


def _digest(subject: Mapping[str, object]) -> str:
    parts = {
        "subject": dict(subject),
        "torch": torch.__config__.show(),
        "numpy": np.__version__,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        "threads": torch.get_num_threads(),
        "cpu": _cpu(),
        "code": _code(),
        "kernels": [library_name("attention"), library_name("lora")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _cpu() -> list[str]:
    """Model and features; all cores of a machine are alike."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [torch.backends.cpu.get_cpu_capability()]
    wanted = ("model name", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(wanted)})


def _code() -> str:
    digest = hashlib.sha256()
    for package in (loraplex_engine, loraplex_kernels):
        root = Path(package.__path__[0])
        for path in sorted(path for pattern in _SOURCES for path in root.rglob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()
