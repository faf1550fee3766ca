"""Paged attention by the Triton kernels: on a GPU, or interpreted on a CPU.

A step's metadata (where its tokens go, which rows attend what, block tables) is written to the staging buffer
and goes up in its one copy; every launch reads it from there, so a step recorded in a CUDA graph holds for any
lengths.

Which kernel: in the `fast` column sequences with one token take the decode kernel, the others the prefill kernel.
The two do not sum in the same order, and how many tokens of a sequence a step has is up to its neighbours, to what
was found in the prefix cache, to preemption and to drafts. So in the `invariant` column the position decides: the
prompt's take the prefill kernel, be it for one of them, and all later ones the decode kernel, one by one.

A layer's cache is (2, num_blocks, kv heads, block_size, D), in the model's dtype, int8 or fp8. Nothing is
written for padding rows, and their output is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from loraplex_kernels import kv_blocks, paged_decode, paged_prefill, rope_kv
from loraplex_kernels.paged_decode import Splitting
from loraplex_kernels.paged_tile import MAX_HEAD_DIM, QUANTIZED
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import dtype_name, support_of
from torch import Tensor

from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.device.staging import Staging

# Decode steps are padded by up to this many rows, whatever pads them.
_PADDING = 64


@dataclass(frozen=True, slots=True)
class PagedKv:
    """One layer's cache."""

    numbers: Tensor  # (2, num_blocks, kv heads, block_size, D)
    scale: Tensor | None  # (2, num_blocks, kv heads, block_size) fp32 for int8 and fp8


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What Python must know of a step to launch it; all else is staged."""

    num_rows: int
    num_tokens: int
    num_entries: int  # of the decode kernel; 0: no launch
    num_tasks: int  # of the prefill kernel; 0: no launch
    # The decode kernel writes every row, padding rows too.
    covers_padding: bool
    rotate: Plan
    decode: Plan
    prefill: Plan


class TritonAttention:
    """`AttentionBackend` of the GPU."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        device: torch.device,
        plans: PlanTable,
        staging: Staging,
        max_tokens: int,
        max_rows: int,
        max_blocks_per_row: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Reserve room for a step's metadata and allocate the decode kernel's workspace.

        Args:
            max_tokens: rows of a step, padding counted.   max_rows: sequences of a step.
            max_blocks_per_row: of the longest sequence.
            kv_dtype: int8 or float8_e4m3fn: keys and values are kept in it; None: in the model's dtype.
        Raises:
            ValueError: a shape that the kernels do not have.
            loraplex_kernels.support.UnsupportedDeviceError: a dtype that the device or the kernels do not have.
        """
        kv_name = dtype_name(kv_dtype or shape.dtype)
        support_of(device).check(kv_name)
        if kv_dtype not in (None, shape.dtype) and kv_name not in QUANTIZED:
            raise ValueError(f"kv_dtype {kv_dtype}: use int8, float8_e4m3fn or the model's dtype")
        if shape.head_dim % 16 or shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim {shape.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
            )
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size {block_size} is not a power of two")
        self.name = f"triton-{kv_name}" if kv_name in QUANTIZED else "triton"
        self._shape = shape
        self._block_size = block_size
        self._device = device
        self._plans = plans
        self.splits_prompts = plans.column == "invariant"
        self._kv_dtype = kv_dtype or shape.dtype
        self._max_length = max_blocks_per_row * block_size
        # Of a launch: the workspace has room for no more.
        self._max_entries = min(max_rows + _PADDING, max(max_tokens, max_rows))
        least = min(
            self._queries_per_task(entry.plan)
            for entry in plans.entries(paged_prefill.KERNEL)
            if entry.when.dtype in (None, dtype_name(shape.dtype))
        )
        max_tasks = max_tokens // least + max_rows
        # What is small first: each step copies everything up to the last byte it uses.
        most = max(max_tokens, self._max_entries) if self.splits_prompts else self._max_entries
        self._entry = staging.reserve("attention_entry", (most, 4), np.int32)
        self._task = staging.reserve("attention_task", (max_tasks, 4), np.int32)
        self._slot = staging.reserve("attention_slot", (max_tokens,), np.int32)
        self._table = staging.reserve("attention_table", (max_rows * max_blocks_per_row,), np.int32)
        self._workspace = torch.empty(self._workspace_size(), dtype=torch.float32, device=device)

    def _queries_per_task(self, plan: Plan) -> int:
        return paged_prefill.queries_per_task(
            plan, num_heads=self._shape.num_heads, num_kv_heads=self._shape.num_kv_heads
        )

    def _workspace_size(self) -> int:
        """Of the decode step that needs most."""
        return max(
            Splitting.of(self._decode_plan(rows), self._max_length).workspace_size(
                rows, self._shape.num_heads, self._shape.head_dim
            )
            for rows in range(1, self._max_entries + 1)
        )

    def _decode_plan(self, num_entries: int) -> Plan:
        return self._plans.choose(
            paged_decode.KERNEL,
            phase="decode",
            # What there is to fill the GPU with before rows are split.
            tokens=num_entries * self._shape.num_kv_heads,
            k=self._shape.head_dim,
            n=self._kv_dtype.itemsize,
            dtype=dtype_name(self._shape.dtype),
        )

    # ------------------------------------------------------------------ the cache

    def allocate_kv(self, num_blocks: int) -> PagedKv:
        shape = (2, num_blocks, self._shape.num_kv_heads, self._block_size, self._shape.head_dim)
        scale = None
        if self._kv_dtype != self._shape.dtype:
            scale = torch.empty(shape[:4], dtype=torch.float32, device=self._device)
        return PagedKv(torch.empty(shape, dtype=self._kv_dtype, device=self._device), scale)

    def kv_bytes_per_block(self) -> int:
        return self._block_size * self._shape.kv_bytes_per_token(self._kv_dtype)

    def copy_blocks(self, kv: PagedKv, source: Tensor, target: Tensor) -> None:
        plan = self._plans.choose(kv_blocks.KERNEL, phase="decode", tokens=len(source))
        kv_blocks.copy_blocks(kv.numbers, source, target, plan)
        if kv.scale is not None:
            kv_blocks.copy_blocks(kv.scale, source, target, plan)

    # ------------------------------------------------------------------ once per step

    def prepare(self, batch: AttentionBatch) -> TritonPlan:
        """Write the step's metadata to the staging buffer; whoever owns that flushes it."""
        computed, scheduled = batch.num_computed_B, batch.num_scheduled_B
        num_rows, num_sequences = batch.num_rows, len(scheduled)
        start_B = np.cumsum(scheduled) - scheduled
        num_tokens = int(scheduled.sum())
        assert scheduled.all(), "a sequence without tokens"
        has_several = num_tokens > num_sequences
        self._stage_slots(batch, start_B, num_tokens, has_several=has_several)

        prefilled_B = self._prefilled(batch)
        prompts = np.flatnonzero(prefilled_B)
        sequence_N, place_N = _one_by_one(scheduled - prefilled_B)
        place_N += prefilled_B[sequence_N]
        num_singles = len(sequence_N)

        end_B = computed + scheduled
        width = -(-int(end_B.max(initial=0)) // self._block_size)
        self._table.put(batch.block_table_BM[:, :width])
        covers_padding = not len(prompts) and num_rows <= self._max_entries
        num_entries = num_rows if covers_padding else num_singles
        entries = self._entry.host[:num_entries]
        entries[num_singles:, 0] = np.arange(num_singles, num_entries)
        entries[num_singles:, 1:] = 0
        entries[:num_singles, 0] = start_B[sequence_N] + place_N
        entries[:num_singles, 1] = computed[sequence_N] + place_N + 1
        entries[:num_singles, 2] = sequence_N * width
        self._entry.use(num_entries * 4)

        dtype = dtype_name(self._shape.dtype)
        prefill = self._plans.choose(
            paged_prefill.KERNEL,
            phase="prefill",
            tokens=num_tokens,
            k=self._shape.head_dim,
            n=self._kv_dtype.itemsize,
            dtype=dtype,
        )
        return TritonPlan(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_entries=num_entries,
            num_tasks=self._stage_tasks(batch, prefilled_B, start_B, width, prefill),
            covers_padding=covers_padding,
            rotate=self._plans.choose(
                rope_kv.KERNEL,
                phase="prefill" if has_several else "decode",
                tokens=num_rows,
                k=self._shape.head_dim,
                dtype=dtype,
            ),
            decode=self._decode_plan(min(max(1, num_entries), self._max_entries)),
            prefill=prefill,
        )

    def _prefilled(self, batch: AttentionBatch) -> np.ndarray:
        """By sequence, how many of its tokens, from the first on, the prefill kernel takes."""
        scheduled = batch.num_scheduled_B
        if not self.splits_prompts or batch.num_prompt_B is None:
            return np.where(scheduled > 1, scheduled, 0)
        prefilled_B: np.ndarray = np.clip(batch.num_prompt_B - batch.num_computed_B, 0, scheduled)
        return prefilled_B

    def _stage_slots(
        self, batch: AttentionBatch, start_B: np.ndarray, num_tokens: int, *, has_several: bool
    ) -> None:
        """Where each token's keys go; padding rows nowhere."""
        scheduled, computed = batch.num_scheduled_B, batch.num_computed_B
        sequence_T = np.arange(len(scheduled))
        position_T = computed
        if has_several:
            sequence_T = np.repeat(sequence_T, scheduled)
            position_T = np.arange(num_tokens) - (start_B - computed)[sequence_T]
        slot = self._slot.host[: batch.num_rows]
        block_T = batch.block_table_BM[sequence_T, position_T // self._block_size]
        slot[:num_tokens] = block_T * self._block_size + position_T % self._block_size
        slot[num_tokens:] = -1
        self._slot.use(batch.num_rows)

    def _stage_tasks(
        self,
        batch: AttentionBatch,
        prefilled_B: np.ndarray,
        start_B: np.ndarray,
        width: int,
        plan: Plan,
    ) -> int:
        several = np.flatnonzero(prefilled_B)
        if not len(several):
            return 0
        most = self._queries_per_task(plan)
        scheduled, computed = prefilled_B[several], batch.num_computed_B[several]
        tasks_S = -(-scheduled // most)
        of_task = np.repeat(np.arange(len(several)), tasks_S)
        first = (np.arange(len(of_task)) - (np.cumsum(tasks_S) - tasks_S)[of_task]) * most
        count = np.minimum(most, scheduled[of_task] - first)
        position = computed[of_task] + first
        # The longest first: the last programs to finish decide, and short ones fill their gaps.
        order = np.argsort(-(position + count), kind="stable")
        tasks = self._task.host[: len(of_task)]
        tasks[:, 0] = (start_B[several][of_task] + first)[order]
        tasks[:, 1] = count[order]
        tasks[:, 2] = position[order]
        tasks[:, 3] = (several[of_task] * width)[order]
        self._task.use(tasks.size)
        return len(tasks)

    # ------------------------------------------------------------------ once per layer

    def rotate_and_write(
        self, qkv_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: PagedKv, plan: TritonPlan
    ) -> None:
        """As the protocol says, but the keys in `qkv_TC` stay unrotated: they are in the cache."""
        rope_kv.rope_kv(
            qkv_TC,
            cos_T1D,
            sin_T1D,
            self._slot.device[: plan.num_rows],
            kv.numbers,
            plan.rotate,
            num_heads=self._shape.num_heads,
            scale=kv.scale,
        )

    def forward(self, qkv_TC: Tensor, kv: PagedKv, plan: TritonPlan) -> Tensor:
        shape = self._shape
        out_TW = qkv_TC.new_empty(plan.num_rows, shape.q_size)
        if not plan.covers_padding:
            out_TW[plan.num_tokens :].zero_()
        # Several launches only where drafts, or what was sampled before a preemption, are more than the
        # workspace has room for: such steps are not recorded.
        for first in range(0, plan.num_entries, self._max_entries):
            last = min(first + self._max_entries, plan.num_entries)
            paged_decode.paged_decode(
                qkv_TC,
                kv.numbers,
                self._entry.device[first:last],
                self._table.device,
                out_TW,
                self._workspace,
                plan.decode,
                num_heads=shape.num_heads,
                max_length=self._max_length,
                scale=kv.scale,
                window=shape.window,
                soft_cap=shape.soft_cap,
            )
        if plan.num_tasks:
            paged_prefill.paged_prefill(
                qkv_TC,
                kv.numbers,
                self._task.device[: plan.num_tasks],
                self._table.device,
                out_TW,
                plan.prefill,
                num_heads=shape.num_heads,
                scale=kv.scale,
                window=shape.window,
                soft_cap=shape.soft_cap,
            )
        return out_TW


def _one_by_one(count_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts (2, 0, 1): whose each is (0, 0, 2), and its place among that one's (0, 1, 0)."""
    owner_N = np.repeat(np.arange(len(count_B)), count_B)
    return owner_N, np.arange(len(owner_N)) - (np.cumsum(count_B) - count_B)[owner_N]
