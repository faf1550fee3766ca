"""Paged attention by the C kernel: no gathers, no padding, no copies of the cache.

The kernel's own fixed tiling keeps the row rule (kernels/loraplex_kernels/cpu/attention.c), so a step
costs what its keys cost. Where there is no C compiler, or the shape is one the kernel does not have,
`TorchAttention` does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from loraplex_kernels.cpu.attention import AttentionWork, NativeAttentionKernel
from loraplex_kernels.cpu.ops import OpsKernel
from torch import Tensor

from loraplex_engine.arithmetic import native_name
from loraplex_engine.attention.base import AttentionBatch, AttentionShape


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step, sorted out."""

    num_tokens: int
    write_slot: Tensor  # (num_tokens,) int64
    work: AttentionWork


class NativeAttention:
    """`AttentionBackend` on the compiled CPU kernel."""

    splits_prompts = False  # one routine's bits for all

    def __init__(
        self,
        shape: AttentionShape,
        *,
        block_size: int,
        cache_dir: Path,
        num_threads: int,
    ) -> None:
        """Compile or load the kernel.

        Raises:
            ValueError: a shape or dtype the kernel does not have.
            loraplex_kernels.cpu.build.NativeBuildError: no compiler here, or it failed.
        """
        self.shape = shape
        self._block_size = block_size
        self.kernel = NativeAttentionKernel(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=shape.dtype,
            cache_dir=cache_dir,
            num_threads=num_threads,
            window=shape.window,
            soft_cap=shape.soft_cap,
        )
        self.name = native_name("amx" if self.kernel.in_tiles else "fp32")
        self._ops = OpsKernel(shape.dtype, cache_dir=cache_dir, num_threads=num_threads)

    def allocate_kv(self, num_blocks: int) -> Tensor:
        """(slots, 2 * kv_size); the kernel reads no slot that was not written."""
        size = (num_blocks * self._block_size, 2 * self.shape.kv_size)
        return torch.empty(size, dtype=self.shape.dtype)

    def kv_bytes_per_block(self) -> int:
        return self._block_size * self.shape.kv_bytes_per_token()

    def copy_blocks(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        by_block = kv.view(-1, self._block_size * kv.shape[1])
        by_block.index_copy_(0, target, by_block.index_select(0, source))

    def prepare(self, batch: AttentionBatch) -> NativePlan:
        scheduled, computed = batch.num_scheduled_B, batch.num_computed_B
        num_tokens = int(scheduled.sum())
        start_B = np.cumsum(scheduled) - scheduled
        sequence_T = np.repeat(np.arange(len(scheduled)), scheduled)
        position_T = np.arange(num_tokens) - start_B[sequence_T] + computed[sequence_T]
        block_T = batch.block_table_BM[sequence_T, position_T // self._block_size]
        slot_T = block_T.astype(np.int64) * self._block_size + position_T % self._block_size
        return NativePlan(
            num_tokens=num_tokens,
            write_slot=torch.from_numpy(slot_T),
            work=self.kernel.plan(computed, scheduled, batch.block_table_BM),
        )

    def rotate_and_write(
        self, qkv_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: Tensor, plan: NativePlan
    ) -> None:
        shape = self.shape
        self._ops.rotate_and_write(
            qkv_TC,
            cos_T1D,
            sin_T1D,
            kv,
            plan.write_slot,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )

    def forward(self, qkv_TC: Tensor, kv: Tensor, plan: NativePlan) -> Tensor:
        out_TC = qkv_TC.new_empty(qkv_TC.shape[0], self.shape.q_size)
        if plan.num_tokens < qkv_TC.shape[0]:
            out_TC[plan.num_tokens :].zero_()
        self.kernel.forward(qkv_TC, out_TC, kv, plan.work)
        return out_TC
