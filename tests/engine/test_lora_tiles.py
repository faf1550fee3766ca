"""The native LoRA backend in matrix tiles: how far from exact, and that no bit depends on a row's place in a tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.artifact import (
    HEAD,
    AdapterArtifact,
    AdapterLimits,
    LoraPair,
    ModelShape,
    ModuleName,
    read_adapter,
)
from loraplex_engine.lora.backend import NativeLora
from loraplex_engine.lora.sites import SITE_INDEX, SITES, site_layouts
from loraplex_engine.lora.weights import pack_native
from loraplex_kernels.cpu.lora import (
    LoraKernel,
    LoraStep,
    SiteFormat,
    padded_rank,
)
from torch import Tensor

from tests.engine.test_lora_backend import (
    ODD_SHAPE,
    Slots,
    open_native,
    random_rows,
    run,
    score,
)
from tests.support.adapter_files import (
    ALL_LINEARS,
    OUTSIDE,
    TINY_SHAPE,
    bf16_bits,
    encode_tensors,
    lora_config,
    lora_tensors,
    make_adapter,
    native_cache_dir,
    write_folder,
)
from tests.support.tile_state import leaves_tiles_in_use

BF16 = torch.bfloat16
# Every kind of last step and block: below and at half a tile, odd, of one step and of several.
RANKS = [1, 5, 8, 13, 16, 24, 31, 33, 48, 64, 256]


@pytest.fixture(scope="module")
def packer(pytestconfig: pytest.Config) -> LoraKernel:
    """Lays out weights on any CPU."""
    return LoraKernel(native_cache_dir(pytestconfig))


@pytest.fixture(scope="module")
def kernel(packer: LoraKernel) -> LoraKernel:
    if not packer.has_tiles:
        pytest.skip("this CPU, or its kernel, has no matrix tiles (AMX) for bf16")
    return packer


def make_adapters(folder: Path, shape: ModelShape, dtype: str = "BF16") -> list[AdapterArtifact]:
    linears = [*ALL_LINEARS, *OUTSIDE]
    return [
        make_adapter(folder / str(r), shape, rank=r, linears=linears, seed=r, dtype=dtype)
        for r in RANKS
    ]


def add_exactly(y_N: Tensor, size_N: Tensor, pair: LoraPair, x_K: Tensor, u: float) -> None:
    """y += the pair's delta in fp64; size += the most that the kernel's may differ from it, to first order.

    u is fp32's unit roundoff. Each of n products is rounded and added with at most one rounding of each, whatever
    the order, so a sum is within 2 n u of the sum of its terms' sizes. h is scaled, within u, and split, within
    2^-16. The sums over lo and hi are of 2 R terms. What is not stored in bf16 is in two planes, within 2^-16, and
    sums have twice the terms. A low plane is within 2^-8, so that the terms of all add up to a little more.
    """
    planes = 1 if pair.a.dtype == "BF16" else 2
    a_RK, b_NR = (torch.from_numpy(t.to_float32().copy()).double() for t in (pair.a, pair.b))
    h_R, h_size_R = a_RK @ x_K.double(), a_RK.abs() @ x_K.double().abs()
    y_N += pair.scale * (b_NR @ h_R)
    num_inputs, rank = x_K.shape[0] + 31, padded_rank(pair.rank)
    of_weights = 0 if planes == 1 else 2 * 2**-16
    of_h = 2 * planes * num_inputs * u + u + 2**-16
    of_sum = 4 * planes * rank * u
    terms_N = abs(pair.scale) * (b_NR.abs() @ h_size_R)
    size_N += terms_N * (of_weights + (of_h + of_sum) * (1 + 2**-8) ** 2)


@pytest.mark.parametrize("stored", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("shape", [TINY_SHAPE, ODD_SHAPE], ids=["even", "odd"])
def test_deltas_are_as_near_to_exact_as_their_formats_allow(
    kernel: LoraKernel, tmp_path: Path, shape: ModelShape, stored: str
) -> None:
    artifacts = make_adapters(tmp_path, shape, stored)
    backend = open_native(kernel, artifacts, shape, BF16)
    slots = [index for index in range(len(RANKS)) for _ in range(index * 4 % 23 + 1)] + [-1]
    for site, layout in zip(SITES, site_layouts(shape), strict=True):
        x = random_rows(len(slots), layout.num_inputs, BF16)
        y = random_rows(len(slots), layout.num_outputs, BF16, seed=1)

        result = run(backend, y, x, slots, site, layer=0).double()

        wanted, error = y.double(), torch.zeros(y.shape, dtype=torch.float64)
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            for linear, begin, width in layout.slices:
                part = slice(begin, begin + width)
                pair = artifacts[slot].pairs[ModuleName(0, linear)]
                add_exactly(wanted[row, part], error[row, part], pair, x[row], 2.0**-24)
        # y + d is rounded in fp32 and once more to bf16, whose unit roundoff is 2^-8.
        most = error + (wanted.abs() + error) * (2.0**-8 + 2.0**-24)
        assert ((result - wanted).abs() <= most).all()


def test_deltas_of_the_head_are_as_near(kernel: LoraKernel, tmp_path: Path) -> None:
    artifacts = make_adapters(tmp_path, TINY_SHAPE)
    backend = open_native(kernel, artifacts, TINY_SHAPE, BF16)
    slots = [index % len(RANKS) for index in range(2 * len(RANKS))]
    x = random_rows(len(slots), TINY_SHAPE.hidden_size, BF16)
    y = random_rows(len(slots), TINY_SHAPE.vocab_size - 9, BF16, seed=1)  # no padding ids

    result = score(backend, y, x, slots).double()

    wanted = torch.zeros(len(slots), TINY_SHAPE.vocab_size, dtype=torch.float64)
    error = torch.zeros_like(wanted)
    wanted[:, : y.shape[1]] = y.double()
    for row, slot in enumerate(slots):
        add_exactly(wanted[row], error[row], artifacts[slot].pairs[HEAD], x[row], 2.0**-24)
    wanted, error = wanted[:, : y.shape[1]], error[:, : y.shape[1]]
    most = error + (wanted.abs() + error) * (2.0**-8 + 2.0**-24)
    assert ((result - wanted).abs() <= most).all()


@pytest.mark.parametrize("stored", ["BF16", "F32"])
@pytest.mark.parametrize("shape", [TINY_SHAPE, ODD_SHAPE], ids=["even", "odd"])
def test_a_rows_place_in_a_tile_changes_no_bit(
    kernel: LoraKernel, tmp_path: Path, shape: ModelShape, stored: str
) -> None:
    """One row alone, at each place of segments of every length, in one piece and scattered."""
    artifacts = make_adapters(tmp_path, shape, stored)
    backend = open_native(kernel, artifacts, shape, BF16)
    for site, layout in zip(SITES, site_layouts(shape), strict=True):
        x = random_rows(70, layout.num_inputs, BF16)
        y = random_rows(70, layout.num_outputs, BF16, seed=1)
        for slot in range(len(RANKS)):
            alone = [
                run(backend, y[i : i + 1], x[i : i + 1], [slot], site, 0)[0] for i in range(70)
            ]
            wanted = torch.stack(alone)
            for count in (2, 3, 15, 16, 17, 33, 70):
                together = run(backend, y[:count], x[:count], [slot] * count, site, 0)
                assert torch.equal(together, wanted[:count])
            scattered = [slot if row % 3 else -1 for row in range(70)]
            is_own = torch.tensor(scattered) == slot
            assert torch.equal(run(backend, y, x, scattered, site, 0)[is_own], wanted[is_own])


def test_inf_in_one_row_leaves_its_tile_alone(kernel: LoraKernel, tmp_path: Path) -> None:
    artifacts = make_adapters(tmp_path, ODD_SHAPE)
    backend = open_native(kernel, artifacts, ODD_SHAPE, BF16)
    layout = site_layouts(ODD_SHAPE)[0]
    x = random_rows(16, layout.num_inputs, BF16)
    y = random_rows(16, layout.num_outputs, BF16, seed=1)
    clean = run(backend, y, x, [7] * 16, "qkv", 0)
    x[5], x[9] = float("inf"), float("nan")

    result = run(backend, y, x, [7] * 16, "qkv", 0)

    others = [row for row in range(16) if row not in (5, 9)]
    assert torch.equal(result[others], clean[others])
    assert not torch.isfinite(result[[5, 9]]).any()


def test_weights_for_tiles_refuse_rows_of_fp32(kernel: LoraKernel, tmp_path: Path) -> None:
    artifact = make_adapter(tmp_path, rank=8, linears=ALL_LINEARS)
    packed = pack_native(artifact, TINY_SHAPE, tiles=kernel)
    backend = NativeLora(Slots([packed]), TINY_SHAPE, kernel)
    batch = backend.prepare(np.zeros(2, dtype=np.int32), 0)
    assert batch is not None
    layout = site_layouts(TINY_SHAPE)[0]
    x, y = torch.zeros(2, layout.num_inputs), torch.zeros(2, layout.num_outputs)

    with pytest.raises(ValueError, match="bf16 rows"):
        backend.add(y, x, 0, "qkv", batch)


def test_weights_take_as_few_planes_as_hold_them(packer: LoraKernel, tmp_path: Path) -> None:
    tensors = lora_tensors(linears=ALL_LINEARS)
    rounded = {name: _rounded(values) for name, values in tensors.items()}
    too_large = {name: values + np.float32(3.4e38) for name, values in tensors.items()}

    def format_of(name: str, tensors: dict[str, Any], dtype: str) -> SiteFormat:
        config = lora_config(target_modules=list(ALL_LINEARS))
        write_folder(tmp_path / name, config, encode_tensors(tensors, dtype=dtype))
        artifact = read_adapter(tmp_path / name, limits=AdapterLimits(max_norm=float("inf")))
        packed = pack_native(artifact, TINY_SHAPE, tiles=packer)
        return SiteFormat(packed.sites["format"][SITE_INDEX["qkv"]])

    assert format_of("bf16", tensors, "BF16") is SiteFormat.TILES
    assert format_of("fp32 of bf16's values", rounded, "F32") is SiteFormat.TILES
    assert format_of("fp32", tensors, "F32") is SiteFormat.SPLIT_TILES
    assert format_of("fp16", tensors, "F16") is SiteFormat.SPLIT_TILES
    assert format_of("beyond bf16", too_large, "F32") is SiteFormat.FP32


def _rounded(values: Any) -> Any:
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)


def test_two_planes_hold_fp16_exactly_and_fp32_nearly(packer: LoraKernel) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    floats = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)

    kept = [_sum_of_planes(packer, values) for values in (halves, floats)]

    assert np.array_equal(kept[0], halves.astype(np.float64))
    assert (np.abs(kept[1] - floats) <= 2.0**-16 * np.abs(floats)).all()


def _sum_of_planes(packer: LoraKernel, values: Any) -> Any:
    """Of the outputs of an adapter of rank 1, in order."""
    assert packer.count_planes(values) == 2
    packed = packer.tiled_outputs(values.reshape(-1, 1), 2)[:, :, 0, :, 0]
    wide = (packed.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return wide.sum(axis=1).reshape(-1)[: len(values)]


@pytest.mark.parametrize(
    ("weight", "planes"),
    [(0.0, 1), (-1.5, 1), (1 + 2**-9, 2), (3.3895e38, 1), (3.3961e38, 2), (3.3962e38, 0)],
)
def test_planes_end_where_bf16_rounds_to_infinity(
    packer: LoraKernel, weight: float, planes: int
) -> None:
    largest = float(torch.finfo(BF16).max)
    weights = np.array([1.0, largest if planes == 1 and weight > 1 else weight], dtype=np.float32)

    assert packer.count_planes(weights) == planes
    assert bool(torch.isfinite(torch.from_numpy(weights).bfloat16()).all()) is (planes > 0)


def test_adapters_of_every_dtype_serve_beside_each_other(
    kernel: LoraKernel, tmp_path: Path
) -> None:
    artifacts = [
        make_adapter(tmp_path / dtype, rank=16, linears=ALL_LINEARS, dtype=dtype, seed=1)
        for dtype in ("BF16", "F32", "F16")
    ]
    packed = [pack_native(artifact, TINY_SHAPE, tiles=kernel) for artifact in artifacts]
    packed.append(pack_native(artifacts[1], TINY_SHAPE))  # as one beyond bf16 would be
    together = NativeLora(Slots(packed), TINY_SHAPE, kernel)
    slots = [index % 4 for index in range(50)]
    for site, layout in zip(SITES, site_layouts(TINY_SHAPE), strict=True):
        x = random_rows(50, layout.num_inputs, BF16)
        y = random_rows(50, layout.num_outputs, BF16, seed=1)

        result = run(together, y, x, slots, site)

        for slot, weights in enumerate(packed):
            rows = torch.tensor(slots) == slot
            apart = NativeLora(Slots([weights]), TINY_SHAPE, kernel)
            own = run(apart, y[rows], x[rows], [0] * int(rows.sum()), site)
            assert torch.equal(result[rows], own)


def test_size_of_an_adapter_in_tiles_counts_its_padding(packer: LoraKernel, tmp_path: Path) -> None:
    """What the pool is told is all that is mapped: weights, padding and the table."""
    artifact = make_adapter(tmp_path, ODD_SHAPE, rank=5, linears=["q_proj", "k_proj"])

    packed = pack_native(artifact, ODD_SHAPE, tiles=packer)

    # Ranks 6 + 6, to 16; K from 75 to 96; outputs 75 and 25 to 80 and 32; parts begin at multiples of 64 bytes.
    weights = [16 * 96, 80 * 6, 32 * 6]
    assert packed.memory.nbytes == sum(-(-2 * count // 64) * 64 for count in weights)
    assert packed.size_bytes == packed.memory.nbytes + packed.sites.nbytes


@pytest.mark.parametrize(
    ("rank", "padded"), [(0, 0), (1, 2), (8, 8), (31, 32), (32, 32), (33, 36), (48, 48), (97, 104)]
)
def test_ranks_are_padded_to_equal_even_steps(rank: int, padded: int) -> None:
    assert padded_rank(rank) == padded


def test_layout_in_tiles(packer: LoraKernel) -> None:
    """Pairs of k, or of ranks, side by side; see lora_tiles.h."""
    random = np.random.default_rng(0)
    q_RK, k_RK, b_NR = (
        bf16_bits(random.standard_normal(size, dtype=np.float32))
        for size in ((16, 40), (5, 40), (20, 5))
    )

    a, b = packer.tiled_inputs([q_RK, k_RK], 1), packer.tiled_outputs(b_NR, 1)[:, 0]

    whole, half = a[: 32 * 16 * 2].reshape(32, 16, 2), a[32 * 16 * 2 :].reshape(32, 8, 2)
    assert np.array_equal(whole.transpose(1, 0, 2).reshape(16, 64)[:, :40], q_RK)
    assert np.array_equal(half.transpose(1, 0, 2).reshape(8, 64)[:5, :40], k_RK)
    assert not whole[20:].any()
    assert not half[20:].any()
    assert not half[:, 5:].any()
    assert b.shape == (2, 3, 16, 2)
    assert np.array_equal(b.transpose(0, 2, 1, 3).reshape(32, 6)[:20, :5], b_NR)
    assert not b[1, :, 4:].any()
    assert not b[:, 2, :, 1].any()


def test_planes_of_a_block_follow_each_other(packer: LoraKernel) -> None:
    weights = np.full((24, 32), 1 + 2**-12, dtype=np.float32)
    low, high = bf16_bits(np.array([2**-12, 1], dtype=np.float32)).tolist()

    a, b = packer.tiled_inputs([weights], 2), packer.tiled_outputs(weights, 2)

    runs = np.split(a, np.flatnonzero(np.diff(a)) + 1)
    assert [(len(run), run[0]) for run in runs] == [
        (512, low),
        (512, high),
        (256, low),
        (256, high),
    ]
    assert (b[0, 0] == low).all()
    assert (b[0, 1] == high).all()
    assert (b[1, :, :, 8:] == 0).all()


@pytest.mark.parametrize("num_rows", [1, 40])
def test_tiles_are_released(
    kernel: LoraKernel, tmp_path: Path, pytestconfig: pytest.Config, num_rows: int
) -> None:
    artifact = make_adapter(tmp_path, rank=8, linears=ALL_LINEARS)
    backend = open_native(kernel, [artifact], TINY_SHAPE, BF16)
    layout = site_layouts(TINY_SHAPE)[0]
    x = random_rows(num_rows, layout.num_inputs, BF16)
    y = random_rows(num_rows, layout.num_outputs, BF16, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        in_use = leaves_tiles_in_use(
            lambda: run(backend, y, x, [0] * num_rows, "qkv"), native_cache_dir(pytestconfig)
        )
    finally:
        torch.set_num_threads(before)

    assert not in_use


def _step_of(packer: LoraKernel, folder: Path, rows: list[int], sizes: list[int]) -> LoraStep:
    artifact = make_adapter(folder, rank=8, linears=ALL_LINEARS)
    return LoraStep(
        site_tables=[pack_native(artifact, TINY_SHAPE, tiles=packer).sites] * len(sizes),
        group_sizes=np.array(sizes, dtype=np.int32),
        rows=np.array(rows, dtype=np.int32),
        max_inputs=TINY_SHAPE.hidden_size,
        num_threads=1,
    )


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [([0, 2, 1, 3], [4]), ([1, 1], [2]), ([4, 5, 3, 2], [2, 2]), ([1, 2, 0], [0, 3])],
)
def test_rows_that_do_not_ascend_within_a_group_are_refused(
    packer: LoraKernel, tmp_path: Path, rows: list[int], sizes: list[int]
) -> None:
    """A chunk whose last row is its first and as many further is read as one piece."""
    with pytest.raises(ValueError, match="do not ascend"):
        _step_of(packer, tmp_path, rows, sizes)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [([7], [1]), ([4, 5, 0, 3], [2, 2]), ([2, 1, 0], [1, 1, 1]), ([5, 6, 1], [0, 2, 0, 1, 0])],
)
def test_groups_may_lie_in_any_order(
    packer: LoraKernel, tmp_path: Path, rows: list[int], sizes: list[int]
) -> None:
    _step_of(packer, tmp_path, rows, sizes)
