"""The least time a launch can take on an architecture: bytes over bandwidth or FLOPs over peak, whichever is more.

Figures are the vendor's for the part named; a table of what was measured belongs to `make gpu-check`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peak:
    """One GPU."""

    gpu: str
    bytes_per_s: float
    dense_flops_per_s: dict[str, float]  # by model dtype; no sparsity

    def floor_us(self, *, bytes_moved: int, flops: int, dtype: str, on_tensor_cores: bool) -> float:
        """Microseconds that a launch cannot go below.

        Args:
            on_tensor_cores: False: its products run on the fp32 units, whatever the dtype.
        """
        peak = self.dense_flops_per_s[dtype if on_tensor_cores else "fp32_units"]
        return 1e6 * max(bytes_moved / self.bytes_per_s, flops / peak)


# fp32 on tensor cores means tf32; products that must keep fp32 (input_precision="ieee") run on the fp32 units.
PEAKS: dict[str, Peak] = {
    "sm_80": Peak(
        "A100 SXM 80 GB",
        2.039e12,
        {"bf16": 312e12, "fp16": 312e12, "fp32": 156e12, "fp32_units": 19.5e12},
    ),
    "sm_89": Peak(
        "L40S",
        0.864e12,
        {"bf16": 362e12, "fp16": 362e12, "fp32": 183e12, "fp32_units": 91.6e12},
    ),
    "sm_90": Peak(
        "H200 SXM",
        4.8e12,
        {"bf16": 989e12, "fp16": 989e12, "fp32": 494e12, "fp32_units": 67e12},
    ),
    "sm_100": Peak(
        "B200",
        8.0e12,
        {"bf16": 2250e12, "fp16": 2250e12, "fp32": 1125e12, "fp32_units": 75e12},
    ),
}
