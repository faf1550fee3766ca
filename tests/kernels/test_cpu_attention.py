"""How the native attention kernel cuts a step's work, and its arithmetics by themselves; what backends have in
common: tests/engine/test_attention_backends.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_kernels.cpu import attention, build
from loraplex_kernels.cpu.attention import NativeAttentionKernel
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.adapter_files import native_cache_dir
from tests.support.cpu import cpu_flags
from tests.support.tile_state import leaves_tiles_in_use

HEAD_DIM = 8


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> NativeAttentionKernel:
    try:
        return NativeAttentionKernel(
            num_heads=2,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            block_size=16,
            dtype=torch.float32,
            cache_dir=native_cache_dir(request.config),
            num_threads=4,
        )
    except NativeBuildError as error:
        pytest.skip(str(error))


def test_parts_of_split_items_are_bounded_in_memory_and_change_no_bit(
    kernel: NativeAttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, num_rows = 2048, 3
    rng = np.random.default_rng(0)
    kv = torch.from_numpy(rng.standard_normal((length, 2 * HEAD_DIM), np.float32))
    q = torch.from_numpy(rng.standard_normal((num_rows, 2 * HEAD_DIM), np.float32))
    computed, scheduled = np.full(num_rows, length - 1, np.int32), np.ones(num_rows, np.int32)
    table = np.tile(np.arange(length // 16, dtype=np.int32), (num_rows, 1))

    outputs, merges, sizes = [], [], []
    one_row = (length // attention.TILE) * (HEAD_DIM + 8) * 2
    for budget in (2**24, one_row, 0):
        monkeypatch.setattr(attention, "_MAX_PARTIALS", budget)
        work = kernel.plan(computed, scheduled, table)
        out = torch.empty_like(q)
        kernel.forward(q, out, kv, work)
        outputs.append(out)
        merges.append(len(work.merges))
        sizes.append(work._partials.size)

    assert merges == [3, 1, 0]
    assert sizes == [3 * one_row, one_row, 0]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


Open = Callable[..., NativeAttentionKernel]


@pytest.fixture(params=["fp32", "bf16", "bf16 in tiles"])
def open_kernel(request: pytest.FixtureRequest) -> Open:
    """The kernel in one of its arithmetics; a CPU without tiles in hardware skips that one."""
    dtype = torch.float32 if request.param == "fp32" else torch.bfloat16

    def open_(**more: Any) -> NativeAttentionKernel:
        try:
            return NativeAttentionKernel(
                dtype=dtype,
                cache_dir=native_cache_dir(request.config),
                in_tiles=request.param == "bf16 in tiles",
                **{"num_heads": 6, "num_kv_heads": 2, "block_size": 16, "num_threads": 2, **more},
            )
        except NativeBuildError as error:
            pytest.skip(str(error))
        except ValueError as error:
            if "no bf16 in tiles" not in str(error):
                raise
            pytest.skip(str(error))

    return open_


@dataclass
class Sequence:
    """One sequence in a cache of its own, block after block in an order of its own."""

    kernel: NativeAttentionKernel
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        shape = self.kernel._shape
        self.heads, self.kv_heads, self.width = (
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.block_size, self.window = shape.block_size, shape.window or self.length
        dtype = torch.bfloat16 if shape.is_bf16 else torch.float32
        random = torch.Generator().manual_seed(self.seed)
        self.q = torch.randn(self.length, self.heads * self.width, generator=random).to(dtype)
        self.kv = torch.randn(self.length, 2, self.kv_heads, self.width, generator=random).to(dtype)
        num_blocks = -(-self.length // self.block_size)
        self.table = np.random.default_rng(self.seed).permutation(num_blocks).astype(np.int32)

    def run(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) in one step; what lies behind them in the cache is not yet written."""
        num_slots = len(self.table) * self.block_size
        cache = torch.full((num_slots, *self.kv.shape[1:]), torch.nan, dtype=self.kv.dtype)
        position = np.arange(stop)
        slot = self.table[position // self.block_size] * self.block_size
        cache[torch.from_numpy(slot + position % self.block_size)] = self.kv[:stop]
        q = self.q[start:stop]
        out = torch.empty_like(q)
        work = self.kernel.plan(
            np.array([start], np.int32), np.array([stop - start], np.int32), self.table[None]
        )
        self.kernel.forward(q, out, cache, work)
        return out

    def mean_and_bound(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What rows should be in fp64, and how far off they may be.

        A weight is off by its score's error (a sum of products in fp32, then scaled), by the exponential's and
        the joining of tiles, and in tiles in hardware by its rounding to bf16: relative error e. Weights are divided by
        their sum, so the mean is off by e / (1 - e) times the values' mean distance from it, and by what sums
        of products in fp32 lose. Last, it is rounded to the output's dtype.
        """
        q, (k, v) = self.q.double(), self.kv.double().unbind(1)
        q = q.view(self.length, self.heads, self.width)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scale = self.width**-0.5
        score = torch.einsum("qhd,khd->hqk", q, k) * scale
        size = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * scale
        behind = torch.arange(self.length)[:, None] - torch.arange(self.length)
        is_seen = (behind >= 0) & (behind < self.window)
        weight = score.masked_fill(~is_seen, -torch.inf).softmax(-1)
        mean = torch.einsum("hqk,khd->qhd", weight, v)

        fp32, bf16 = 2.0**-24, 2.0**-8
        num_tiles = -(-self.length // attention.TILE)
        # Products, scale, the maximum's difference: each rounds what is at most a row's largest sum of sizes.
        off = 2 * (self.width + 4) * fp32 * size.masked_fill(~is_seen, 0).amax(-1)
        off += 2.0**-21 * (1 + num_tiles) + (bf16 + 3e-6 if self.kernel.in_tiles else 0.0)
        off = (off / (1 - off)).T[..., None]
        distance = torch.stack(
            [
                torch.einsum("hk,khd->hd", weight[:, i], (v - mean[i]).abs())
                for i in range(self.length)
            ]
        )
        size_of_sum = torch.einsum("hqk,khd->qhd", weight, v.abs())
        bound = off * distance + (self.length + 8 * num_tiles) * fp32 * size_of_sum
        last = bf16 if self.q.dtype == torch.bfloat16 else fp32
        bound = bound + last * (mean.abs() + bound)
        return mean.flatten(1), bound.flatten(1)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
@pytest.mark.parametrize("window", [None, 50])
def test_results_are_as_near_as_their_formats_allow(
    open_kernel: Open, head_dim: int, window: int | None
) -> None:
    sequence = Sequence(open_kernel(head_dim=head_dim, window=window), 150)

    mean, bound = sequence.mean_and_bound()

    assert ((sequence.run(0, 150).double() - mean).abs() <= bound).all()


@pytest.mark.parametrize(
    "more",
    [
        {"head_dim": 64},
        {"head_dim": 40, "block_size": 5},
        {"head_dim": 8, "num_heads": 17, "num_kv_heads": 1},
        {"head_dim": 96, "num_heads": 5, "num_kv_heads": 5, "window": 70},
        {"head_dim": 64, "soft_cap": 3.0, "window": 33},
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_chunk_and_with_any_number_of_threads(
    open_kernel: Open, more: dict[str, Any]
) -> None:
    length = 400
    whole = Sequence(open_kernel(**more, num_threads=1), length).run(0, length)

    for num_threads in (1, 2, 4):
        sequence = Sequence(open_kernel(**more, num_threads=num_threads), length)
        for start, stop in ((0, 400), (399, 400), (396, 400), (300, 330), (60, 130), (63, 65)):
            assert torch.equal(sequence.run(start, stop), whole[start:stop]), (start, stop)
    alone = Sequence(open_kernel(**more, num_threads=1), length)
    rows = range(0, length, 7)
    assert torch.equal(torch.cat([alone.run(i, i + 1) for i in rows]), whole[list(rows)])


def test_bits_do_not_depend_on_the_blocks_that_keys_lie_in(open_kernel: Open) -> None:
    """Sixteen keys that lie side by side are read there by few rows; others are gathered."""
    expected = Sequence(open_kernel(head_dim=64), 200).run(0, 200)

    for block_size in (1, 8, 24, 48):
        sequence = Sequence(open_kernel(head_dim=64, block_size=block_size), 200)
        assert torch.equal(sequence.run(0, 200), expected)
        for row in (15, 16, 100, 199):
            assert torch.equal(sequence.run(row, row + 1), expected[row : row + 1])


@pytest.mark.parametrize("more", [{}, {"window": 50}, {"soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_wide_vectors_have_the_bits_of_narrow_ones(
    open_kernel: Open, monkeypatch: pytest.MonkeyPatch, head_dim: int, more: dict[str, Any]
) -> None:
    if not {"avx512f", "avx512bw", "avx512dq"} <= cpu_flags():
        pytest.skip("this CPU has no AVX-512: there are no wide vectors here")
    wide = open_kernel(head_dim=head_dim, **more)
    if wide.in_tiles:
        pytest.skip("tiles in hardware have bits of their own")
    flags = [flag.replace("-march=native", "-march=haswell") for flag in build.FLAGS]
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    narrow = open_kernel(head_dim=head_dim, **more)

    for start, stop in ((0, 150), (149, 150), (60, 70)):
        found = [Sequence(kernel, 150).run(start, stop) for kernel in (wide, narrow)]
        assert torch.equal(*found)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_a_row_does_not_see_does_not_reach_it_though_its_neighbours_see_it(
    open_kernel: Open, window: int | None, bad: float, part: int
) -> None:
    """Rows that share a tile of keys, and a tile of rows, with those that see it."""
    sequence = Sequence(open_kernel(head_dim=64, window=window), 130)
    expected = sequence.run(0, 130)
    sequence.kv[70, part, 1] = bad

    result = sequence.run(0, 130)

    sees = torch.arange(130) >= 70
    if window is not None:
        sees &= torch.arange(130) < 70 + window
    assert torch.equal(result[~sees], expected[~sees])
    # The other kv head's rows, too, are what they were.
    assert torch.equal(result[:, : 3 * 64], expected[:, : 3 * 64])
    if part == 1 or np.isnan(bad):
        assert not result[sees][:, 3 * 64 :].isfinite().any()
    rows = range(60, 95)
    alone = torch.cat([sequence.run(i, i + 1) for i in rows])
    assert torch.equal(alone.nan_to_num(), result[list(rows)].nan_to_num())


def test_tiles_that_the_cpu_does_not_have_are_refused(request: pytest.FixtureRequest) -> None:
    with pytest.raises(ValueError, match="no bf16 in tiles"):
        NativeAttentionKernel(
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            block_size=16,
            dtype=torch.float32,
            cache_dir=native_cache_dir(request.config),
            num_threads=1,
            in_tiles=True,
        )


@pytest.mark.parametrize("open_kernel", ["bf16 in tiles"], indirect=True)
def test_tiles_are_released(open_kernel: Open, pytestconfig: pytest.Config) -> None:
    sequence = Sequence(open_kernel(head_dim=64, num_threads=1), length=40)

    for start in (0, 39):
        assert not leaves_tiles_in_use(
            lambda start=start: sequence.run(start, 40), native_cache_dir(pytestconfig)
        )
