"""Split-KV decode attention, interpreted, against the reference in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels.paged_decode import MAX_SPLITS, Splitting, paged_decode
from loraplex_kernels.plans import Plan, open_plans
from loraplex_kernels.reference_attention import paged_attention
from loraplex_kernels.support import ARCHITECTURES
from torch import Tensor

from tests.support.kernel_inputs import normal
from tests.support.paged_cache import PagedCache, paged_cache

# Small tiles: the interpreter's time is the number of tiles, and borders are what can go wrong.
SPLIT = Plan({"BLOCK_N": 16, "NUM_SPLITS": 3, "LEAST_PART": 32}, 4, 1, "test")
INVARIANT = Plan({"BLOCK_N": 16, "SPLIT_SIZE": 32, "PROGRAMS": 2}, 4, 1, "test")
PLANS = {"split": SPLIT, "invariant": INVARIANT}
# Against fp64 with the same rounded inputs: shares are rounded to the dtype before the second product.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def decode(
    q: Tensor,
    cache: PagedCache,
    plan: Plan,
    *,
    num_heads: int,
    rows: list[int] | None = None,
    workspace: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """One query for each sequence; outputs and workspace start as NaN."""
    count = len(cache.lengths)
    rows = list(range(count)) if rows is None else rows
    entry = torch.tensor(
        [
            [row, n, i * cache.width, -1]
            for i, (row, n) in enumerate(zip(rows, cache.lengths, strict=True))
        ],
        dtype=torch.int32,
        device=q.device,
    )
    head_dim = cache.kv.shape[4]
    max_length = max(*cache.lengths, 1)
    if workspace is None:
        size = Splitting.of(plan, max_length).workspace_size(count, num_heads, head_dim)
        workspace = torch.full((size,), torch.nan, device=q.device)
    return paged_decode(
        q,
        cache.kv,
        entry,
        cache.table,
        torch.full((len(q), num_heads * head_dim), torch.nan, dtype=q.dtype, device=q.device),
        workspace,
        plan,
        num_heads=num_heads,
        max_length=max_length,
        scale=cache.scale,
        **more,
    )


def expected(q: Tensor, cache: PagedCache, *, num_heads: int, **more: Any) -> Tensor:
    return paged_attention(
        q.cpu(),
        cache.kv.cpu(),
        [cache.blocks(i).cpu() for i in range(len(cache.lengths))],
        [n - 1 for n in cache.lengths],
        num_heads=num_heads,
        scale=None if cache.scale is None else cache.scale.cpu(),
        **more,
    )


def assert_near(out: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), reference, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_equals_the_reference(plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
    cache = paged_cache(
        [1, 33, 70, 16], num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, device=device
    )
    q = normal((4, 6 * 64 + 32), dtype, device)

    out = decode(q, cache, plan, num_heads=6)

    assert_near(out, expected(q, cache, num_heads=6), dtype)


@settings(max_examples=7, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 75), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (17, 1), (5, 5)]),
    head_dim=st.sampled_from([16, 64, 96, 128]),
    block_size=st.sampled_from([8, 16, 32]),
    plan=st.sampled_from(list(PLANS.values())),
    kv_dtype=st.sampled_from([None, *QUANTIZED]),
    window=st.sampled_from([None, 1, 20, 40]),
    soft_cap=st.sampled_from([None, 2.0]),
)
def test_any_shape_equals_the_reference(
    device: torch.device,
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    plan: Plan,
    kv_dtype: torch.dtype | None,
    window: int | None,
    soft_cap: float | None,
) -> None:
    num_heads, num_kv_heads = heads
    cache = paged_cache(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
    )
    q = normal((len(lengths), num_heads * head_dim), torch.float32, device)

    out = decode(q, cache, plan, num_heads=num_heads, window=window, soft_cap=soft_cap)

    reference = expected(q, cache, num_heads=num_heads, window=window, soft_cap=soft_cap)
    assert_near(out, reference, torch.float32)


@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
def test_quantized_keys_and_values_stay_near_the_exact_ones(
    kv_dtype: torch.dtype, device: torch.device
) -> None:
    exact = paged_cache(
        [90], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, device=device
    )
    rounded = paged_cache(
        [90],
        num_kv_heads=1,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=device,
    )
    q = normal((1, 2 * 64), torch.float32, device)

    out, near = decode(q, rounded, SPLIT, num_heads=2).cpu(), expected(q, exact, num_heads=2)

    deviation = quantization_deviation(q, exact, kv_dtype)
    # Of 128 numbers the worst is likely to be 3 deviations away. Seen: 1.7 in int8 and in fp8.
    assert ((out - near).abs() / deviation).max() < 4


def quantization_deviation(q: Tensor, exact: PagedCache, kv_dtype: torch.dtype) -> Tensor:
    """Standard deviation of the outputs of one query, of each head, over one KV head's cache, to the first order, if
    roundings of keys and values are independent, and uniform over the format's step: (1, heads * D)."""
    blocks, (length,) = exact.blocks(0).long().cpu(), exact.lengths
    position = torch.arange(length)
    at = exact.kv.cpu().double()[:, :, 0]
    size = at.shape[2]
    k_LD, v_LD = at[:, blocks[position // size], position % size]
    q_HD = q.cpu().double().view(-1, k_LD.shape[1])
    share_HL = torch.softmax(q_HD @ k_LD.T / k_LD.shape[1] ** 0.5, dim=1)

    def variance(x_LD: Tensor) -> Tensor:
        # Half a step: amax / 254 in int8, a 16th of the number in fp8.
        half = x_LD.abs().amax(1, keepdim=True).expand_as(x_LD) / 254
        if kv_dtype == torch.float8_e4m3fn:
            half = x_LD.abs() / 16
        return half**2 / 3

    scores_HL = q_HD**2 @ variance(k_LD).T / k_LD.shape[1]
    out_HD = share_HL @ v_LD
    squares_HD = share_HL**2 @ variance(v_LD)
    distance_HLD = v_LD - out_HD[:, None]
    squares_HD += torch.einsum("hl,hl,hld->hd", share_HL**2, scores_HL, distance_HLD**2)
    return squares_HD.sqrt().view(1, -1)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_entry_without_keys_becomes_zero_and_others_are_left(
    plan: Plan, device: torch.device
) -> None:
    cache = paged_cache(
        [20, 20], num_kv_heads=1, head_dim=32, block_size=8, dtype=torch.float32, device=device
    )
    q = normal((4, 64), torch.float32, device)
    q[3] = torch.nan

    out = decode(q, replace(cache, lengths=(20, 0)), plan, num_heads=2, rows=[1, 3])

    assert out[3].eq(0).all()
    assert out[[0, 2]].isnan().all()
    first = PagedCache(cache.kv, None, cache.table, cache.width, (20,))
    assert_near(out[1:2], expected(q[1:2], first, num_heads=2), torch.float32)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_hostile_neighbour_stays_alone(plan: Plan, device: torch.device) -> None:
    more: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_dim": 32,
        "block_size": 8,
        "dtype": torch.bfloat16,
    }
    cache = paged_cache([37, 37], device=device, **more)
    q = normal((2, 64), torch.bfloat16, device)
    before = decode(q, cache, plan, num_heads=2)

    hostile = cache.blocks(1).long()
    cache.kv[:, hostile] = torch.nan
    cache.kv[0, hostile[0]] = torch.inf
    q[1] = torch.inf
    after = decode(q, cache, plan, num_heads=2)

    assert torch.equal(after[0], before[0])
    assert not after[1].isfinite().any()


def test_a_scale_that_is_not_a_number_is_seen(device: torch.device) -> None:
    cache = paged_cache(
        [30],
        num_kv_heads=1,
        head_dim=32,
        block_size=8,
        dtype=torch.bfloat16,
        kv_dtype=torch.int8,
        device=device,
    )
    assert cache.scale is not None
    cache.scale[1, int(cache.blocks(0)[1]), 0, 3] = torch.nan

    out = decode(normal((1, 64), torch.bfloat16, device), cache, SPLIT, num_heads=2)

    assert not out.isfinite().any()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_invariant_bits_are_a_rows_own(kv_dtype: torch.dtype | None, device: torch.device) -> None:
    """Whatever is beside a row, wherever its blocks lie, however many programs share its splits."""
    more: dict[str, Any] = {
        "num_kv_heads": 2,
        "head_dim": 32,
        "block_size": 8,
        "dtype": torch.bfloat16,
        "kv_dtype": kv_dtype,
        "device": device,
    }
    q = normal((4, 128), torch.bfloat16, device)
    alone = decode(q[:1], paged_cache([150], **more), INVARIANT, num_heads=4)

    neighbours = paged_cache([150, 9, 70, 2], place_seed=5, **more)
    wider = Plan({**INVARIANT.config, "PROGRAMS": 5}, 4, 1, "test")

    assert torch.equal(decode(q, neighbours, INVARIANT, num_heads=4)[0], alone[0])
    assert torch.equal(decode(q, neighbours, wider, num_heads=4)[0], alone[0])


def test_invariant_splits_follow_the_longest_row_there_may_be() -> None:
    assert Splitting.of(INVARIANT, 100) == Splitting(4, 0, 0, 32, 2)
    assert Splitting.of(INVARIANT, 32 * MAX_SPLITS) == Splitting(MAX_SPLITS, 0, 0, 32, 2)
    assert Splitting.of(INVARIANT, 32 * MAX_SPLITS + 1) == Splitting(33, 0, 0, 64, 2)
    assert Splitting.of(SPLIT, 10**6).workspace_size(2, 4, 64) == 2 * 4 * 3 * 66


def test_a_short_row_is_one_split_and_a_long_one_has_all(device: torch.device) -> None:
    """What a split did not write stays NaN in its planes."""
    cache = paged_cache(
        [20, 32, 33, 150],
        num_kv_heads=1,
        head_dim=16,
        block_size=8,
        dtype=torch.float32,
        device=device,
    )
    workspace = torch.full((4 * 3 * 18,), torch.nan, device=device)
    q = normal((4, 16), torch.float32, device)

    out = decode(q, cache, SPLIT, num_heads=1, workspace=workspace)

    is_written = ~workspace[: 4 * 3 * 16].view(4, 3, 16).isnan().any(2)
    assert is_written.sum(1).tolist() == [1, 1, 2, 3]
    assert_near(out, expected(q, cache, num_heads=1), torch.float32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_plan_leaves_a_long_row_to_one_program(arch: str) -> None:
    """However many rows are beside it: 32k keys are at most 8k in a row, and 512 keys are no more than a part."""
    for entry in open_plans(arch, "fast").entries("paged_decode"):
        config = entry.plan.config
        assert Splitting.of(entry.plan, 32768).programs >= 4
        if entry.when.dtype is None and entry.when.max_tokens is None:
            assert config["LEAST_PART"] == 512
        assert config["LEAST_PART"] % config["BLOCK_N"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry_E4": torch.zeros(1, 4)}, "entry is"),
        ({"workspace": torch.zeros(3)}, "workspace has 3"),
        ({"out_TW": torch.zeros(1, 32)}, "out is"),
        ({"kv": torch.zeros(2, 3, 1, 12, 32)}, "block_size is 12"),
        ({"kv": torch.zeros(2, 3, 1, 8, 24)}, "head_dim is 24"),
        ({"kv": torch.zeros(2, 3, 3, 8, 32)}, "num_heads is 2"),
        ({"kv": torch.zeros(2, 3, 1, 8, 32).half()}, "kv is torch.float16"),
        ({"kv": torch.zeros(2, 3, 1, 8, 32, dtype=torch.int8)}, "scale"),
        ({"q_TC": torch.zeros(1, 63)}, "q is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str) -> None:
    arguments: dict[str, Any] = {
        "q_TC": torch.zeros(1, 64),
        "kv": torch.zeros(2, 3, 1, 8, 32),
        "entry_E4": torch.zeros(1, 4, dtype=torch.int32),
        "table": torch.zeros(1, dtype=torch.int32),
        "out_TW": torch.zeros(1, 64),
        "workspace": torch.zeros(10_000),
    }

    with pytest.raises(ValueError, match=message):
        paged_decode(**{**arguments, **change}, plan=SPLIT, num_heads=2, max_length=8)
