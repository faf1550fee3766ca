"""Attention and adapters in plain torch that can be recorded: all that changes from step to step is staged.

Slow and simple stands-in for the Triton backends, for tests of what surrounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.device.staging import Staging
from loraplex_engine.lora.seam import LoraBatch, LoraSite
from loraplex_engine.model.rope import rotate_merged_
from loraplex_engine.step import Int32Array
from torch import Tensor


@dataclass(frozen=True)
class StagedPlan:
    """Python's part of a step: what a recording depends on, and one thing that it must not."""

    num_rows: int
    longest: int  # keys of the longest sequence of this step


class StagedAttention:
    """Looks at every block that a row may have, and selects.

    Args:
        bakes_in: make the mistake that recordings are tested for: cut the keys where this step's longest
            sequence ends.
    """

    name = "staged"
    splits_prompts = False

    def __init__(
        self,
        shape: AttentionShape,
        staging: Staging,
        *,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        max_blocks_per_row: int,
        bakes_in: bool = False,
    ) -> None:
        self._shape = shape
        self._block_size = block_size
        self._bakes_in = bakes_in
        self._row_T = staging.reserve("row_T", (max_tokens,), np.int64)
        self._slot_T = staging.reserve("slot_T", (max_tokens,), np.int64)
        self._length_T = staging.reserve("length_T", (max_tokens,), np.int64)
        self._table = staging.reserve("table", (max_rows + 1, max_blocks_per_row), np.int64)
        self._offset = torch.arange(block_size)

    def allocate_kv(self, num_blocks: int) -> Tensor:
        """One block more than there are, for padding; NaN, as nothing is written yet."""
        shape = self._shape
        size = ((num_blocks + 1) * self._block_size, 2, shape.num_kv_heads, shape.head_dim)
        self._nowhere = num_blocks * self._block_size
        return torch.full(size, float("nan"), dtype=shape.dtype)

    def kv_bytes_per_block(self) -> int:
        return self._block_size * self._shape.kv_bytes_per_token()

    def copy_blocks(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        blocks = kv.view(-1, self._block_size, *kv.shape[1:])
        blocks.index_copy_(0, target, blocks.index_select(0, source))

    def prepare(self, batch: AttentionBatch) -> StagedPlan:
        scheduled, num_rows = batch.num_scheduled_B, batch.num_rows
        row_T = np.repeat(np.arange(len(scheduled)), scheduled)
        start_B = np.cumsum(scheduled) - scheduled
        position_T = np.arange(len(row_T)) - (start_B - batch.num_computed_B)[row_T]
        table = batch.block_table_BM
        slots = self._slot_T.host[:num_rows]
        slots[:] = self._nowhere
        block_T = table[row_T, position_T // self._block_size]
        slots[: len(row_T)] = block_T * self._block_size + position_T % self._block_size
        self._row_T.host[:num_rows] = len(self._table.host) - 1
        self._row_T.host[: len(row_T)] = row_T
        self._length_T.host[:num_rows] = 0
        self._length_T.host[: len(row_T)] = position_T + 1
        self._table.host[: len(table), : table.shape[1]] = table
        for staged in (self._row_T, self._slot_T, self._length_T):
            staged.use(num_rows)
        self._table.use(self._table.size)
        return StagedPlan(num_rows, int(position_T.max(initial=0)) + 1)

    def rotate_and_write(
        self, qkv_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: Tensor, plan: StagedPlan
    ) -> None:
        shape = self._shape
        rotate_merged_(qkv_TC, shape.num_heads + shape.num_kv_heads, cos_T1D, sin_T1D)
        kv_T2HD = qkv_TC[:, shape.q_size :].reshape(-1, 2, shape.num_kv_heads, shape.head_dim)
        kv.index_copy_(0, self._slot_T.device[: plan.num_rows], kv_T2HD)

    def forward(self, qkv_TC: Tensor, kv: Tensor, plan: StagedPlan) -> Tensor:
        shape, num_rows = self._shape, plan.num_rows
        table_TM = self._table.device.index_select(0, self._row_T.device[:num_rows])
        slot_TN = (table_TM[:, :, None] * self._block_size + self._offset).flatten(1)
        if self._bakes_in:
            slot_TN = slot_TN[:, : plan.longest]
        kv_TN2HD = kv[slot_TN]
        is_seen_TN = torch.arange(slot_TN.shape[1]) < self._length_T.device[:num_rows, None]
        kv_TN2HD = torch.where(is_seen_TN[:, :, None, None, None], kv_TN2HD, 0)
        k, v = (
            part.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=2)
            for part in kv_TN2HD.unbind(2)
        )
        q_THD = qkv_TC[:, : shape.q_size].view(num_rows, shape.num_heads, shape.head_dim)
        scores = torch.einsum("thd,tnhd->thn", q_THD, k) * shape.head_dim**-0.5
        scores = scores.masked_fill(~is_seen_TN[:, None, :], float("-inf"))
        is_row_T = self._length_T.device[:num_rows] > 0
        weights = torch.where(is_row_T[:, None, None], scores.softmax(-1), 0)
        return torch.einsum("thn,tnhd->thd", weights, v).reshape(num_rows, -1)


@dataclass(frozen=True)
class StagedLoraBatch:
    slots: tuple[int, ...]
    num_rows: int
    of_head: bool


class StagedLora:
    """`CapturableLora` whose adapters add a number of their own everywhere, and to the head where `heads`."""

    def __init__(
        self, staging: Staging, *, num_slots: int, max_tokens: int, heads: tuple[int, ...] = ()
    ) -> None:
        self.number_S = torch.zeros(num_slots)  # by slot: what its adapter adds
        self.device_bytes = 4 * num_slots
        self.active_buckets = (*(2**i for i in range(10) if 2**i < num_slots), num_slots)
        self._heads = heads
        # A place of its own for -1.
        self._slot_T = staging.reserve("lora_slot_T", (max_tokens,), np.int64)
        self._slot_R = staging.reserve("lora_slot_R", (max_tokens,), np.int64)

    def prepare(
        self, slot_T: Int32Array, pool_version: int, *, of_head: bool = False
    ) -> StagedLoraBatch | None:
        slots = tuple(np.unique(slot_T[slot_T >= 0]).tolist())
        if not slots:
            return None
        (self._slot_R if of_head else self._slot_T).put(slot_T.astype(np.int64))
        return StagedLoraBatch(slots, len(slot_T), of_head)

    def warm_up(self, num_scores: int) -> int:
        return 0

    def capture_batch(self, num_tokens: int, active_bucket: int) -> StagedLoraBatch:
        assert active_bucket in self.active_buckets
        self._slot_T.put(np.full(num_tokens, -1))
        return StagedLoraBatch(tuple(range(active_bucket)), num_tokens, False)

    def active_bucket(self, batch: LoraBatch) -> int:
        assert isinstance(batch, StagedLoraBatch)
        return min(bucket for bucket in self.active_buckets if bucket >= len(batch.slots))

    def add(self, y_TN: Tensor, x_TK: Tensor, layer: int, site: LoraSite, batch: LoraBatch) -> None:
        self._add(y_TN, batch)

    def add_embedding(self, y_TH: Tensor, token_T: Tensor, batch: LoraBatch) -> None:
        self._add(y_TH, batch)

    def adapts_head(self, batch: LoraBatch) -> bool:
        assert isinstance(batch, StagedLoraBatch)
        return any(slot in self._heads for slot in batch.slots)

    def add_head(self, y_RV: Tensor, x_RH: Tensor, batch: LoraBatch) -> None:
        assert len(x_RH) == len(y_RV)
        is_adapted = torch.zeros_like(self.number_S).index_fill_(
            0, torch.tensor(self._heads, dtype=torch.int64), 1.0
        )
        self._add(y_RV, batch, is_adapted)

    def _add(self, y_TN: Tensor, batch: LoraBatch, factor_S: Tensor | None = None) -> None:
        assert isinstance(batch, StagedLoraBatch)
        assert len(y_TN) == batch.num_rows
        slot_T = (self._slot_R if batch.of_head else self._slot_T).device[: batch.num_rows]
        numbers_S = self.number_S if factor_S is None else self.number_S * factor_S
        delta_T = torch.where(slot_T >= 0, numbers_S[slot_T.clamp(min=0)], 0)
        # Not the same for all columns, so that no norm or softmax takes it away.
        y_TN += delta_T[:, None] * torch.linspace(-1, 1, y_TN.shape[1])
