"""One layer's attention of one step, by the engine's backend over a cache of random numbers, and its reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.attention.triton_attention import PagedKv, TritonAttention
from loraplex_engine.device.staging import Staging
from loraplex_kernels import reference_attention
from loraplex_kernels.plans import PlanTable
from torch import Tensor

from bench.gpu_check.machine import Machine
from bench.gpu_check.numerics import make_last_stand_out
from bench.gpu_check.stand import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class StepRows:
    """Sequences of a step."""

    computed: np.ndarray
    scheduled: np.ndarray
    is_prompt: np.ndarray

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(sequence, position) of each token."""
        return [
            (row, int(first) + place)
            for row, (first, count) in enumerate(zip(self.computed, self.scheduled, strict=True))
            for place in range(count)
        ]


class AttentionStep:
    """One layer's attention of one step."""

    def __init__(
        self,
        machine: Machine,
        plans: PlanTable,
        shape: AttentionShape,
        kv_dtype: torch.dtype,
        rows: StepRows,
        generator: torch.Generator,
    ) -> None:
        self._rows, self._shape, self._kv_dtype = rows, shape, kv_dtype
        device = machine.device
        self._positions = rows.positions
        count, num_tokens = len(rows.computed), len(self._positions)
        ends = rows.computed + rows.scheduled
        per_row = -(-int(ends.max()) // BLOCK_SIZE)
        num_blocks = per_row * count
        order = torch.randperm(num_blocks, generator=generator)
        self._table = order.view(count, per_row).to(torch.int32)
        staging = Staging(device)
        self._backend = TritonAttention(
            shape,
            block_size=BLOCK_SIZE,
            device=device,
            plans=plans,
            staging=staging,
            max_tokens=num_tokens,
            max_rows=count,
            max_blocks_per_row=per_row,
            kv_dtype=None if kv_dtype == shape.dtype else kv_dtype,
        )
        staging.seal()
        self._kv: PagedKv = self._backend.allocate_kv(num_blocks)
        self._fill(generator, ends)
        columns = shape.q_size + 2 * shape.kv_size
        qkv = torch.randn(num_tokens, columns, generator=generator).to(shape.dtype)
        for token, (_, position) in enumerate(self._positions):
            make_last_stand_out(qkv[token, shape.q_size + shape.kv_size :], position + 1)
        self._given = qkv.clone()
        self._qkv = qkv.to(device)
        angle = torch.randn(num_tokens, shape.head_dim // 2, generator=generator)
        self._cos = torch.cat((angle.cos(),) * 2, -1).to(shape.dtype)
        self._sin = torch.cat((-angle.sin(), angle.sin()), -1).to(shape.dtype)
        # A row that decodes has its prompt behind it.
        self._plan = self._backend.prepare(
            AttentionBatch(
                rows.computed,
                rows.scheduled,
                self._table.numpy(),
                num_tokens,
                np.where(rows.is_prompt, ends, rows.computed).astype(np.int32),
            )
        )
        staging.flush()

    def _fill(self, generator: torch.Generator, ends: np.ndarray) -> None:
        drawn = torch.randn(self._kv.numbers.shape, generator=generator)
        scale = None
        if self._kv.scale is None:
            numbers = drawn.to(self._kv_dtype)
        else:
            numbers, scale = reference_attention.quantize(drawn, self._kv_dtype)
        # Nobody wrote behind a row's last token: whatever lies there must not be seen.
        for blocks, end in zip(self._table, ends, strict=True):
            place = end % BLOCK_SIZE
            if not place:
                continue
            block = int(blocks[(end - 1) // BLOCK_SIZE])
            if scale is None:
                numbers[:, block, :, place:] = torch.nan
            else:
                scale[:, block, :, place:] = torch.nan
        self._kv.numbers.copy_(numbers)
        if scale is not None and self._kv.scale is not None:
            self._kv.scale.copy_(scale)

    def run(self) -> Tensor:
        """(T, H * D), as the kernels have it."""
        device = self._qkv.device
        self._backend.rotate_and_write(
            self._qkv, self._cos.to(device), self._sin.to(device), self._kv, self._plan
        )
        return self._backend.forward(self._qkv, self._kv, self._plan)

    def stored(self) -> tuple[Tensor, Tensor]:
        """The step's keys and values, (2, T, kv heads, D) fp32: as they lie in the cache, and as they should."""
        slots = [
            int(self._table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for row, position in self._positions
        ]
        right = torch.zeros(self._kv.numbers.shape, dtype=self._shape.dtype)
        reference_attention.rope_kv(
            self._given.clone(),
            self._cos,
            self._sin,
            torch.tensor(slots, dtype=torch.int32),
            right,
            num_heads=self._shape.num_heads,
        )
        blocks, places = torch.tensor(slots) // BLOCK_SIZE, torch.tensor(slots) % BLOCK_SIZE
        got = self._kv.numbers.cpu().float()[:, blocks, :, places]
        if self._kv.scale is not None:
            got = got * self._kv.scale.cpu()[:, blocks, :, places][..., None]
        return got, right.float()[:, blocks, :, places]

    def expected(self, tokens: list[int], *, window: int | None, soft_cap: float | None) -> Tensor:
        """What some of the step's tokens attend to, given the cache as it is now."""
        # Where the cache is, so that fp64 costs little; in fp32, exact, as not every device indexes fp8.
        return reference_attention.paged_attention(
            self._qkv[tokens],
            self._kv.numbers.float(),
            [self._table[self._positions[token][0]] for token in tokens],
            [self._positions[token][1] for token in tokens],
            num_heads=self._shape.num_heads,
            scale=self._kv.scale,
            window=window,
            soft_cap=soft_cap,
        )
