"""Paged attention in plain torch for CPUs, under the row rule.

A token slot holds the keys of all heads, then the values: (2, num_kv_heads, D), so storing a step is one
row copy. One slot past the last block is always zero: every position that does not exist is gathered
from it, which *selects* zeros instead of multiplying by them. NaN in foreign or unwritten slots is never
read.

Sequences with one token are attended together, query heads folded into rows (they share K and V);
longer ones one by one in slices of queries. The row rule holds because of what SDPA is given:
always a mask, rows in multiples of 4, and a K length at which the sums are blocked as they are in whole
blocks of 512 (`key_lengths`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.attention.key_lengths import KeyLengths
from loraplex_engine.model.rope import rotate_merged_
from loraplex_engine.step import Int32Array

ROW_MULTIPLE = 4
# Queries attended per call: bounds the mask and skips keys that lie after the slice.
_QUERY_SLICE = 256


@dataclass(frozen=True, slots=True)
class _SingleGroup:
    """Sequences with one token this step and the same padded K length S."""

    token_b: Tensor  # (b,) rows of the step
    key_slot: Tensor  # (b * S,) int64
    mask_b11S: Tensor
    key_length: int
    is_whole_step: bool  # the rows are 0 .. b - 1 and the step has no others


@dataclass(frozen=True, slots=True)
class _Slice:
    """Queries [start, start + count) of one sequence."""

    start: int  # row of the step
    count: int
    key_length: int
    mask_11NS: Tensor  # N: count padded to the row multiple


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence with several tokens this step."""

    key_slot: Tensor  # (S,) int64, S of the last slice
    slices: tuple[_Slice, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """One step, sorted out."""

    num_rows: int
    num_tokens: int
    write_slot: Tensor  # (num_tokens,) int64
    groups: tuple[_SingleGroup, ...]
    sequences: tuple[_Sequence, ...]


class TorchAttention:
    """`AttentionBackend` for any CPU that torch runs on."""

    name = "torch"
    splits_prompts = False  # one routine's bits for all

    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_blocks: int,
        block_size: int,
        key_lengths: KeyLengths | None = None,
    ) -> None:
        """Try which K lengths are safe here, unless `key_lengths` says it.

        Raises:
            ValueError: the shape has a sliding window or a soft cap.
        """
        if shape.window is not None or shape.soft_cap is not None:
            raise ValueError(
                "torch attention has neither a sliding window nor a soft cap: use the triton backend"
            )
        self._shape = shape
        self._block_size = block_size
        self._zero_slot = num_blocks * block_size
        self._key_lengths = key_lengths or KeyLengths.measure(shape)
        self._fold = shape.num_heads // shape.num_kv_heads
        self._fold_rows = self._fold + -self._fold % ROW_MULTIPLE
        self._scratch = torch.empty(0, dtype=shape.dtype)

    def allocate_kv(self, num_blocks: int) -> Tensor:
        """(slots + 1, 2 * kv_size), the last slot zero."""
        size = (num_blocks * self._block_size + 1, 2 * self._shape.kv_size)
        kv = torch.empty(size, dtype=self._shape.dtype)
        kv[-1].zero_()
        return kv

    def kv_bytes_per_block(self) -> int:
        return self._block_size * self._shape.kv_bytes_per_token()

    def copy_blocks(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        by_block = kv[:-1].view(-1, self._block_size * kv.shape[1])
        by_block.index_copy_(0, target, by_block.index_select(0, source))

    # ------------------------------------------------------------------ once per step

    def prepare(self, batch: AttentionBatch) -> TorchPlan:
        scheduled, computed = batch.num_scheduled_B, batch.num_computed_B
        num_tokens = int(scheduled.sum())
        start_B = np.cumsum(scheduled) - scheduled
        sequence_T = np.repeat(np.arange(len(scheduled)), scheduled)
        position_T = np.arange(num_tokens) - start_B[sequence_T] + computed[sequence_T]
        write_slot = self._slots(batch.block_table_BM, sequence_T, position_T)
        is_single_B = scheduled == 1
        single = np.flatnonzero(is_single_B)
        length_b = np.asarray([self._key_lengths.pad(int(n) + 1) for n in computed[single]])
        groups = []
        for key_length in np.unique(length_b):
            member = single[length_b == key_length]
            groups.append(self._group(batch, member, start_B[member], int(key_length)))
        sequences = tuple(
            self._sequence(batch, int(b), int(start_B[b])) for b in np.flatnonzero(~is_single_B)
        )
        return TorchPlan(
            num_rows=batch.num_rows,
            num_tokens=num_tokens,
            write_slot=torch.from_numpy(write_slot),
            groups=tuple(groups),
            sequences=sequences,
        )

    def _slots(
        self, table_BM: Int32Array, sequence_T: np.ndarray, position_T: np.ndarray
    ) -> np.ndarray:
        block = table_BM[sequence_T, position_T // self._block_size].astype(np.int64)
        return np.asarray(block * self._block_size + position_T % self._block_size)

    def _key_slots(
        self, table_BM: Int32Array, member_b: np.ndarray, length_b: np.ndarray, key_length: int
    ) -> np.ndarray:
        """(b, key_length): where each position's keys lie; the zero slot from `length_b` on."""
        position = np.arange(key_length)
        # A padded length may reach past the table; those positions come from the zero slot anyway.
        column = np.minimum(position // self._block_size, table_BM.shape[1] - 1)
        block = table_BM[member_b[:, None], column[None, :]].astype(np.int64)
        slot = block * self._block_size + position % self._block_size
        return np.where(position[None, :] < length_b[:, None], slot, self._zero_slot)

    def _group(
        self, batch: AttentionBatch, member_b: np.ndarray, start_b: np.ndarray, key_length: int
    ) -> _SingleGroup:
        length_b = batch.num_computed_B[member_b] + 1
        slot = self._key_slots(batch.block_table_BM, member_b, length_b, key_length)
        is_masked = np.arange(key_length)[None, :] >= length_b[:, None]
        count = len(member_b)
        return _SingleGroup(
            token_b=torch.from_numpy(start_b.astype(np.int64)),
            key_slot=torch.from_numpy(slot.reshape(-1)),
            mask_b11S=self._mask(is_masked)[:, None, None, :],
            key_length=key_length,
            is_whole_step=count == len(batch.num_scheduled_B),
        )

    def _sequence(self, batch: AttentionBatch, index: int, start: int) -> _Sequence:
        computed, count = int(batch.num_computed_B[index]), int(batch.num_scheduled_B[index])
        slices = []
        for first in range(0, count, _QUERY_SLICE):
            num_queries = min(_QUERY_SLICE, count - first)
            end = computed + first + num_queries
            key_length = self._key_lengths.pad(end)
            own = computed + first + np.arange(num_queries + -num_queries % ROW_MULTIPLE)
            # Padding queries look where the last real one looks: a row without keys would be NaN.
            own = np.minimum(own, end - 1)
            is_masked = np.arange(key_length)[None, :] > own[:, None]
            slices.append(
                _Slice(start + first, num_queries, key_length, self._mask(is_masked)[None, None])
            )
        slot = self._key_slots(
            batch.block_table_BM,
            np.asarray([index]),
            np.asarray([computed + count]),
            slices[-1].key_length,
        )
        return _Sequence(torch.from_numpy(slot.reshape(-1)), tuple(slices))

    def _mask(self, is_masked: np.ndarray) -> Tensor:
        """The additive form that SDPA would make of a bool mask in every layer; the same bits."""
        mask = torch.zeros(is_masked.shape, dtype=self._shape.dtype)
        return mask.masked_fill_(torch.from_numpy(is_masked), float("-inf"))

    # ------------------------------------------------------------------ once per layer

    def rotate_and_write(
        self, qkv_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: Tensor, plan: TorchPlan
    ) -> None:
        shape = self._shape
        rotate_merged_(qkv_TC, shape.num_heads + shape.num_kv_heads, cos_T1D, sin_T1D)
        kv.index_copy_(0, plan.write_slot, qkv_TC[: plan.num_tokens, shape.q_size :])

    def forward(self, qkv_TC: Tensor, kv: Tensor, plan: TorchPlan) -> Tensor:
        shape = self._shape
        q_THD = qkv_TC[:, : shape.q_size].view(plan.num_rows, shape.num_heads, shape.head_dim)
        out_TW = qkv_TC.new_empty(plan.num_rows, shape.q_size)
        out_TW[plan.num_tokens :].zero_()
        for group in plan.groups:
            self._attend_group(q_THD, kv, group, out_TW)
        for sequence in plan.sequences:
            self._attend_sequence(q_THD, kv, sequence, out_TW)
        return out_TW

    def _gather(self, kv: Tensor, slot: Tensor) -> Tensor:
        """(len(slot), 2, num_kv_heads, D) in scratch that the next call overwrites."""
        count, width = slot.numel(), kv.shape[1]
        if self._scratch.numel() < count * width:
            self._scratch = torch.empty(count * width, dtype=kv.dtype)
        gathered = self._scratch[: count * width].view(count, width)
        torch.index_select(kv, 0, slot, out=gathered)
        return gathered.view(count, 2, self._shape.num_kv_heads, self._shape.head_dim)

    def _attend_group(self, q_THD: Tensor, kv: Tensor, group: _SingleGroup, out_TW: Tensor) -> None:
        shape = self._shape
        count = group.token_b.numel()
        gathered = self._gather(kv, group.key_slot)
        by_row = gathered.view(count, group.key_length, 2, shape.num_kv_heads, shape.head_dim)
        key, value = by_row[:, :, 0].transpose(1, 2), by_row[:, :, 1].transpose(1, 2)
        query = q_THD[:count] if group.is_whole_step else q_THD.index_select(0, group.token_b)
        query = query.reshape(count, shape.num_kv_heads, self._fold, shape.head_dim)
        if self._fold != self._fold_rows:
            query = functional.pad(query, (0, 0, 0, self._fold_rows - self._fold))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=group.mask_b11S)
        out_bW = out[:, :, : self._fold].reshape(count, -1)
        if group.is_whole_step:
            out_TW[:count] = out_bW
        else:
            out_TW.index_copy_(0, group.token_b, out_bW)

    def _attend_sequence(
        self, q_THD: Tensor, kv: Tensor, sequence: _Sequence, out_TW: Tensor
    ) -> None:
        shape = self._shape
        gathered = self._gather(kv, sequence.key_slot)
        # Batch: KV heads; heads: the query heads that share one, so that the mask is not repeated.
        key_head, value_head = gathered.permute(1, 2, 0, 3).unsqueeze(3).unbind(0)
        key = key_head.transpose(1, 2).expand(-1, self._fold, -1, -1)
        value = value_head.transpose(1, 2).expand(-1, self._fold, -1, -1)
        for part in sequence.slices:
            stop = part.start + part.count
            query = q_THD[part.start : stop].view(
                part.count, shape.num_kv_heads, self._fold, shape.head_dim
            )
            query = query.permute(1, 2, 0, 3)
            missing = -part.count % ROW_MULTIPLE
            if missing:
                query = functional.pad(query, (0, 0, 0, missing))
            out = functional.scaled_dot_product_attention(
                query,
                key[:, :, : part.key_length],
                value[:, :, : part.key_length],
                attn_mask=part.mask_11NS,
            )
            out_nW = out[:, :, : part.count].permute(2, 0, 1, 3)
            out_TW[part.start : stop].view(out_nW.shape).copy_(out_nW)
