"""What continuous batching replaced: batches that run to their end.

static: waits for a full batch (or the trace's end); dynamic: waits for a full batch or, from its first
request on, for `window_s`. Both then compute all prompts, padded to the longest, and go on until the
longest answer is done: a row whose answer is complete is computed all the same, and nobody gets in.
First come, first served. The cost model is the same as for continuous batching.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from bench.simulation.continuous import Replay
from bench.simulation.costs import CostModel
from bench.simulation.outcomes import Objectives, Recorder
from bench.simulation.traces import Arrival


def replay(
    arrivals: Sequence[Arrival],
    costs: CostModel,
    objectives: Objectives,
    *,
    batch_size: int,
    max_waiting: int,
    window_s: float | None,
) -> Replay:
    """Run a trace.

    Args:
        window_s: None: static.
    """
    recorder = Recorder(objectives)
    queue: deque[int] = deque()
    now_s, num_steps, next_index = 0.0, 0, 0
    while next_index < len(arrivals) or queue:
        start_s = _start_s(arrivals, queue, next_index, now_s, batch_size, window_s)
        while next_index < len(arrivals) and arrivals[next_index].at_s <= start_s:
            recorder.sent(next_index, arrivals[next_index].tenant, arrivals[next_index].at_s)
            if len(queue) < max_waiting:
                queue.append(next_index)
            else:
                recorder.refused(next_index)
            next_index += 1
        now_s = max(now_s, start_s)
        batch = [queue.popleft() for _ in range(min(batch_size, len(queue)))]
        width = max(arrivals[index].prompt_tokens for index in batch)
        num_computed = np.zeros(len(batch), dtype=np.int64)
        num_scheduled = np.full(len(batch), width)
        for position in range(max(arrivals[index].output_tokens for index in batch)):
            now_s += costs.step_s(num_computed, num_scheduled)
            num_steps += 1
            num_computed, num_scheduled = num_computed + num_scheduled, np.ones_like(num_computed)
            for index in batch:
                if position < arrivals[index].output_tokens:
                    is_last = position + 1 == arrivals[index].output_tokens
                    recorder.token(index, now_s, is_last=is_last)
    return Replay(recorder.reports(now_s), elapsed_s=now_s, num_steps=num_steps)


def _start_s(
    arrivals: Sequence[Arrival],
    queue: deque[int],
    next_index: int,
    now_s: float,
    batch_size: int,
    window_s: float | None,
) -> float:
    """When the next batch begins, with nothing running from `now_s` on."""
    missing = batch_size - len(queue)
    if missing <= 0:
        return now_s
    last = next_index + missing - 1  # its arrival makes the batch full
    if window_s is None:
        return max(now_s, arrivals[min(last, len(arrivals) - 1)].at_s)
    full_s = arrivals[last].at_s if last < len(arrivals) else math.inf
    first = queue[0] if queue else next_index
    return max(now_s, min(full_s, arrivals[first].at_s + window_s))
