"""At which padded K lengths SDPA sums in the same order as in whole blocks of 512.

The CPU kernel walks K in blocks of 512 and multiplies each block in one matrix product, whose inner
loop is split by the library according to its length: 256 keys may be summed as 128 + 128 where the first
256 of 512 are summed as 192 + 64. Padding every sequence to a multiple of 512 is always right and up
to eight times the work for a short one. So the last block's length is tried at start: a length is used
only if its results equal, bit for bit, those of a full block, on this CPU and torch build.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loraplex_engine.attention.base import AttentionShape

BLOCK = 512
_CANDIDATES = (64, 128, 192, 256, 320, 384, 448)
_QUERY_ROWS = (4, 12, 64, 256)
_NUM_DRAWS = 2


@dataclass(frozen=True, slots=True)
class KeyLengths:
    """Lengths that the last, partial block of K may be padded to; the full block always."""

    partial: tuple[int, ...]  # ascending, each below BLOCK

    def pad(self, length: int) -> int:
        """The smallest safe K length that holds `length` positions."""
        whole, rest = divmod(length, BLOCK)
        if rest == 0:
            return length
        for candidate in self.partial:
            if candidate >= rest:
                return whole * BLOCK + candidate
        return (whole + 1) * BLOCK

    @classmethod
    def measure(cls, shape: AttentionShape) -> KeyLengths:
        """Try every candidate, after no and after one full block, with few and many query rows."""
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype)

        heads, width = shape.num_kv_heads, shape.head_dim
        partial = []
        with torch.inference_mode():
            key, value = (
                draw(_NUM_DRAWS, heads, 2 * BLOCK, width),
                draw(_NUM_DRAWS, heads, 2 * BLOCK, width),
            )
            query = draw(_NUM_DRAWS, heads, max(_QUERY_ROWS), width)
            for candidate in _CANDIDATES:
                is_safe = all(
                    _is_equal(query[:, :, :rows], key, value, whole + candidate, whole + BLOCK)
                    for whole in (0, BLOCK)
                    for rows in _QUERY_ROWS
                )
                if is_safe:
                    partial.append(candidate)
        return cls(tuple(partial))


def _is_equal(query: Tensor, key: Tensor, value: Tensor, short: int, full: int) -> bool:
    results = []
    for length in (short, full):
        mask = torch.zeros(1, 1, query.shape[2], length, dtype=query.dtype)
        mask[..., short:] = float("-inf")
        k, v = key[:, :, :length].clone(), value[:, :, :length].clone()
        k[:, :, short:] = 0
        v[:, :, short:] = 0
        results.append(functional.scaled_dot_product_attention(query, k, v, attn_mask=mask))
    return torch.equal(results[0], results[1])
