"""Decode by replaying recorded launches: a step costs the host one call instead of hundreds.

A graph is recorded once for each *key*: how many rows a step is padded to, and how many adapters it may have
active. Everything else that changes from step to step (tokens, positions, lengths, block tables, which row has
which adapter, the adapters' weights) lies behind device addresses that never change, so that one recording
serves every step of its key, and adapters come and go without another recording.

Rows beyond the step's own are padding: they belong to no sequence and have no adapter, and write nowhere.

Recording is done at start, the largest first, so that the smaller ones reuse the memory of one pool. What has
no graph (prefill, drafts, more rows than the largest bucket) runs eagerly, with the same kernels.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

# Padding costs little where decoding is bound by reading the weights, which it does once for all rows; so
# buckets grow with the batch.
_SMALL: Final = (1, 2, 4, 8)
_STEPS: Final = ((64, 8), (128, 16), (512, 32))  # up to so many rows, in steps of so many
MAX_ROWS: Final = 512  # with more, a step takes the device longer than its launches take the host
# Recording takes tens of milliseconds and a graph some megabytes.
MAX_GRAPHS: Final = 256


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """What a recording depends on."""

    num_rows: int  # padding counted
    num_adapters: int  # a bucket of the LoRA backend's; 0: no row has one


class Captured(Protocol):
    """A recording."""

    def replay(self) -> None:
        """Launch all of it again, on the current stream."""
        ...


class GraphBackend(Protocol):
    """Records launches."""

    def capture(self, run: Callable[[], None]) -> Captured:
        """Record what `run` launches. `run` is called at least once before, to warm up.

        What it reads from outside must stay where it is for as long as the recording is used; what it
        allocates is the recording's own, and may be overwritten by the replay of another one.
        """
        ...


class CudaGraphBackend:
    """CUDA graphs, all in one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stub

    def capture(self, run: Callable[[], None]) -> Captured:
        """See `GraphBackend.capture`."""
        # Outside of the recording first: Triton compiles and cuBLAS makes its workspace, which may not
        # happen inside.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: a loader may pin an adapter's memory meanwhile, which is none of the recording's
        # business and would end a "global" one.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """The row counts that decoding steps are padded to, ascending; the last is `max_rows`, or `MAX_ROWS`."""
    last = min(max_rows, MAX_ROWS)
    buckets = [*_SMALL]
    for limit, width in _STEPS:
        while buckets[-1] < limit:
            buckets.append(buckets[-1] + width)
    return (*(rows for rows in buckets if rows < last), last)


def graph_keys(rows: Sequence[int], adapters: Sequence[int]) -> Iterator[GraphKey]:
    """Every key that a step can have, largest first.

    Args:
        rows: see `row_buckets`.
        adapters: the LoRA backend's buckets, ascending, without 0; empty: there are no adapters.
    """
    for num_rows in sorted(rows, reverse=True):
        # A step has no more adapters than rows: of the buckets from there on it can only need the first.
        useful = adapters[: bisect.bisect_left(adapters, num_rows) + 1]
        for num_adapters in (*reversed(useful), 0):
            yield GraphKey(num_rows, num_adapters)


class DecodeGraphs:
    """The recordings of one runner."""

    def __init__(
        self, backend: GraphBackend | None, rows: Sequence[int], adapters: Sequence[int] = ()
    ) -> None:
        """For the keys of `graph_keys`; beyond `MAX_GRAPHS` of them the largest steps run eagerly.

        Those gain the least: their time is the device's, not the host's.

        Args:
            backend: None: nothing is recorded; steps are padded all the same, and compute the same bits.
        """
        self._backend = backend
        self._rows = sorted(rows)
        self.keys: Final = tuple(graph_keys(rows, adapters))[-MAX_GRAPHS:]
        self._captured: dict[GraphKey, Captured] = {}
        self.replays_total = 0
        self.eager_total = 0  # steps that ran without a recording
        self.capture_s = 0.0

    @property
    def max_rows(self) -> int:
        """Of the largest bucket."""
        return self._rows[-1]

    @property
    def num_captured(self) -> int:
        """Recordings that there are."""
        return len(self._captured)

    def pad(self, num_rows: int) -> int | None:
        """The bucket for a decoding step of so many rows; None: it is larger than any."""
        place = bisect.bisect_left(self._rows, num_rows)
        return self._rows[place] if place < len(self._rows) else None

    def capture(self, key: GraphKey, run: Callable[[], None]) -> float:
        """Record `run` for `key`, in place of an older recording; returns the seconds it took."""
        assert key in self.keys
        assert self._backend is not None, "there is nothing to record with"
        started = time.perf_counter()
        self._captured[key] = self._backend.capture(run)
        seconds = time.perf_counter() - started
        self.capture_s += seconds
        return seconds

    def forget(self) -> None:
        """Drop every recording: what they read is about to move."""
        self._captured.clear()

    def replay(self, key: GraphKey) -> bool:
        """Replay what was recorded for `key`; False: nothing was, the caller is to run the step itself."""
        captured = self._captured.get(key)
        if captured is None:
            return False
        captured.replay()
        self.replays_total += 1
        return True
