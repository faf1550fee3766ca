"""Whole blocks of a cache are moved as bits, whatever is in them."""

from __future__ import annotations

import pytest
import torch
from loraplex_kernels import reference_attention
from loraplex_kernels.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
from loraplex_kernels.plans import Plan
from torch import Tensor

# Not a divisor of a block's words: the last program of a block must not write into the next block.
PLAN = Plan({"BLOCK": 64}, 4, 1, "test")
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


def cache_of(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random bits, NaN among them: (2, 7 blocks, 3 heads, 8, 12 numbers)."""
    count = 2 * 7 * 3 * 8 * 12 * dtype.itemsize
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(2, 7, 3, 8, 12).to(device)


def ids(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    cache, expected = cache_of(dtype, device), cache_of(dtype, device)
    # A target that is another's source, a swap, and a source that comes twice.
    source, target = ids(0, 6, 3, 1, 6, device=device), ids(3, 1, 0, 6, 5, device=device)
    reference_attention.copy_blocks(expected, source, target)

    copy_blocks(cache, source, target, PLAN)

    assert torch.equal(bits(cache), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_packed_and_put_back_elsewhere_are_the_same(
    dtype: torch.dtype, device: torch.device
) -> None:
    cache, expected = cache_of(dtype, device), cache_of(dtype, device)
    source, target = ids(2, 4, device=device), ids(4, 2, device=device)
    reference_attention.copy_blocks(expected, source, target)
    before = cache.clone()

    packed = gather_blocks(cache, source, PLAN)

    assert torch.equal(bits(packed), bits(before[:, [2, 4]].contiguous()))
    assert torch.equal(bits(cache), bits(before))
    scatter_blocks(packed, cache, target, PLAN)
    assert torch.equal(bits(cache), bits(expected))


def test_no_blocks_are_no_launch(device: torch.device) -> None:
    cache, none = cache_of(torch.float32, device), ids(device=device)

    copy_blocks(cache, none, none, PLAN)

    assert gather_blocks(cache, none, PLAN).shape == (2, 0, 3, 8, 12)
    assert torch.equal(bits(cache), bits(cache_of(torch.float32, device)))


def test_wrong_arguments_are_named(device: torch.device) -> None:
    cache, one = cache_of(torch.float32, device), ids(1, device=device)

    with pytest.raises(ValueError, match="target is"):
        copy_blocks(cache, one, ids(1, 2, device=device), PLAN)
    with pytest.raises(ValueError, match="source is"):
        gather_blocks(cache, one.int(), PLAN)
    with pytest.raises(ValueError, match="packed is"):
        scatter_blocks(cache, cache, one, PLAN)
    with pytest.raises(ValueError, match="cache is"):
        copy_blocks(cache[:, :, 0, 0, :5].contiguous(), one, one, PLAN)
    with pytest.raises(ValueError, match="out is"):
        gather_blocks(cache, one, PLAN, out=cache)
