"""A runner on the Triton backends over random weights, and the steps that are put through it.

The engine's own parts, put together as `loraplex_engine.compute` does, without model files, a store or a
scheduler in between: what is measured is the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from loraplex_engine.attention.setup import AttentionDevice, open_attention
from loraplex_engine.device.graphs import DecodeGraphs, GraphKey, row_buckets
from loraplex_engine.device.inputs import StagedInputs
from loraplex_engine.device.staging import Staging
from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import build_decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_engine.sampling.triton_sampler import TritonSampler
from loraplex_engine.step import NewRow, Step, StepResult
from loraplex_kernels.plans import Column, open_plans

from bench.gpu_check.adapters import SlotPool
from bench.gpu_check.machine import Machine
from bench.gpu_check.sizes import RandomWeights, shape_of

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def random_decoder(
    machine: Machine, config: ModelConfig, dtype: torch.dtype, column: Column
) -> Decoder:
    """On the machine's device, with the kernels of `column`; drawn where the model is."""
    weights = RandomWeights(machine.device, dtype, has_head=not config.is_tied)
    plans = open_plans(machine.support.name, column)
    return build_decoder(config, dtype, weights, device=machine.device, plans=plans)


@dataclass(frozen=True, slots=True)
class Room:
    """What a stand has memory for."""

    max_rows: int
    max_tokens: int  # of a step
    max_len: int  # of a row
    num_blocks: int
    num_slots: int = 0  # of adapters; 0: none, LoRA is off
    max_rank: int = 16


class Stand:
    """One runner; `pool` holds its adapters.

    Args:
        cache_of: of the same model and room for KV: both write into its cache, so what lies there means nothing.
    """

    def __init__(
        self,
        machine: Machine,
        model: Decoder,
        column: Column,
        room: Room,
        *,
        cache_of: Stand | None = None,
    ) -> None:
        plans = open_plans(machine.support.name, column)
        staging = Staging(machine.device)
        inputs = StagedInputs(staging, room.max_rows)
        sampler = TritonSampler(staging, plans, room.max_rows)
        max_tokens = model.rows_for(room.max_tokens)
        self.machine = machine
        self.room = room
        self.pool = SlotPool()
        self.lora: TritonLora | None = None
        if room.num_slots:
            self.lora = TritonLora(
                self.pool,
                shape_of(model.config),
                TritonLoraSizes(room.num_slots, room.max_rank, max_tokens, room.max_rows),
                dtype=model.dtype,
                device=machine.device,
                plans=plans,
                staging=staging,
            )
        self.attention = open_attention(
            model.attention_shape,
            num_blocks=room.num_blocks,
            block_size=BLOCK_SIZE,
            cache_dir=Path(),
            num_threads=1,
            backend="triton",
            on_device=AttentionDevice(
                device=machine.device,
                plans=plans,
                staging=staging,
                max_tokens=max_tokens,
                max_rows=room.max_rows,
                max_blocks_per_row=-(-room.max_len // BLOCK_SIZE),
            ),
        )
        sampler.reserve_large(max_tokens)
        inputs.reserve_large(max_tokens)
        staging.seal()
        self.graphs = DecodeGraphs(
            machine.graph_backend(),
            row_buckets(room.max_rows),
            self.lora.active_buckets if self.lora else (),
        )
        self.runner = ModelRunner(
            model,
            self.attention,
            RunnerLimits(room.num_blocks, BLOCK_SIZE, room.max_rows, room.max_len),
            lora=self.lora,
            slots=self.pool if self.lora else None,
            inputs=inputs,
            graphs=self.graphs,
            on_device=sampler,
        )
        if cache_of is None:
            self._warm_cache()
        else:
            assert cache_of.room.num_blocks == room.num_blocks
            self.runner.kv_layers[:] = cache_of.runner.kv_layers

    def capture(self, num_rows: int, num_adapters: int) -> None:
        """Record decoding steps of so many rows and distinct adapters."""
        bucket = 0
        if num_adapters:
            assert self.lora is not None
            bucket = next(size for size in self.lora.active_buckets if size >= num_adapters)
        padded = self.graphs.pad(num_rows)
        assert padded is not None
        self.runner.forward_pass.capture(GraphKey(padded, bucket))

    def _warm_cache(self) -> None:
        """Finite numbers in every block: rows begin in the middle of texts that nobody computed."""
        for kv in self.runner.kv_layers:
            for tensor in _tensors(kv):
                if tensor.is_floating_point():
                    tensor.normal_(std=0.3)


def _tensors(kv: object) -> list[torch.Tensor]:
    if isinstance(kv, torch.Tensor):
        return [kv]
    values = vars(kv).values() if hasattr(kv, "__dict__") else []
    if hasattr(kv, "__slots__"):
        values = [getattr(kv, name) for name in kv.__slots__]
    return [value for value in values if isinstance(value, torch.Tensor)]


@dataclass
class Rows:
    """Sequences in a runner that decode together, one token each a step.

    Args:
        prompts: one for each row.   slots: the adapters', -1: base.
        is_computed: their keys are taken for there (what lies in the cache); else the first step is the prefill.
    """

    runner: ModelRunner
    prompts: Sequence[Sequence[int]]
    slots: Sequence[int]
    num_new: int  # tokens that will be generated at most
    is_computed: bool = False
    sampling: SamplingParams = GREEDY
    results: list[StepResult] = field(default_factory=list)
    num_blocks: int = 0  # that they take, from 0 on
    _step_id: int = 0

    def step(self) -> StepResult:
        """The next step of all rows."""
        count = len(self.prompts)
        if self._step_id:
            return self.launch(*self.decoding())
        computed, scheduled = self.decoding()
        if not self.is_computed:
            computed, scheduled = 0 * scheduled, computed + 1
        return self.launch(
            computed, scheduled, freed_rows=tuple(range(count)), new_rows=self._new_rows()
        )

    def decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """(num_computed, num_scheduled), int32 by row, of a step where each decodes its next token."""
        lengths = np.asarray([len(prompt) for prompt in self.prompts], np.int32)
        return lengths - np.int32(1 - self._step_id), np.ones_like(lengths)

    def launch(
        self,
        computed: np.ndarray,
        scheduled: np.ndarray,
        *,
        freed_rows: tuple[int, ...] = (),
        new_rows: tuple[NewRow, ...] = (),
    ) -> StepResult:
        """One step of the first rows of the runner, as many as `computed` has; all of them sample."""
        count = len(computed)
        self.runner.launch(
            Step(
                step_id=self._step_id,
                freed_rows=freed_rows,
                new_rows=new_rows,
                block_updates=(),
                rows_B=np.arange(count, dtype=np.int32),
                num_computed_B=computed,
                num_scheduled_B=scheduled,
                samples_B=np.ones(count, np.bool_),
            )
        )
        self._step_id += 1
        result = self.runner.collect()
        self.results.append(result)
        return result

    def _new_rows(self) -> tuple[NewRow, ...]:
        rows, first = [], 0
        for row, (prompt, slot) in enumerate(zip(self.prompts, self.slots, strict=True)):
            num_blocks = -(-(len(prompt) + self.num_new) // BLOCK_SIZE)
            blocks = tuple(range(first, first + num_blocks))
            first += num_blocks
            rows.append(NewRow(row, tuple(prompt), len(prompt), blocks, slot, self.sampling))
        assert first <= self.runner.limits.num_blocks, f"{first} blocks are needed"
        self.num_blocks = first
        return tuple(rows)


class Arrival:
    """Prompts that come beside decoding rows, one after the other, each in the row behind theirs."""

    def __init__(self, rows: Rows, num_tokens: int, *, slot: int) -> None:
        """See `step`.

        Args:
            rows: that have run a step, in a runner with a row and blocks to spare.
            num_tokens: of the prompt.   slot: its adapter's, -1: base.
        """
        self._rows = rows
        first = rows.num_blocks
        self._blocks = tuple(range(first, first + blocks_for(1, num_tokens + 1)))
        assert self._blocks[-1] < rows.runner.limits.num_blocks
        self._prompt = tuple(3 + index % 29 for index in range(num_tokens))
        self._slot = slot

    def step(self) -> StepResult:
        """All rows decode a token, and beside them a whole prompt is computed."""
        rows, row, count = self._rows, len(self._rows.prompts), len(self._prompt)
        computed, scheduled = rows.decoding()
        newcomer = NewRow(row, self._prompt, count, self._blocks, self._slot, rows.sampling)
        return rows.launch(
            np.append(computed, np.int32(0)),
            np.append(scheduled, np.int32(count)),
            freed_rows=(row,),
            new_rows=(newcomer,),
        )


def blocks_for(batch: int, length: int) -> int:
    """Blocks of `batch` rows of so many tokens."""
    return batch * -(-length // BLOCK_SIZE)
