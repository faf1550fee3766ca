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
from loraplex_kernels.cpu.attention import AttentionTasks, NativeAttentionKernel
from torch import Tensor

from loraplex_engine.attention.base import AttentionBatch, AttentionShape


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step, sorted out."""

    num_tokens: int
    write_slot: Tensor  # (num_tokens,) int64
    work: AttentionTasks


class NativeAttention:
    """`AttentionBackend` on the compiled CPU kernel."""

    name = "native"

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
        self._shape = shape
        self._block_size = block_size
        self._kernel = NativeAttentionKernel(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=shape.dtype,
            cache_dir=cache_dir,
            num_threads=num_threads,
        )

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks * self._block_size, 2 * self._shape.kv_size)

    def reset_kv(self, kv: Tensor) -> None:
        """Nothing: the kernel reads no slot that was not written."""

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
            work=AttentionTasks.of(computed, scheduled, batch.block_table_BM),
        )

    def write_kv(self, kv_TC: Tensor, kv: Tensor, plan: NativePlan) -> None:
        kv.index_copy_(0, plan.write_slot, kv_TC[: plan.num_tokens])

    def forward(self, q_THD: Tensor, kv: Tensor, plan: NativePlan) -> Tensor:
        q_TC = q_THD.reshape(q_THD.shape[0], -1).contiguous()
        out_TC = torch.empty_like(q_TC)
        out_TC[plan.num_tokens :].zero_()
        self._kernel.forward(q_TC, out_TC, kv, plan.work)
        return out_TC
