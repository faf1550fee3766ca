"""Chunked prefill attention, interpreted, against the reference in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels.paged_prefill import paged_prefill, queries_per_task
from loraplex_kernels.plans import Plan
from loraplex_kernels.reference_attention import paged_attention
from torch import Tensor

from tests.support.kernel_inputs import normal
from tests.support.paged_cache import PagedCache, paged_cache

SMALL = Plan({"BLOCK_M": 16, "BLOCK_N": 16}, 4, 1, "test")
TALL = Plan({"BLOCK_M": 64, "BLOCK_N": 32}, 4, 1, "test")
# Against fp64 with the same rounded inputs: shares are rounded to the dtype before the second product.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

Part = tuple[int, int, int]  # sequence, first position, stop


def attend(
    queries: list[Tensor],
    cache: PagedCache,
    parts: list[Part],
    plan: Plan,
    *,
    num_heads: int,
    **more: Any,
) -> list[Tensor]:
    """The parts' queries in one step, one poisoned row behind; a tensor of rows for each part."""
    num_kv_heads, head_dim = cache.kv.shape[2], cache.kv.shape[4]
    most = queries_per_task(plan, num_heads=num_heads, num_kv_heads=num_kv_heads)
    tasks, row = [], 0
    for sequence, start, stop in parts:
        for first in range(start, stop, most):
            tasks.append([row, min(most, stop - first), first, sequence * cache.width])
            row += min(most, stop - first)
    q = torch.cat([queries[s][start:stop] for s, start, stop in parts])
    q = torch.cat([q, torch.full_like(q[:1], torch.nan)])
    out = paged_prefill(
        q,
        cache.kv,
        torch.tensor(tasks, dtype=torch.int32, device=q.device),
        cache.table,
        torch.full((row + 1, num_heads * head_dim), torch.nan, dtype=q.dtype, device=q.device),
        plan,
        num_heads=num_heads,
        scale=cache.scale,
        **more,
    )
    assert out[row].isnan().all(), "a row of no task was written"
    return list(out[:row].split([stop - start for _s, start, stop in parts]))


def expected(
    query: Tensor, cache: PagedCache, part: Part, *, num_heads: int, **more: Any
) -> Tensor:
    sequence, start, stop = part
    return paged_attention(
        query[start:stop].cpu(),
        cache.kv.cpu(),
        [cache.blocks(sequence).cpu()] * (stop - start),
        list(range(start, stop)),
        num_heads=num_heads,
        scale=None if cache.scale is None else cache.scale.cpu(),
        **more,
    )


def draw(lengths: list[int], width: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [normal((n, width), dtype, device, seed=i) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_chunks_on_prefixes_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    lengths = [1, 37, 61]
    cache = paged_cache(
        lengths, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, device=device
    )
    queries = draw(lengths, 6 * 64 + 32, dtype, device)
    parts = [(2, 40, 61), (0, 0, 1), (1, 0, 37)]

    outputs = attend(queries, cache, parts, SMALL, num_heads=6)

    tolerance = TOLERANCES[dtype]
    for part, output in zip(parts, outputs, strict=True):
        reference = expected(queries[part[0]], cache, part, num_heads=6)
        torch.testing.assert_close(output.cpu().double(), reference, atol=tolerance, rtol=tolerance)


@settings(max_examples=7, deadline=None)
@given(
    ends=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (16, 1), (5, 5)]),
    head_dim=st.sampled_from([16, 64, 96, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    plan=st.sampled_from([SMALL, TALL]),
    kv_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    window=st.sampled_from([None, 1, 9, 40]),
    soft_cap=st.sampled_from([None, 2.0]),
)
def test_any_shape_equals_the_reference(
    device: torch.device,
    ends: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    plan: Plan,
    kv_dtype: torch.dtype | None,
    window: int | None,
    soft_cap: float | None,
) -> None:
    (num_heads, num_kv_heads), lengths = heads, [start + count for start, count in ends]
    cache = paged_cache(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
    )
    queries = draw(lengths, num_heads * head_dim, torch.float32, device)
    parts = [(i, start, start + count) for i, (start, count) in enumerate(ends)]
    more = {"num_heads": num_heads, "window": window, "soft_cap": soft_cap}

    outputs = attend(queries, cache, parts, plan, **more)

    for part, output in zip(parts, outputs, strict=True):
        reference = expected(queries[part[0]], cache, part, **more)
        torch.testing.assert_close(output.cpu().double(), reference, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_a_querys_bits_do_not_depend_on_chunks_neighbours_or_blocks(
    kv_dtype: torch.dtype | None, window: int | None, device: torch.device
) -> None:
    lengths = [45, 30]
    more: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_dim": 32,
        "block_size": 8,
        "dtype": torch.bfloat16,
        "kv_dtype": kv_dtype,
        "device": device,
    }
    queries = draw(lengths, 3 * 32, torch.bfloat16, device)
    cache = paged_cache(lengths, **more)
    whole = attend(queries, cache, [(0, 0, 45)], SMALL, num_heads=3, window=window)[0]

    elsewhere = paged_cache(lengths, place_seed=9, **more)
    cuts = [0, 7, 8, 25, 45]
    chunks = [
        attend(queries, elsewhere, [(1, 3, 30), (0, a, b)], SMALL, num_heads=3, window=window)[1]
        for a, b in itertools.pairwise(cuts)
    ]

    assert torch.equal(torch.cat(chunks), whole)


def test_a_hostile_neighbour_stays_alone(device: torch.device) -> None:
    lengths = [29, 29]
    cache = paged_cache(
        lengths, num_kv_heads=1, head_dim=32, block_size=8, dtype=torch.bfloat16, device=device
    )
    queries = draw(lengths, 64, torch.bfloat16, device)
    parts = [(1, 10, 29), (0, 10, 29)]
    before = attend(queries, cache, parts, SMALL, num_heads=2)[1]

    hostile = cache.blocks(1).long()
    cache.kv[:, hostile] = torch.nan
    queries[1].fill_(torch.inf)
    attacker, after = attend(queries, cache, parts, SMALL, num_heads=2)

    assert torch.equal(after, before)
    assert not attacker.isfinite().any()


def test_nan_keys_behind_a_query_do_not_change_its_scores(device: torch.device) -> None:
    """A draft's key that is not finite: earlier queries of the task select it away."""
    cache = paged_cache(
        [20], num_kv_heads=1, head_dim=32, block_size=8, dtype=torch.float32, device=device
    )
    queries = draw([20], 64, torch.float32, device)
    before = attend(queries, cache, [(0, 16, 20)], SMALL, num_heads=2)[0]

    cache.kv[0, int(cache.blocks(0)[2]), :, 19 % 8] = torch.nan
    after = attend(queries, cache, [(0, 16, 20)], SMALL, num_heads=2)[0]

    assert torch.equal(after[:3], before[:3])
    assert after[3].isnan().all()


def test_more_heads_than_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads: 17 share"):
        paged_prefill(
            torch.zeros(1, 17 * 32),
            torch.zeros(2, 3, 1, 8, 32),
            torch.zeros(1, 4, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, 17 * 32),
            SMALL,
            num_heads=17,
        )
