"""Inputs of kernel tests: seeded tensors, and how far a kernel may be from a reference in each dtype."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# About two units in the last place: a kernel sums in fp32 in another order than the reference in fp64.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
}


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> Tensor:
    """Standard normal numbers, the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)
