"""Rotary position embedding, bit for bit as transformers computes it.

Angles and tables are fp32; cos and sin are rounded to the model's dtype once, and the rotation runs
in that dtype. The tables are built for all positions at load (fp32, 2 x positions x D x 4 bytes).
Source: RoFormer, arXiv 2104.09864, in the half-split layout of the Llama checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin for every position; sin carries the sign of the rotated half."""

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        theta: float,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        # Computed on the CPU, so that every device has the same tables.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse_frequency = 1.0 / (theta**exponent)
        position = torch.arange(max_position, dtype=torch.float32)
        angle = position[:, None] * inverse_frequency[None, :]
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self._cos_PD = torch.cat((cos, cos), dim=-1).to(device)
        self._sin_PD = torch.cat((-sin, sin), dim=-1).to(device)

    def gather(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed sin), each (T, 1, D), for one step."""
        cos = self._cos_PD.index_select(0, position_T)
        sin = self._sin_PD.index_select(0, position_T)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate_(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotate heads in place; `x_THD` may be a strided view whose last dimension is contiguous."""
    num_tokens, num_heads, head_dim = x_THD.shape
    swapped = x_THD.view(num_tokens, num_heads, 2, head_dim // 2).flip(-2).view(x_THD.shape)
    swapped.mul_(sin_T1D)
    x_THD.mul_(cos_T1D).add_(swapped)


def rotate_merged_(qkv_TC: Tensor, num_heads: int, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotate the first `num_heads` heads of a merged projection in place; D is that of the tables."""
    num_tokens, head_dim = qkv_TC.shape[0], cos_T1D.shape[-1]
    x_THD = qkv_TC[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    rotate_(x_THD, cos_T1D, sin_T1D)
