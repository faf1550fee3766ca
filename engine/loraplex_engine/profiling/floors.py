"""The least that a step must read and multiply, by part: what its time is a share of.

A floor counts real tokens, not padding; weights, keys and values once a step; an adapter once, however many
rows use it. What runs within the caches may come in below the floor of small operations, which is that of
memory.
Source: the roofline model (Williams, Waterman, Patterson, CACM 2009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex_engine.artifact import ModelShape
from loraplex_engine.lora.sites import site_layouts
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.linear import Linear
from loraplex_engine.profiling.machine import MachineFigures
from loraplex_engine.profiling.seams import ATTENTION, HEAD, LINEAR, LORA, SAMPLING, SMALL


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be moved and computed."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def floor_ms(self, machine: MachineFigures) -> float:
        """The time that it cannot be done in less of."""
        read_s = self.num_bytes / (machine.read_gb_s * 1e9)
        return 1e3 * max(read_s, self.flops / (machine.gemm_gflop_s * 1e9))


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step: per row the tokens before it, and those it computes; each row samples one."""

    num_computed: Sequence[int]
    num_scheduled: Sequence[int]
    adapter_ranks: Sequence[int]  # of the distinct adapters in it
    row_ranks: Sequence[int]  # per row; 0: base

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return sum(self.num_scheduled)


def step_work(
    step: StepShape,
    model: Decoder,
    shape: ModelShape,
    *,
    kv_bytes_per_token: float,
    adapter_number_bytes: int,
) -> Mapping[str, Work]:
    """By part; what is not here has no floor of this kind."""
    config, size = model.config, model.dtype.itemsize
    rows, tokens = len(step.num_scheduled), step.num_tokens
    first = model.layers[0]
    layer = (first.qkv, first.o, first.gate_up, first.down)
    layers = config.num_layers
    read = sum(
        before + new for before, new in zip(step.num_computed, step.num_scheduled, strict=True)
    )
    # A token attends to those before it and itself.
    pairs = sum(
        new * before + new * (new + 1) / 2
        for before, new in zip(step.num_computed, step.num_scheduled, strict=True)
    )
    per_rank = layers * sum(
        len(site.slices) * site.num_inputs + site.num_outputs for site in site_layouts(shape)
    )
    rank_tokens = sum(r * new for r, new in zip(step.row_ranks, step.num_scheduled, strict=True))
    hidden, inner = config.hidden_size, layer[3].in_features
    # Norms read and write the residual stream and their output; rope its part of the projection, once in and
    # once out, and the cache; the activation both halves, and writes one.
    small = tokens * layers * size * (2 * 4 * hidden + 2.5 * layer[0].out_features + 3 * inner)
    return {
        LINEAR: Work(
            layers * sum(_weight_bytes(linear, size) for linear in layer),
            2.0 * tokens * layers * sum(one.in_features * one.out_features for one in layer),
        ),
        HEAD: Work(
            _weight_bytes(model.lm_head, size),
            2.0 * rows * model.lm_head.in_features * model.lm_head.out_features,
        ),
        ATTENTION: Work(
            kv_bytes_per_token * read,
            4.0 * layers * config.num_heads * config.head_dim * pairs,
        ),
        LORA: Work(
            float(adapter_number_bytes * per_rank * sum(step.adapter_ranks)),
            2.0 * per_rank * rank_tokens,
        ),
        SMALL: Work(small),
        SAMPLING: Work(float(rows * config.num_token_ids * size)),
    }


def _weight_bytes(linear: Linear, number_bytes: int) -> float:
    """What a product reads of a weight: what the linear says, or all its numbers in the model's dtype."""
    known = getattr(linear, "weight_bytes", None)
    return float(
        linear.in_features * linear.out_features * number_bytes if known is None else known
    )
