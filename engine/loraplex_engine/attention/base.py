"""What the decoder asks of an attention backend.

The KV cache of a layer is an array of token slots, grouped into blocks of `block_size`; a sequence's
tokens live where its block table says. A backend lays one slot out as it likes (`kv_shape`), is told
once per step which tokens belong to which sequence (`prepare`), and then, per layer, stores the step's
keys and values (`write_kv`) and attends (`forward`).

T tokens of the step (padded to the linears' row multiple), B sequences, H query heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loraplex_engine.step import Int32Array


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The part of a model that attention depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def kv_size(self) -> int:
        """Width of a token's keys over all heads; its values are as wide."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step: sequence b computes positions [num_computed[b], num_computed[b] + num_scheduled[b]).

    The step's tokens are the sequences' tokens one after the other, then padding up to `num_rows`.
    """

    num_computed_B: Int32Array
    num_scheduled_B: Int32Array
    block_table_BM: Int32Array  # entries past a sequence's last block mean nothing
    num_rows: int


PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[PlanT]):
    """Attends a step's tokens to their own sequences; obeys the row rule and reads nothing else."""

    name: str

    def kv_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache for blocks 0 .. num_blocks - 1, in the model's dtype.

        May include room of the backend's own; `reset_kv` prepares that.
        """
        ...

    def reset_kv(self, kv: Tensor) -> None:
        """Prepare one layer's new cache; touches no block, so that unused memory costs nothing."""
        ...

    def prepare(self, batch: AttentionBatch) -> PlanT:
        """Masks, indices and grouping for one step, shared by all layers."""
        ...

    def write_kv(self, kv_TC: Tensor, kv: Tensor, plan: PlanT) -> None:
        """Store the step's keys (rotated) and values.

        Args:
            kv_TC: (T, 2 * kv_size): all key heads, then all value heads.
        """
        ...

    def forward(self, q_THD: Tensor, kv: Tensor, plan: PlanT) -> Tensor:
        """softmax(q K^T / sqrt(D)) V over positions 0 .. own: (T, H * D), padding rows zero."""
        ...
