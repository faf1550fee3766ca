"""What this machine can do at most, measured: the floors that a step is held against."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.linear import LinearKernel, list_arithmetics

from loraplex_engine.errors import EngineError
from loraplex_engine.numerics_environment import unlimited_environment

_READ_BYTES = 256 * 1024**2  # or twice the largest cache
_MAX_READ_SHARE = 4  # one part in so many of the memory that is free now: a cache may be the host's, which many share
_PART_BYTES = 32 * 1024**2  # of the weights that a product reads, which are made at once
_GEMM_SIZES = (768, 1536)
_ROW_INPUTS = 1024  # of the product of one row that reads
_SECONDS = 1.0  # for each of the two, and routine
_CHILD_LIMIT_S = 120.0  # of a child that multiplies; most of its time is the import of torch


class MachineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bests of several runs, over all threads."""

    read_gb_s: float  # memory, read only
    gemm_gflop_s: float
    gemm_dtype: str
    num_threads: int

    def at_least(self, other: MachineFigures) -> MachineFigures:
        """Of each figure the higher: what else ran meanwhile can only have lowered one."""
        return msgspec.structs.replace(
            self,
            read_gb_s=max(self.read_gb_s, other.read_gb_s),
            gemm_gflop_s=max(self.gemm_gflop_s, other.gemm_gflop_s),
        )


def measure_machine(
    dtype: torch.dtype,
    *,
    kernel_dir: Path | None = None,
    read_bytes: int | None = None,
    gemm_sizes: tuple[int, ...] = _GEMM_SIZES,
    seconds: float = _SECONDS,
) -> MachineFigures:
    """Read a large buffer, and multiply square matrices of `dtype`, for about `seconds` each and routine.

    The best routine counts, torch's or ours, and its best run: other processes only make one slower. Where the
    engine keeps oneDNN from AMX, torch's bf16 product is that of a child with all that the CPU has.

    Args:
        kernel_dir: for compiled kernels. None, or no compiler: torch alone is tried.
        read_bytes: None: more than the caches hold, as far as a quarter of the free memory goes.

    Raises:
        EngineError: the child failed.
    """
    if read_bytes is None:
        free = psutil.virtual_memory().available
        read_bytes = min(max(_READ_BYTES, 2 * _cache_bytes()), free // _MAX_READ_SHARE)
    kernel = None if kernel_dir is None else _open_kernel(dtype, kernel_dir)
    return MachineFigures(
        read_gb_s=read_bytes / _read_s(read_bytes, kernel, seconds) / 1e9,
        gemm_gflop_s=max(_products(dtype, kernel, gemm_sizes, seconds)) / 1e9,
        gemm_dtype=str(dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
    )


def _open_kernel(dtype: torch.dtype, kernel_dir: Path) -> LinearKernel | None:
    try:
        arithmetic = list_arithmetics(dtype, kernel_dir)[0]
        return LinearKernel(
            cache_dir=kernel_dir, num_threads=torch.get_num_threads(), arithmetic=arithmetic
        )
    except NativeBuildError:
        return None


def _read_s(num_bytes: int, kernel: LinearKernel | None, seconds: float) -> float:
    """The least that reading so many bytes once takes."""
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32)
    ways: list[Callable[[], object]] = [numbers.sum, numbers.amax]
    best = min(_best(way, seconds / len(ways)) for way in ways)
    del numbers, ways
    if kernel is not None:
        # One row's products read their weights once, from large pages.
        part_bytes = min(num_bytes, _PART_BYTES)
        num_inputs = min(_ROW_INPUTS, part_bytes // 2)
        weight = torch.ones(part_bytes // 2 // num_inputs, num_inputs, dtype=torch.bfloat16)
        parts = [kernel.pack(weight) for _ in range(num_bytes // part_bytes)]
        del weight
        row = torch.ones(1, num_inputs, dtype=parts[0].row_dtypes[0])

        def multiply() -> None:
            for part in parts:
                kernel.forward(row, part)

        taken = _best(multiply, seconds)
        best = min(best, taken * num_bytes / sum(part.num_bytes for part in parts))
    return best


def _products(
    dtype: torch.dtype, kernel: LinearKernel | None, sizes: tuple[int, ...], seconds: float
) -> Iterator[float]:
    """FLOP/s of each routine and size."""
    environment = unlimited_environment() if dtype == torch.bfloat16 else None
    if environment is not None:
        yield _unlimited_product(dtype, sizes, seconds, environment)
    for size in sizes:
        a, out = torch.ones(size, size, dtype=dtype), torch.empty(size, size, dtype=dtype)
        routines: list[Callable[[], object]] = []
        if environment is None:
            routines.append(partial(torch.mm, a, a, out=out))
        if kernel is not None:
            routines.append(partial(kernel.forward, a, kernel.pack(a)))
        for routine in routines:
            yield 2 * size**3 / _best(routine, seconds / len(sizes))


def _unlimited_product(
    dtype: torch.dtype, sizes: tuple[int, ...], seconds: float, environment: dict[str, str]
) -> float:
    """FLOP/s of torch's routine at its best size, in a child with that environment."""
    command = [sys.executable, "-m", __name__, str(dtype).removeprefix("torch."), str(seconds)]
    command += [str(torch.get_num_threads()), *map(str, sizes)]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_CHILD_LIMIT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or ""
        raise EngineError(
            f"measuring torch's product in a process of its own: {error} {said[-500:]}"
        ) from error
    return float(done.stdout)


def _main(dtype: str, seconds: str, num_threads: str, *sizes: str) -> None:
    """What such a child does."""
    torch.set_num_threads(int(num_threads))
    best = max(_products(getattr(torch, dtype), None, tuple(map(int, sizes)), float(seconds)))
    print(best)  # noqa: T201


def _cache_bytes() -> int:
    """Of the largest cache that a CPU here sees; 0: Linux does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)


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


if __name__ == "__main__":
    _main(*sys.argv[1:])
