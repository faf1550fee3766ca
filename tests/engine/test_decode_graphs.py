"""Buckets and keys of decode graphs; and that the recorder catches what a CUDA graph would get wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from loraplex_engine.device.graphs import (
    MAX_GRAPHS,
    Captured,
    CudaGraphBackend,
    DecodeGraphs,
    GraphKey,
    graph_keys,
    row_buckets,
)
from loraplex_engine.device.staging import Staging
from torch import Tensor

from tests.support.recorded_graph import CaptureError, RecordingBackend


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 24, 64, 65, 100, 256, 300, 512])
def test_buckets_hold_every_batch_up_to_the_largest_with_little_padding(max_rows: int) -> None:
    buckets = row_buckets(max_rows)
    graphs = DecodeGraphs(RecordingBackend(), buckets)

    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_rows
    for rows in range(1, max_rows + 1):
        padded = graphs.pad(rows)
        assert padded is not None
        assert rows <= padded <= max(2 * rows - 1, rows + 8, 9 * rows // 8 + 15)
    assert graphs.pad(max_rows + 1) is None


def test_the_buckets_of_a_large_batch_are_few_and_end_early() -> None:
    assert row_buckets(24) == (1, 2, 4, 8, 16, 24)
    assert len(row_buckets(256)) == 19
    assert row_buckets(4096)[-1] == 512


def test_every_number_of_adapters_a_step_can_have_has_a_key_and_no_other() -> None:
    keys = list(graph_keys((1, 2, 4, 8), (1, 2, 4, 8, 12)))

    assert [(key.num_rows, key.num_adapters) for key in keys] == [
        *((8, 8), (8, 4), (8, 2), (8, 1), (8, 0)),
        *((4, 4), (4, 2), (4, 1), (4, 0)),
        *((2, 2), (2, 1), (2, 0)),
        *((1, 1), (1, 0)),
    ]
    # Nine of twelve slots active: their bucket is the whole of them.
    assert GraphKey(9, 12) in set(graph_keys((9,), (1, 2, 4, 8, 12)))
    assert list(graph_keys((2, 1), ())) == [GraphKey(2, 0), GraphKey(1, 0)]


def test_the_number_of_graphs_is_bounded_and_the_smallest_steps_have_theirs() -> None:
    graphs = DecodeGraphs(RecordingBackend(), row_buckets(512), [2**i for i in range(10)])

    assert len(graphs.keys) <= MAX_GRAPHS
    assert graphs.keys[-1] == GraphKey(1, 0)


class CountingBackend:
    def capture(self, run: Callable[[], None]) -> Captured:
        class Replay:
            def replay(self) -> None:
                run()

        return Replay()


def test_a_replay_is_counted_and_what_was_not_recorded_is_refused() -> None:
    runs: list[int] = []
    graphs = DecodeGraphs(CountingBackend(), (1, 2))
    graphs.capture(GraphKey(2, 0), lambda: runs.append(2))

    assert graphs.replay(GraphKey(2, 0))
    assert not graphs.replay(GraphKey(1, 0))
    assert (graphs.replays_total, graphs.num_captured, runs) == (1, 1, [2])
    assert graphs.capture_s > 0

    graphs.forget()

    assert not graphs.replay(GraphKey(2, 0))


# ---------------------------------------------------------------------- what a recording may depend on


@triton.jit
def _add_kernel(x_ptr, y_ptr, count_ptr, fixed_count, size: tl.constexpr):
    offsets = tl.arange(0, size)
    count = tl.load(count_ptr) + fixed_count
    keep = offsets < count
    x = tl.load(x_ptr + offsets, mask=keep, other=0.0)
    y = tl.load(y_ptr + offsets)
    tl.store(y_ptr + offsets, x + y)


def test_a_replay_answers_for_what_has_been_sent_since() -> None:
    staging = Staging(torch.device("cpu"))
    values = staging.reserve("values", (8,), np.float32)
    count = staging.reserve("count", (1,), np.int32)
    staging.seal()
    out = torch.zeros(8)

    def run() -> None:
        doubled = values.device * 2
        out.copy_(doubled.view(2, 4).flip(0).reshape(-1))
        _add_kernel[(1,)](values.device, out, count.device, 0, size=8)

    graph = RecordingBackend().capture(run)
    for numbers in ([1.0, 2.0, 3.0], [5.0, 6.0, 7.0, 8.0, 9.0]):
        values.host[:] = 0
        values.put(np.asarray(numbers, np.float32))
        values.use(8)
        count.put(np.asarray([len(numbers)], np.int32))
        staging.flush()
        graph.replay()
        replayed = out.clone()
        run()
        assert torch.equal(replayed, out)
        first, second = values.host[:4], values.host[4:]
        assert out.tolist() == [*(2 * second + first), *(2 * first + second)]
    assert "triton._add_kernel" in graph.names()


def test_a_number_worked_out_while_recording_stays_what_it_was() -> None:
    length = [3]
    x, out, zero = torch.ones(8), torch.zeros(8), torch.zeros(1, dtype=torch.int32)

    def run_kernel() -> None:
        out.zero_()
        _add_kernel[(1,)](x, out, zero, length[0], size=8)

    def run_aten() -> None:
        out.copy_(x * length[0])

    for run in (run_kernel, run_aten):
        length[0] = 3
        graph = RecordingBackend().capture(run)
        recorded = out.clone()
        length[0] = 5
        run()
        eager = out.clone()
        graph.replay()
        assert torch.equal(out, recorded)
        assert not torch.equal(out, eager)


def test_a_tensor_that_moved_is_an_error_and_not_a_stale_answer() -> None:
    out = torch.zeros(4)
    inputs = [torch.from_numpy(np.ones(4, np.float32))]
    graph = RecordingBackend().capture(lambda: out.copy_(inputs[0] + 1))
    graph.replay()

    inputs[0] = torch.full((4,), 7.0)

    with pytest.raises(CaptureError, match="made before recording and is gone"):
        graph.replay()


def test_values_cannot_be_read_back_while_recording() -> None:
    x = torch.ones(3)

    with pytest.raises(CaptureError, match="reads a value back"):
        RecordingBackend().capture(lambda: x.mul_(float(x.sum())))


def test_memory_that_was_not_written_holds_nothing_to_rely_on() -> None:
    out = torch.zeros(2)
    kept: list[Tensor] = []

    def run() -> None:
        scratch = torch.empty(2)
        kept.append(scratch)
        scratch[:1] = 1.0
        out.copy_(scratch)

    graph = RecordingBackend().capture(run)
    kept[-1].fill_(5.0)
    graph.replay()

    assert out[0] == 1.0
    assert out[1].isnan()


def test_a_recording_is_not_ended_by_what_other_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders pin memory meanwhile: CUDA's default mode would refuse that, and spoil the recording."""
    modes: list[str] = []

    def graph(_: object, *, capture_error_mode: str = "global", **__: object) -> Any:
        modes.append(capture_error_mode)
        return contextlib.nullcontext()

    for name, fake in {
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": MagicMock(),
        "current_stream": MagicMock(),
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": MagicMock(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    runs: list[int] = []

    CudaGraphBackend(torch.device("cuda", 0)).capture(lambda: runs.append(len(modes)))

    assert modes == ["thread_local"]
    # Once before recording, once while.
    assert runs == [0, 1]
