"""What this machine can do at most, measured: the floors that a step is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

_READ_BYTES = 256 * 1024**2  # more than any cache
_GEMM_SIZES = (768, 1536)
_SECONDS = 1.0  # for each of the two


class MachineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bests of several runs, over all threads."""

    read_gb_s: float  # memory, read only
    gemm_gflop_s: float
    gemm_dtype: str
    num_threads: int


def measure_machine(
    dtype: torch.dtype,
    *,
    read_bytes: int = _READ_BYTES,
    gemm_sizes: tuple[int, ...] = _GEMM_SIZES,
    seconds: float = _SECONDS,
) -> MachineFigures:
    """Read a large buffer, and multiply square matrices of `dtype`, for about `seconds` each.

    Other processes only make a run slower, so the best counts.
    """
    numbers = torch.ones(read_bytes // 4, dtype=torch.float32)
    ways: list[Callable[[], object]] = [numbers.sum, numbers.amax]
    read_s = min(_best(way, seconds / len(ways)) for way in ways)
    peak = 0.0
    for size in gemm_sizes:
        a, out = torch.ones(size, size, dtype=dtype), torch.empty(size, size, dtype=dtype)
        best_s = _best(partial(torch.mm, a, a, out=out), seconds / len(gemm_sizes))
        peak = max(peak, 2 * size**3 / best_s)
    return MachineFigures(
        read_gb_s=read_bytes / read_s / 1e9,
        gemm_gflop_s=peak / 1e9,
        gemm_dtype=str(dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
    )


def _best(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of as many runs as fit, three at least."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    with torch.inference_mode():
        while len(times) < 3 or time.perf_counter() < until:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return min(times)
