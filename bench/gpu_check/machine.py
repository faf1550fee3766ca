"""The machine that is measured: clocks, graphs and facts. A GPU, or for a rehearsal a CPU that plays one.

Everything that differs between the two is here: the parts have no `if cuda`.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from loraplex_engine.device.graphs import Captured, CudaGraphBackend, GraphBackend
from loraplex_engine.device.memory_profile import CudaMeter, DeviceMeter
from loraplex_kernels.support import Support, support_of

# What raises the clocks: products of square matrices.
_LOAD_S = 0.5
_LOAD_SIDE = 4096
_RUNS_PER_GRAPH = 8
# About half a millisecond: longer than the launch of a graph takes the host.
_SLEEP_CYCLES = 1_000_000


class Machine(Protocol):
    """What the parts ask of it."""

    device: torch.device
    is_rehearsal: bool

    @property
    def support(self) -> Support:
        """Its architecture; plans are those of `support.name`."""
        ...

    def synchronize(self) -> None:
        """Wait for all launches."""
        ...

    def warm(self) -> None:
        """Load the device for half a second, so that what is measured next finds its clocks raised."""
        ...

    def time_us(self, run: Callable[[], object], repeats: int) -> float:
        """Median device microseconds of `run`, launched about `repeats` times after it has warmed up."""
        ...

    def graph_backend(self) -> GraphBackend:
        """Records decoding steps."""
        ...

    def meter(self) -> DeviceMeter:
        """Reads the device's memory."""
        ...

    def facts(self) -> dict[str, str]:
        """Name, driver, clocks under load and versions, for the head of the table."""
        ...


class CudaMachine:
    """The first GPU."""

    is_rehearsal = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.support = support_of(self.device)

    def synchronize(self) -> None:
        """See `Machine`."""
        torch.cuda.synchronize()

    def warm(self) -> None:
        """See `Machine`."""
        side = torch.ones(_LOAD_SIDE, _LOAD_SIDE, device=self.device, dtype=torch.bfloat16)
        until = time.monotonic() + _LOAD_S
        while time.monotonic() < until:
            for _ in range(20):
                torch.mm(side, side)
            torch.cuda.synchronize()

    def time_us(self, run: Callable[[], object], repeats: int) -> float:
        """See `Machine`. From a graph that holds `run` several times, so that no launch of the host is in it."""

        def run_often() -> None:
            for _ in range(_RUNS_PER_GRAPH):
                run()

        graph = self.graph_backend().capture(run_often)
        graph.replay()
        times = []
        for _ in range(max(3, repeats // _RUNS_PER_GRAPH)):
            begin, end = (_event() for _ in range(2))
            # On an idle GPU the first event would be over 10 microseconds before the graph's launch arrives.
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # torch's stub
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3 / _RUNS_PER_GRAPH)
        return statistics.median(times)

    def graph_backend(self) -> GraphBackend:
        """See `Machine`."""
        return CudaGraphBackend(self.device)

    def meter(self) -> DeviceMeter:
        """See `Machine`."""
        return CudaMeter(self.device)

    def facts(self) -> dict[str, str]:
        """See `Machine`."""
        import triton

        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "memory_gib": f"{properties.total_memory / 2**30:.0f}",
            "arch": self.support.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
            **self._clocks_under_load(),
        }

    def _clocks_under_load(self) -> dict[str, str]:
        # Idle clocks say nothing of those that are measured with.
        self.warm()
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(_nvidia_smi)
            while not asked.done():
                self.warm()
            return asked.result()


class RehearsalMachine:
    """A CPU with Triton's interpreter; times are the host's and mean nothing."""

    is_rehearsal = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.support = support_of(self.device)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def warm(self) -> None:
        """A CPU's clocks are not measured."""

    def time_us(self, run: Callable[[], object], repeats: int) -> float:
        """Of one run: the interpreter takes its time."""
        del repeats
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6

    def graph_backend(self) -> GraphBackend:
        """What was to be recorded is run again."""
        return _Rerun()

    def meter(self) -> DeviceMeter:
        """Every step seems to take the same."""
        return _NoMeter()

    def facts(self) -> dict[str, str]:
        """See `Machine`."""
        return {
            "gpu": "none: a rehearsal, its figures mean nothing",
            "torch": torch.__version__,
        }


class _NoMeter:
    """Nobody counts a CPU's memory."""

    def device_bytes(self) -> int:
        return 1 << 20

    def taken(self) -> int:
        return 0

    def allocated(self) -> int:
        return 0

    def start_peak(self) -> None:
        """Nothing is counted."""

    def peak(self) -> int:
        return 1 << 10

    def tidy(self) -> None:
        """Nothing is kept."""


class _Rerun:
    def capture(self, run: Callable[[], None]) -> Captured:
        return _Again(run)


@dataclass(frozen=True)
class _Again:
    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's stub


def median_wall_s(run: Callable[[], object], repeats: int) -> float:
    """Median host seconds of something that waits for its own end."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


_SMI_FIELDS: Sequence[str] = (
    "driver_version",
    "clocks.current.sm",
    "clocks.current.memory",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
)


def _nvidia_smi() -> dict[str, str]:
    """Driver and clocks; what cannot be asked is said."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {"driver": "unknown: there is no nvidia-smi"}
    query = [command, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver": f"unknown: {type(error).__name__}"}
    return dict(zip(_SMI_FIELDS, map(str.strip, done.stdout.strip().split(",")), strict=False))
