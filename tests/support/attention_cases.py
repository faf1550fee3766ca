"""Sequences to try attention backends with, and the Triton backend with a staging buffer of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from loraplex_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from loraplex_engine.attention.triton_attention import PagedKv, TritonAttention, TritonPlan
from loraplex_engine.device.staging import Staging
from loraplex_engine.model.rope import RotaryTable, rotate_merged_
from loraplex_kernels.plans import Column, Plan, PlanTable

BLOCK_SIZE = 16
NUM_BLOCKS = 96
MAX_LENGTH = 192


class _FewPrograms(PlanTable):
    """The interpreter's time is the number of programs: many tokens rotated in one, few splits of a row."""

    def choose(self, kernel: str, **bounds: Any) -> Plan:
        plan = super().choose(kernel, **bounds)
        if kernel == "rope_kv":
            return Plan({"TOKENS": 64, "HEADS": 16}, 4, 1, "interpreted")
        if plan.config.get("NUM_SPLITS", 1) > 3:
            return replace(plan, config={**plan.config, "NUM_SPLITS": 3})
        return plan


class StagedTriton(TritonAttention):
    """Interpreted, with the plans of a H100. Flushes its staging itself: there is no runner here."""

    def __init__(self, shape: AttentionShape, *, column: Column = "invariant", **more: Any) -> None:
        staging = Staging(torch.device("cpu"))
        super().__init__(
            shape,
            block_size=BLOCK_SIZE,
            device=staging.device,
            plans=_FewPrograms("sm_90", column),
            staging=staging,
            max_tokens=256,
            max_rows=8,
            max_blocks_per_row=MAX_LENGTH // BLOCK_SIZE,
            **more,
        )
        staging.seal()
        self._staging = staging

    def prepare(self, batch: AttentionBatch) -> TritonPlan:
        plan = super().prepare(batch)
        self._staging.flush()
        return plan


class Sequences:
    """Random sequences whose queries, keys and values exist in full; run any part of them."""

    def __init__(
        self, backend: AttentionBackend[Any, Any], shape: AttentionShape, lengths: list[int]
    ) -> None:
        self.backend, self.shape, self.lengths = backend, shape, lengths
        random = torch.Generator().manual_seed(7)
        self.rotary = RotaryTable(shape.head_dim, max(lengths), 10_000.0, shape.dtype)
        self.q = [torch.randn(n, shape.q_size, generator=random).to(shape.dtype) for n in lengths]
        self.kv = [
            torch.randn(n, 2 * shape.kv_size, generator=random).to(shape.dtype) for n in lengths
        ]
        self.reset(seed=0)

    def reset(self, *, seed: int) -> None:
        """An empty cache full of NaN, and block tables that lie elsewhere for every seed."""
        self.cache = self.backend.allocate_kv(NUM_BLOCKS)
        if isinstance(self.cache, PagedKv):
            for tensor in (self.cache.numbers, self.cache.scale):
                if tensor is not None and tensor.dtype.is_floating_point:
                    tensor.fill_(float("nan"))
        else:
            # The torch backend has a slot of its own behind the blocks.
            self.cache[: NUM_BLOCKS * BLOCK_SIZE] = float("nan")
        blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS).astype(np.int32)
        width = max(-(-n // BLOCK_SIZE) for n in self.lengths)
        assert width * len(self.lengths) <= NUM_BLOCKS
        self.table = blocks[: width * len(self.lengths)].reshape(len(self.lengths), width)

    def run(
        self,
        parts: list[tuple[int, int, int]],
        *,
        num_rows: int | None = None,
        num_prompt: int | None = None,
    ) -> list[torch.Tensor]:
        """One step over (sequence, start, stop) parts; a tensor of rows for each.

        Args:
            num_rows: that the step is padded to; None: a multiple of 4.
            num_prompt: length of every sequence's prompt; None: nothing is said of prompts.
        """
        computed = np.array([start for _s, start, _stop in parts], np.int32)
        scheduled = np.array([stop - start for _s, start, stop in parts], np.int32)
        num_tokens = int(scheduled.sum())
        num_rows = num_rows or num_tokens + -num_tokens % 4
        table = self.table[[sequence for sequence, _start, _stop in parts]]
        prompts = None if num_prompt is None else np.full(len(parts), num_prompt, np.int32)
        batch = AttentionBatch(computed, scheduled, table, num_rows, prompts)
        plan = self.backend.prepare(batch)

        qkv = torch.full((num_rows, self.shape.q_size + 2 * self.shape.kv_size), torch.nan)
        qkv = qkv.to(self.shape.dtype)
        qkv[:num_tokens] = torch.cat(
            [torch.cat([self.q[s][a:b], self.kv[s][a:b]], dim=1) for s, a, b in parts]
        )
        position = torch.zeros(num_rows, dtype=torch.int64)
        position[:num_tokens] = torch.cat([torch.arange(a, b) for _s, a, b in parts])
        cos, sin = self.rotary.gather(position)
        self.backend.rotate_and_write(qkv, cos, sin, self.cache, plan)
        out = self.backend.forward(qkv, self.cache, plan)
        assert out.shape == (num_rows, self.shape.num_heads * self.shape.head_dim)
        assert out[num_tokens:].eq(0).all(), "padding rows are zero, whatever came in"
        return list(torch.split(out[:num_tokens], scheduled.tolist()))

    def dense(self, sequence: int) -> torch.Tensor:
        """What it should be: rotated in the model's dtype, then float64 on the whole sequence."""
        shape, length = self.shape, self.lengths[sequence]
        fold = shape.num_heads // shape.num_kv_heads
        qkv = torch.cat([self.q[sequence], self.kv[sequence]], dim=1)
        tables = self.rotary.gather(torch.arange(length))
        rotate_merged_(qkv, shape.num_heads + shape.num_kv_heads, *tables)
        q = qkv[:, : shape.q_size].double().view(length, shape.num_heads, shape.head_dim)
        k, v = (
            half.view(length, shape.num_kv_heads, shape.head_dim).repeat_interleave(fold, 1)
            for half in qkv[:, shape.q_size :].double().chunk(2, dim=1)
        )
        score = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
        if shape.soft_cap is not None:
            score = shape.soft_cap * (score / shape.soft_cap).tanh()
        is_hidden = torch.ones(length, length).triu(1)
        if shape.window is not None:
            is_hidden += torch.ones(length, length).tril(-shape.window)
        score = score.masked_fill(is_hidden.bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", score.softmax(-1), v).reshape(length, -1)
