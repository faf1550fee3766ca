"""Where a GPU's memory goes: what weights, adapters, a step and graphs take, and so what the KV cache may.

Measured at start, on the engine itself: the largest step that the settings allow is run once, two graphs are
recorded for trial, and what all of that leaves of the engine's share is the KV cache's. `plan_memory` is the
arithmetic, `measure_use` the trial, and `CudaMeter` reads the device.

Unit: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from loraplex_engine.device.graphs import GraphKey
from loraplex_engine.errors import ConfigError
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner
from loraplex_engine.step import NewRow, Step

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What is not the KV cache's."""

    weights: int
    lora: int = 0  # adapter slots and workspace
    # A step's metadata, outputs at fixed addresses, and the workspace of decoding's attention.
    staging: int = 0
    activations: int = 0  # at the peak of the largest step
    graphs: int = 0
    outside: int = 0  # CUDA's own, and other processes on the GPU

    @property
    def total(self) -> int:
        return (
            self.weights + self.lora + self.staging + self.activations + self.graphs + self.outside
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the device's memory is divided."""

    device_bytes: int
    budget_bytes: int  # what the engine may take, `outside` included
    use: MemoryUse
    kv_bytes: int  # what is left

    def by_use(self) -> dict[str, int]:
        """For metrics and the log: use -> bytes; `unused` is what the settings leave alone."""
        use = self.use
        return {
            "weights": use.weights,
            "lora": use.lora,
            "staging": use.staging,
            "activations": use.activations,
            "graphs": use.graphs,
            "outside": use.outside,
            "kv_cache": self.kv_bytes,
            "unused": self.device_bytes - self.budget_bytes,
        }


def plan_memory(
    *, device_bytes: int, utilization: float, use: MemoryUse, needed_kv_bytes: int
) -> MemoryPlan:
    """Give the KV cache what `use` leaves of `utilization`.

    Args:
        device_bytes: memory of the GPU.
        needed_kv_bytes: the least that is of any use.

    Raises:
        ConfigError: less than that is left; says what takes how much, and what to change.
    """
    budget = int(device_bytes * utilization)
    left = budget - use.total
    if left < needed_kv_bytes:
        taken = [
            f"{what} {_gib(size)}"
            for what, size in (
                ("weights", use.weights),
                ("adapter slots (max_loras, max_lora_rank)", use.lora),
                (
                    "the largest step (max_num_batched_tokens, max_num_seqs, num_speculative_tokens)",
                    use.activations,
                ),
                ("graphs", use.graphs),
                ("staging and attention's workspace (max_num_seqs, max_model_len)", use.staging),
                ("CUDA and other processes", use.outside),
            )
            if size
        ]
        remedies = ["raise gpu_memory_utilization"] if utilization < 1.0 else []
        if use.lora:
            remedies.append("lower max_loras or max_lora_rank")
        remedies.append(
            "lower max_num_batched_tokens, max_num_seqs, max_model_len or, with speculation,"
            " num_speculative_tokens"
        )
        if use.graphs:
            remedies.append("use --no-cuda-graphs")
        remedies.append("free the GPU of other processes, or take a larger one")
        raise ConfigError(
            f"no memory is left for the KV cache: gpu_memory_utilization {utilization:g} of"
            f" {_gib(device_bytes)} is {_gib(budget)}, and {', '.join(taken)} leave {_gib(left)}, where"
            f" {_gib(needed_kv_bytes)} are needed at least. {_sentence(remedies)}"
        )
    return MemoryPlan(device_bytes, budget, use, left)


def trial_keys(keys: Sequence[GraphKey]) -> tuple[GraphKey, GraphKey]:
    """Which graphs tell what all take: the largest, and the smallest with adapters.

    One without adapters holds fewer launches than most do.

    Args:
        keys: largest first.
    """
    return keys[0], next(key for key in keys if key.num_rows == keys[-1].num_rows)


def estimate_graphs(largest: int, another: int, count: int) -> int:
    """What `count` graphs in one pool take, from two of them.

    Args:
        largest: by how much the first one, of the largest step, filled the device: the pool and itself.
        another: by how much the next one did: it reuses the pool.
    """
    return max(largest, 0) + max(another, 0) * max(count - 1, 0) if count else 0


def largest_step(
    *,
    max_tokens: int,
    max_rows: int,
    max_len: int,
    num_slots: int,
    num_drafts: int = 0,
    sampling: SamplingParams | None = None,
) -> Step:
    """A step that takes as much memory as any: all tokens, all rows, all adapter slots, all rows and drafts sampled.

    Every sequence is written to block 0: to be run where nothing is kept there.

    Args:
        max_len: longest sequence, in tokens.
        num_drafts: most of a row; fewer where `max_tokens` leaves no more, behind a token of its own.
        num_slots: adapter slots; 0: no adapters.
        sampling: of all rows; None: greedy.
    """
    share, extra = divmod(max_tokens, max_rows)
    counts = [min(share + (row < extra), max_len) for row in range(max_rows)]
    drafts = [min(num_drafts, count - 1) for count in counts]
    sampling = sampling or SamplingParams(max_tokens=1, temperature=0.0)
    return Step(
        step_id=-1,
        freed_rows=(),
        new_rows=tuple(
            NewRow(
                row,
                (0,) * (count - guessed),
                count - guessed,
                (0,),
                row % num_slots if num_slots else -1,
                sampling,
            )
            for row, (count, guessed) in enumerate(zip(counts, drafts, strict=True))
        ),
        block_updates=(),
        rows_B=np.arange(max_rows, dtype=np.int32),
        num_computed_B=np.zeros(max_rows, np.int32),
        num_scheduled_B=np.asarray(counts, np.int32),
        samples_B=np.ones(max_rows, np.bool_),
        drafts={row: (0,) * guessed for row, guessed in enumerate(drafts) if guessed},
    )


class DeviceMeter(Protocol):
    """Reads a device's memory; all of it in bytes."""

    def device_bytes(self) -> int:
        """Of the device."""
        ...

    def taken(self) -> int:
        """By anybody."""
        ...

    def allocated(self) -> int:
        """In this process's tensors."""
        ...

    def start_peak(self) -> None:
        """Forget earlier peaks."""
        ...

    def peak(self) -> int:
        """Most that has been allocated since `start_peak`."""
        ...

    def tidy(self) -> None:
        """Give back what is allocated to no tensor, so that `taken` says what is needed."""
        ...


class CudaMeter:
    """A GPU, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def device_bytes(self) -> int:
        """See `DeviceMeter`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def taken(self) -> int:
        """See `DeviceMeter`."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def allocated(self) -> int:
        """See `DeviceMeter`."""
        return torch.cuda.memory_allocated(self._device)

    def start_peak(self) -> None:
        """See `DeviceMeter`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `DeviceMeter`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def tidy(self) -> None:
        """See `DeviceMeter`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def measure_use(
    meter: DeviceMeter,
    runner: ModelRunner,
    *,
    weights_bytes: int,
    lora_bytes: int,
    max_tokens: int,
    num_drafts: int,
    has_graphs: bool,
) -> MemoryUse:
    """Run the largest step, record two graphs for trial, and see what they take.

    Of rows that ask for log-probabilities or penalties, logits are copied on the device, unless all of the step do,
    before they come to the host. That is reckoned, as sampling thousands of rows there would take seconds.

    Args:
        runner: with a KV cache of one block meanwhile, and all else that it will keep.
        weights_bytes, lora_bytes: what is known of what it keeps.
        max_tokens: of a step.   num_drafts: most of a row in a step; 0: there are none.
        has_graphs: whether its graphs will be recorded.
    """
    limits = runner.limits
    standing = meter.allocated()
    meter.start_peak()
    step = largest_step(
        max_tokens=max_tokens,
        max_rows=limits.max_num_seqs,
        max_len=limits.max_model_len,
        # No slot holds an adapter yet. What LoRA needs besides, its backend has from the start.
        num_slots=0,
        num_drafts=num_drafts,
    )
    runner.launch(step)
    runner.collect()
    num_sampled = limits.max_num_seqs + sum(map(len, step.drafts.values()))
    of_row = runner.model.config.num_token_ids * runner.model.dtype.itemsize
    activations = meter.peak() - standing + (num_sampled - 1) * of_row
    graphs_bytes = _measure_graphs(meter, runner) if has_graphs else 0
    meter.tidy()
    return MemoryUse(
        weights=weights_bytes,
        lora=lora_bytes,
        staging=standing - weights_bytes - lora_bytes,
        activations=activations,
        graphs=graphs_bytes,
        outside=meter.taken() - meter.allocated(),
    )


def _measure_graphs(meter: DeviceMeter, runner: ModelRunner) -> int:
    graphs = runner.graphs
    if graphs is None:
        return 0
    fills = []
    for key in trial_keys(graphs.keys):
        meter.tidy()
        before = meter.taken()
        runner.forward_pass.capture(key)
        fills.append(meter.taken() - before)
    graphs.forget()
    meter.tidy()
    return estimate_graphs(fills[0], fills[1], len(graphs.keys))


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _sentence(remedies: list[str]) -> str:
    text = "; or ".join(remedies)
    return text[0].upper() + text[1:]
