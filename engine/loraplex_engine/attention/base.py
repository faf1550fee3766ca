"""What the decoder asks of an attention backend.

The KV cache of a layer holds token slots, grouped into blocks of `block_size`; a sequence's tokens live
where its block table says. A backend makes and lays out a layer's cache as it likes (`allocate_kv`), is
told once per step which tokens belong to which sequence (`prepare`), and then, per layer, rotates the
step's queries and keys, stores keys and values (`rotate_and_write`) and attends (`forward`).

T tokens of the step (padded to the linears' row multiple), B sequences, H query heads, D head width.
qkv_TC is the merged projection of a step: (T, C), C = q_size + 2 * kv_size, all query heads, then all
key heads, then all value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loraplex_engine.artifact.sizes import kv_bytes_per_token
from loraplex_engine.step import Int32Array


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The part of a model that attention depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Keys further back than this are not seen: position p sees p - window + 1 .. p. None: all.
    window: int | None = None
    # Scores become soft_cap * tanh(score / soft_cap). None: as they are.
    soft_cap: float | None = None

    @property
    def q_size(self) -> int:
        """Width of a token's queries over all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of a token's keys over all heads; its values are as wide."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: torch.dtype | None = None) -> int:
        """What a token's keys and values take in one layer's cache; all that is said of its size comes from here.

        Args:
            kv_dtype: what they are kept in. int8 and float8 have a scale in fp32 for each head, of keys and of
                values; None: the model's dtype.
        """
        return kv_bytes_per_token(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            number_bytes=(kv_dtype or self.dtype).itemsize,
        )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step: sequence b computes positions [num_computed[b], num_computed[b] + num_scheduled[b]).

    The step's tokens are the sequences' tokens one after the other, then padding up to `num_rows`.
    """

    num_computed_B: Int32Array
    num_scheduled_B: Int32Array
    block_table_BM: Int32Array  # entries past a sequence's last block mean nothing
    num_rows: int
    # Prompt lengths, for a backend that `splits_prompts`; None: nothing is said of prompts, and whoever has
    # one token in this step decodes.
    num_prompt_B: Int32Array | None = None


KvT = TypeVar("KvT")
PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[KvT, PlanT]):
    """Attends a step's tokens to their own sequences; obeys the row rule and reads nothing else."""

    name: str
    # Whether a position's routine depends on its being of the prompt or not, so that its bits do not depend
    # on how many of its sequence share the step. A step with positions of a prompt is then no decoding step.
    splits_prompts: bool

    def allocate_kv(self, num_blocks: int) -> KvT:
        """One layer's cache for blocks 0 .. num_blocks - 1.

        No block is touched: on a CPU, memory that no block has used yet costs nothing.
        """
        ...

    def kv_bytes_per_block(self) -> int:
        """What a block takes in one layer."""
        ...

    def copy_blocks(self, kv: KvT, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks of one layer; every source is read as it was before.

        Args:
            source, target: int64 block ids, equally many; no target twice.
        """
        ...

    def prepare(self, batch: AttentionBatch) -> PlanT:
        """Masks, indices and grouping for one step, shared by all layers."""
        ...

    def rotate_and_write(
        self, qkv_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: KvT, plan: PlanT
    ) -> None:
        """Rotate the queries and keys of `qkv_TC` in place, then store its keys and values.

        Args:
            cos_T1D, sin_T1D: as `RotaryTable.gather` gives them, model dtype.
        """
        ...

    def forward(self, qkv_TC: Tensor, kv: KvT, plan: PlanT) -> Tensor:
        """softmax(q K^T / sqrt(D)) V over positions 0 .. own: (T, H * D), padding rows zero.

        Args:
            qkv_TC: only its rotated queries are read; what a step attends to is in the cache.
        """
        ...
