"""How long a step takes: a roofline of memory traffic, arithmetic and fixed overhead.

A step that computes T tokens, token t over a context of S_t tokens, of which row i reads S_i from the
cache, takes

    max((weights + kv * sum S_i) / bandwidth, (2 * P * T + 4 * L * H * D * sum S_t) / peak) + overhead

so a + b * tokens + c * context, whichever side of the roof it is on. P: weights read per token; L layers,
H query heads, D head size; kv: bytes of keys and values per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class CostModel:
    """One model on one machine. `bandwidth_bytes_s` and `peak_flops_s` are what it really reaches."""

    name: str
    num_weights: float
    weight_bytes: float  # per weight
    kv_bytes: float  # per token
    flops_per_context: float  # 4 * L * H * D
    bandwidth_bytes_s: float
    peak_flops_s: float
    overhead_s: float

    def step_s(self, num_computed_B: IntArray, num_scheduled_B: IntArray) -> float:
        """Seconds for rows with so many tokens computed and so many to compute."""
        computed = num_computed_B.astype(np.float64)
        scheduled = num_scheduled_B.astype(np.float64)
        num_tokens = scheduled.sum()
        read = self.num_weights * self.weight_bytes + self.kv_bytes * (computed + scheduled).sum()
        context = (scheduled * (computed + (scheduled + 1) / 2)).sum()
        flops = 2 * self.num_weights * num_tokens + self.flops_per_context * context
        bound = max(read / self.bandwidth_bytes_s, flops / self.peak_flops_s)
        return float(bound + self.overhead_s)


COST_MODELS = {
    "cpu": CostModel(
        name="SmolLM2-135M, bf16, 2 CPU cores",
        num_weights=134.5e6,
        weight_bytes=2,
        kv_bytes=2 * 30 * 3 * 64 * 2,
        flops_per_context=4 * 30 * 9 * 64,
        bandwidth_bytes_s=25e9,
        peak_flops_s=250e9,
        overhead_s=4e-3,
    ),
    "gpu": CostModel(
        name="Llama-3.1-8B, bf16, one H200 at 60 % of its peaks",
        num_weights=7.5e9,
        weight_bytes=2,
        kv_bytes=2 * 32 * 8 * 128 * 2,
        flops_per_context=4 * 32 * 32 * 128,
        bandwidth_bytes_s=0.6 * 4.8e12,
        peak_flops_s=0.6 * 989e12,
        overhead_s=1e-3,
    ),
}
