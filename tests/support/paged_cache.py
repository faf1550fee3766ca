"""Sequences in a paged cache for kernel tests: blocks in no order, everything else NaN or garbage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from loraplex_kernels.reference_attention import quantize
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCache:
    """One layer's cache of some sequences; slots that none of them owns hold NaN (int8: 127 with a NaN scale)."""

    kv: Tensor
    scale: Tensor | None
    table: Tensor  # (sequences * width,) int32; -1 behind a sequence's last block: never to be read
    width: int
    lengths: tuple[int, ...]

    def blocks(self, sequence: int) -> Tensor:
        """The sequence's block ids, padding included."""
        return self.table[sequence * self.width : (sequence + 1) * self.width]


def paged_cache(
    lengths: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    place_seed: int = 0,
) -> PagedCache:
    """Random keys and values; `place_seed` alone says which blocks they lie in."""
    width = max(-(-length // block_size) for length in lengths) or 1
    num_blocks = width * len(lengths) + 3
    order = np.random.default_rng(place_seed).permutation(num_blocks).astype(np.int32)
    shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
    numbers = torch.full(shape, torch.nan)
    table = torch.full((len(lengths) * width,), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    for sequence, length in enumerate(lengths):
        count = -(-length // block_size)
        blocks = torch.from_numpy(order[sequence * width : sequence * width + count])
        table[sequence * width : sequence * width + count] = blocks
        position = torch.arange(length)
        drawn = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
        at = (blocks.long()[position // block_size], position % block_size)
        # Indices apart from each other put their dimension first.
        numbers[:, at[0], :, at[1]] = drawn.transpose(0, 1)
    numbers = numbers.to(dtype)
    scale = None
    if kv_dtype is not None:
        is_there = numbers.isfinite().all(-1, keepdim=True)
        numbers, scale = quantize(numbers, kv_dtype)
        if kv_dtype == torch.int8:
            numbers = torch.where(is_there, numbers, torch.tensor(127, dtype=torch.int8))
        else:
            bits = torch.where(
                is_there, numbers.view(torch.uint8), torch.tensor(0x7F, dtype=torch.uint8)
            )
            numbers = bits.view(kv_dtype)
    return PagedCache(
        numbers.to(device),
        None if scale is None else scale.to(device),
        table.to(device),
        width,
        tuple(lengths),
    )
