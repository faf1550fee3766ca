"""All backends, Triton's too: the deltas are right, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.artifact import (
    EMBEDDING,
    HEAD,
    AdapterArtifact,
    ModelShape,
    ModuleName,
)
from loraplex_engine.lora.backend import NativeLora, TorchLora
from loraplex_engine.lora.device_slots import pack_device
from loraplex_engine.lora.seam import LoraBackend, LoraSite
from loraplex_engine.lora.sites import SITES, site_layouts
from loraplex_engine.lora.triton_backend import TritonLora, TritonLoraSizes
from loraplex_engine.lora.weights import pack_native, pack_torch
from loraplex_kernels.cpu.lora import LoraKernel
from loraplex_kernels.reference import lora_embed_shrink, lora_expand, lora_shrink
from torch import Tensor

from tests.support.adapter_files import (
    ALL_LINEARS,
    OUTSIDE,
    TINY_SHAPE,
    make_adapter,
    native_cache_dir,
)
from tests.support.lora_inputs import FEW_PROGRAMS

# Sizes that no vector width divides.
ODD_SHAPE = ModelShape(
    num_layers=1,
    hidden_size=75,
    intermediate_size=109,
    num_heads=3,
    num_kv_heads=1,
    head_dim=25,
    vocab_size=64,
)

DTYPES = [torch.float32, torch.bfloat16]

BackendFactory = Callable[[list[AdapterArtifact], ModelShape, torch.dtype], LoraBackend]


class Slots:
    """A pool that holds what it is given."""

    def __init__(self, weights: list[Any]) -> None:
        self._weights = weights

    def weights(self, slot: int) -> Any:
        return self._weights[slot]


@pytest.fixture(scope="session")
def kernel(pytestconfig: pytest.Config) -> LoraKernel:
    return LoraKernel(native_cache_dir(pytestconfig))


def _open(name: str, request: pytest.FixtureRequest) -> BackendFactory:
    if name == "torch":
        return lambda artifacts, shape, _: TorchLora(
            Slots([pack_torch(a, shape) for a in artifacts]), shape
        )
    if name == "triton":
        return open_triton
    kernel: LoraKernel = request.getfixturevalue("kernel")
    if name == "native, untiled":
        if not kernel.has_tiles:
            pytest.skip("this CPU has no matrix tiles: native is untiled")
        return partial(open_untiled, kernel)
    return lambda artifacts, shape, dtype: open_native(kernel, artifacts, shape, dtype)


def open_native(
    kernel: LoraKernel, artifacts: list[AdapterArtifact], shape: ModelShape, dtype: torch.dtype
) -> NativeLora:
    """As the engine does: weights are laid out for matrix tiles where this CPU has them for such rows."""
    tiles = kernel if kernel.has_tiles and dtype is torch.bfloat16 else None
    packed = [pack_native(a, shape, tiles=tiles) for a in artifacts]
    return NativeLora(Slots(packed), shape, kernel)


def open_untiled(
    kernel: LoraKernel, artifacts: list[AdapterArtifact], shape: ModelShape, _: torch.dtype
) -> NativeLora:
    """As on a CPU without tiles."""
    return NativeLora(Slots([pack_native(a, shape) for a in artifacts]), shape, kernel)


def open_triton(
    artifacts: list[AdapterArtifact], shape: ModelShape, dtype: torch.dtype
) -> TritonLora:
    """Interpreted, with plans that promise what the CPU backends do."""
    packed = [pack_device(a, shape, dtype=dtype, pin=False) for a in artifacts]
    return TritonLora(
        Slots(packed),
        shape,
        TritonLoraSizes(len(packed), max_rank=16, max_tokens=130, max_decode_tokens=8),
        dtype=dtype,
        device=torch.device("cpu"),
        plans=FEW_PROGRAMS,
    )


@pytest.fixture(params=["torch", "native", "native, untiled", "triton"])
def make_backend(request: pytest.FixtureRequest) -> BackendFactory:
    return _open(request.param, request)


@pytest.fixture(params=["torch", "native", "native, untiled"])
def make_cpu_backend(request: pytest.FixtureRequest) -> BackendFactory:
    return _open(request.param, request)


@pytest.fixture
def row_counts(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """How many rows to try. Interpreted kernels are slow; tests/engine/test_triton_lora.py tries more."""
    is_slow = request.getfixturevalue("make_backend") is open_triton
    return (7,) if is_slow else (*range(1, 18), 33, 130)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterArtifact]:
    """Ranks even, odd and one; all linears, a part of qkv, one site; rsLoRA; three dtypes."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(root / "0", rank=8, linears=ALL_LINEARS, seed=0),
        make_adapter(root / "1", rank=5, linears=["q_proj", "v_proj", "down_proj"], seed=1),
        make_adapter(root / "2", rank=1, linears=["k_proj", "up_proj"], seed=2, dtype="F32"),
        make_adapter(root / "3", rank=16, linears=["o_proj"], seed=3, use_rslora=True),
        make_adapter(root / "4", rank=13, linears=ALL_LINEARS, seed=4, dtype="F16", layers=[1]),
        make_adapter(root / "5", rank=3, linears=ALL_LINEARS, seed=5, lora_alpha=7),
    ]


def random_rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(dtype)


def run(
    backend: LoraBackend, y: Tensor, x: Tensor, slots: list[int], site: LoraSite, layer: int = 1
) -> Tensor:
    result = y.clone()
    batch = backend.prepare(np.array(slots, dtype=np.int32), pool_version=0)
    if batch is not None:
        backend.add(result, x, layer, site, batch)
    return result


def expected(
    y: Tensor,
    x: Tensor,
    slots: list[int],
    site: LoraSite,
    layer: int,
    adapters: list[AdapterArtifact],
    shape: ModelShape,
) -> Tensor:
    """The kernels' reference, slice by slice, in fp64-free plain torch; one rounding at the end."""
    layout = site_layouts(shape)[SITES.index(site)]
    result = y.float()
    slot_T = torch.tensor(slots, dtype=torch.int32)
    for linear, begin, width in layout.slices:
        rank = max(artifact.rank_max for artifact in adapters)
        a_LRK = torch.zeros(len(adapters), rank, layout.num_inputs)
        b_LNR = torch.zeros(len(adapters), width, rank)
        scale_L = torch.zeros(len(adapters))
        for slot, artifact in enumerate(adapters):
            pair = artifact.pairs.get(ModuleName(layer, linear))
            if pair is not None:
                a_LRK[slot, : pair.rank] = torch.from_numpy(pair.a.to_float32().copy())
                b_LNR[slot, :, : pair.rank] = torch.from_numpy(pair.b.to_float32().copy())
                scale_L[slot] = pair.scale
        h_TR = lora_shrink(x.float(), a_LRK, slot_T)
        part = slice(begin, begin + width)
        result[:, part] = lora_expand(result[:, part], h_TR, b_LNR, slot_T, scale_L)
    return result.to(y.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("site", SITES)
def test_deltas_equal_the_reference(
    make_backend: BackendFactory,
    adapters: list[AdapterArtifact],
    site: LoraSite,
    dtype: torch.dtype,
) -> None:
    layout = site_layouts(TINY_SHAPE)[SITES.index(site)]
    slots = [3, -1, 0, 1, 5, 5, 0, -1, 2, 4, 4, 4, 0, 0, 1]
    x = random_rows(len(slots), layout.num_inputs, dtype)
    y = random_rows(len(slots), layout.num_outputs, dtype, seed=1)
    backend = make_backend(adapters, TINY_SHAPE, dtype)

    for layer in range(TINY_SHAPE.num_layers):
        result = run(backend, y, x, slots, site, layer)

        wanted = expected(y, x, slots, site, layer, adapters, TINY_SHAPE)
        # fp32 sums in another order; then at most one bf16 step where they straddle a rounding.
        tolerance = 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_that_no_vector_width_divides(
    make_backend: BackendFactory, tmp_path: Path, dtype: torch.dtype
) -> None:
    artifact = make_adapter(tmp_path / "odd", ODD_SHAPE, rank=7, linears=ALL_LINEARS)
    backend = make_backend([artifact], ODD_SHAPE, dtype)
    slots = [0, 0, -1, 0, 0, 0]
    for site, layout in zip(SITES, site_layouts(ODD_SHAPE), strict=True):
        x = random_rows(len(slots), layout.num_inputs, dtype)
        y = random_rows(len(slots), layout.num_outputs, dtype, seed=1)

        result = run(backend, y, x, slots, site, layer=0)

        wanted = expected(y, x, slots, site, 0, [artifact], ODD_SHAPE)
        tolerance = 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)


def test_no_batch_when_every_row_is_base(
    make_backend: BackendFactory, adapters: list[AdapterArtifact]
) -> None:
    backend = make_backend(adapters, TINY_SHAPE, torch.float32)

    assert backend.prepare(np.full(7, -1, dtype=np.int32), 0) is None
    assert backend.prepare(np.empty(0, dtype=np.int32), 0) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("site", SITES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(
    make_backend: BackendFactory,
    row_counts: tuple[int, ...],
    adapters: list[AdapterArtifact],
    site: LoraSite,
    dtype: torch.dtype,
) -> None:
    """Every row of crowds of every small size, odd ranks beside even ones, equals the row alone."""
    layout = site_layouts(TINY_SHAPE)[SITES.index(site)]
    backend = make_backend(adapters, TINY_SHAPE, dtype)
    random = np.random.default_rng(3)
    for count in row_counts:
        x = random_rows(count, layout.num_inputs, dtype, seed=count)
        y = random_rows(count, layout.num_outputs, dtype, seed=count + 1)
        slots = random.integers(-1, len(adapters), count).tolist()

        crowd = run(backend, y, x, slots, site)

        for row in range(count):
            one = slice(row, row + 1)
            alone = run(backend, y[one], x[one], slots[one], site)
            assert torch.equal(crowd[row], alone[0]), f"row {row} of {count}, slot {slots[row]}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_how_many_share_its_adapter(
    make_cpu_backend: BackendFactory, adapters: list[AdapterArtifact], dtype: torch.dtype
) -> None:
    layout = site_layouts(TINY_SHAPE)[0]
    backend = make_cpu_backend(adapters, TINY_SHAPE, dtype)
    x = random_rows(130, layout.num_inputs, dtype)
    y = random_rows(130, layout.num_outputs, dtype, seed=1)
    for slot in range(len(adapters)):
        whole = run(backend, y, x, [slot] * 130, "qkv")

        for chunk in (1, 2, 3, 5, 7, 33):
            for begin in range(0, 130, chunk):
                part = slice(begin, begin + chunk)
                size = len(range(130)[part])
                alone = run(backend, y[part], x[part], [slot] * size, "qkv")
                assert torch.equal(whole[part], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("site", SITES)
def test_an_adapter_that_overflows_changes_no_bit_of_its_neighbours(
    make_backend: BackendFactory,
    adapters: list[AdapterArtifact],
    tmp_path: Path,
    site: LoraSite,
    dtype: torch.dtype,
) -> None:
    """Finite weights whose products are Inf, then NaN: in their own rows only."""
    hostile = make_adapter(tmp_path / "hostile", rank=8, linears=ALL_LINEARS, size=1e30)
    backend = make_backend([*adapters, hostile], TINY_SHAPE, dtype)
    layout = site_layouts(TINY_SHAPE)[SITES.index(site)]
    slots = [0, 6, 1, -1, 6, 4, 0, 5, 6, -1]
    x = random_rows(len(slots), layout.num_inputs, dtype)
    y = random_rows(len(slots), layout.num_outputs, dtype, seed=1)

    crowd = run(backend, y, x, slots, site)

    hit = torch.tensor([slot == 6 for slot in slots])
    assert not torch.isfinite(crowd[hit]).all()
    for row, slot in enumerate(slots):
        if slot != 6:
            one = slice(row, row + 1)
            alone = run(backend, y[one], x[one], [slot], site)
            assert torch.equal(crowd[row], alone[0])
    base = torch.tensor([slot == -1 for slot in slots])
    assert torch.equal(crowd[base], y[base])


def test_rows_that_are_nan_stay_alone(
    make_backend: BackendFactory, adapters: list[AdapterArtifact]
) -> None:
    """A poisoned request beside another one of the same adapter, in the same tile."""
    layout = site_layouts(TINY_SHAPE)[0]
    backend = make_backend(adapters, TINY_SHAPE, torch.float32)
    x = random_rows(4, layout.num_inputs, torch.float32)
    y = random_rows(4, layout.num_outputs, torch.float32, seed=1)
    clean = run(backend, y, x, [0] * 4, "qkv")
    poisoned_x = x.clone()
    poisoned_x[2] = float("nan")

    result = run(backend, y, poisoned_x, [0] * 4, "qkv")

    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3]], clean[[0, 1, 3]])


def test_a_site_that_no_active_adapter_targets_is_left_alone(
    make_backend: BackendFactory, adapters: list[AdapterArtifact]
) -> None:
    backend = make_backend(adapters, TINY_SHAPE, torch.float32)
    batch = backend.prepare(np.array([3, 3], dtype=np.int32), 0)  # o_proj only
    assert batch is not None
    layout = site_layouts(TINY_SHAPE)[0]
    y = torch.empty(2, layout.num_outputs)
    before = y.clone()

    # An input that no computation could survive shows that none is made.
    backend.add(y, torch.empty(0, layout.num_inputs), 1, "qkv", batch)

    assert y.view(torch.int32).equal(before.view(torch.int32))


def test_slots_whose_content_changed_are_read_again(
    make_backend: BackendFactory, adapters: list[AdapterArtifact], tmp_path: Path
) -> None:
    """vLLM's bug 47724: metadata remembered by token mapping alone served another tenant's adapter."""
    shown: list[AdapterArtifact] = [adapters[0]]
    backend = make_backend(shown, TINY_SHAPE, torch.float32)
    slots: Any = backend._pool  # type: ignore[attr-defined]  # the double above, not the product's
    layout = site_layouts(TINY_SHAPE)[0]
    x = random_rows(2, layout.num_inputs, torch.float32)
    y = random_rows(2, layout.num_outputs, torch.float32, seed=1)
    first = run(backend, y, x, [0, 0], "qkv")
    other = make_backend([adapters[5]], TINY_SHAPE, torch.float32)
    slots._weights[0] = other._pool._weights[0]  # type: ignore[attr-defined]

    batch = backend.prepare(np.zeros(2, dtype=np.int32), pool_version=1)
    assert batch is not None
    second = y.clone()
    backend.add(second, x, 1, "qkv", batch)

    assert torch.equal(second, run(other, y, x, [0, 0], "qkv"))
    assert not torch.equal(second, first)


def test_thread_count_changes_no_bit(
    make_cpu_backend: BackendFactory, adapters: list[AdapterArtifact]
) -> None:
    layout = site_layouts(TINY_SHAPE)[0]
    slots = [index % 6 for index in range(40)]
    x = random_rows(40, layout.num_inputs, torch.bfloat16)
    y = random_rows(40, layout.num_outputs, torch.bfloat16, seed=1)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(
                run(make_cpu_backend(adapters, TINY_SHAPE, torch.bfloat16), y, x, slots, "qkv")
            )
    finally:
        torch.set_num_threads(before)

    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_threads_share_the_native_kernels_work_changes_no_bit(
    kernel: LoraKernel, adapters: list[AdapterArtifact], dtype: torch.dtype
) -> None:
    """However the work is cut: many adapters with few rows, one with many, one row alone."""
    layouts = site_layouts(TINY_SHAPE)
    steps = [
        [index % 6 for index in range(40)],
        [5] * 200 + [-1, 0, 4],
        [0],
        [index % 6 for index in range(700)],
    ]
    before = torch.get_num_threads()
    results: dict[int, list[Tensor]] = {}
    try:
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            backend = open_native(kernel, adapters, TINY_SHAPE, dtype)
            results[num_threads] = [
                run(
                    backend,
                    random_rows(len(slots), layout.num_outputs, dtype, seed=1),
                    random_rows(len(slots), layout.num_inputs, dtype),
                    slots,
                    site,
                )
                for slots in steps
                for site, layout in zip(SITES, layouts, strict=True)
            ]
    finally:
        torch.set_num_threads(before)

    for one, two, four in zip(*results.values(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, four)


def test_ranks_of_every_size_equal_the_reference(kernel: LoraKernel, tmp_path: Path) -> None:
    """Up to the largest that is served, beside each other in one step; every remainder of a tile."""
    ranks = [2, 3, 7, 9, 12, 31, 64, 256]
    artifacts = [
        make_adapter(tmp_path / str(rank), rank=rank, linears=ALL_LINEARS, seed=rank)
        for rank in ranks
    ]
    backend = open_untiled(kernel, artifacts, TINY_SHAPE, torch.float32)
    slots = [index for index in range(len(ranks)) for _ in range(index % 6 + 1)]
    for site, layout in zip(SITES, site_layouts(TINY_SHAPE), strict=True):
        x = random_rows(len(slots), layout.num_inputs, torch.float32)
        y = random_rows(len(slots), layout.num_outputs, torch.float32, seed=1)

        result = run(backend, y, x, slots, site, layer=0)

        wanted = expected(y, x, slots, site, 0, artifacts, TINY_SHAPE)
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_weights_stored_in_bf16_stay_so(tmp_path: Path) -> None:
    """Half the memory, and half of what a step reads."""
    sizes = {}
    for dtype in ("BF16", "F32"):
        artifact = make_adapter(tmp_path / dtype, rank=8, linears=ALL_LINEARS, dtype=dtype)
        sizes[dtype] = pack_native(artifact, TINY_SHAPE).memory.nbytes

    assert sizes["BF16"] <= 0.55 * sizes["F32"]


def test_the_kernel_refuses_what_it_cannot_read(
    kernel: LoraKernel, adapters: list[AdapterArtifact]
) -> None:
    backend = NativeLora(Slots([pack_native(adapters[0], TINY_SHAPE)]), TINY_SHAPE, kernel)
    batch = backend.prepare(np.zeros(2, dtype=np.int32), 0)
    assert batch is not None
    layout = site_layouts(TINY_SHAPE)[0]
    x, y = torch.zeros(2, layout.num_inputs), torch.zeros(2, layout.num_outputs)

    with pytest.raises(ValueError, match="bf16 or fp32"):
        backend.add(y.half(), x.half(), 0, "qkv", batch)
    with pytest.raises(ValueError, match="contiguous"):
        backend.add(y, x.T.contiguous().T, 0, "qkv", batch)


# ------------------------------------------------------------------------------- embedding and head

Outside = Callable[[LoraBackend, Tensor, Tensor, list[int]], Tensor]


@pytest.fixture(scope="module")
def outside_adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterArtifact]:
    """Both, one of them, neither; several ranks and dtypes."""
    root = tmp_path_factory.mktemp("outside")
    return [
        make_adapter(root / "0", rank=8, linears=[*ALL_LINEARS, *OUTSIDE], seed=0),
        make_adapter(root / "1", rank=5, linears=["embed_tokens"], seed=1, dtype="F32"),
        make_adapter(root / "2", rank=13, linears=["lm_head"], seed=2, lora_alpha=7),
        make_adapter(root / "3", rank=1, linears=OUTSIDE, seed=3, dtype="F16", use_rslora=True),
        make_adapter(root / "4", rank=4, linears=["q_proj"], seed=4),
    ]


def embed(backend: LoraBackend, y: Tensor, tokens: Tensor, slots: list[int]) -> Tensor:
    result = y.clone()
    batch = backend.prepare(np.array(slots, dtype=np.int32), pool_version=0)
    if batch is not None:
        backend.add_embedding(result, tokens, batch)
    return result


def score(backend: LoraBackend, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
    result = y.clone()
    batch = backend.prepare(np.array(slots, dtype=np.int32), pool_version=0)
    if batch is not None:
        backend.add_head(result, x, batch)
    return result


def expected_outside(
    y: Tensor, x: Tensor, slots: list[int], module: ModuleName, adapters: list[AdapterArtifact]
) -> Tensor:
    rank = max(artifact.rank_max for artifact in adapters)
    num_outputs, num_inputs = TINY_SHAPE.module_shape(module)
    a_LRK = torch.zeros(len(adapters), rank, num_inputs)
    b_LNR = torch.zeros(len(adapters), num_outputs, rank)
    scale_L = torch.zeros(len(adapters))
    for slot, artifact in enumerate(adapters):
        pair = artifact.pairs.get(module)
        if pair is not None:
            a_LRK[slot, : pair.rank] = torch.from_numpy(pair.a.to_float32().copy())
            b_LNR[slot, :, : pair.rank] = torch.from_numpy(pair.b.to_float32().copy())
            scale_L[slot] = pair.scale
    slot_T = torch.tensor(slots, dtype=torch.int32)
    if module == EMBEDDING:
        h_TR = lora_embed_shrink(x, a_LRK, slot_T)
    else:
        h_TR = lora_shrink(x.float(), a_LRK, slot_T)
    delta = lora_expand(torch.zeros(len(slots), num_outputs), h_TR, b_LNR, slot_T, scale_L)
    return (y.float() + delta[:, : y.shape[1]]).to(y.dtype)


def outside_rows(
    module: ModuleName, count: int, dtype: torch.dtype, num_outputs: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(y, x) for `count` rows: token ids for the embedding, hidden states for the head."""
    y = random_rows(count, num_outputs, dtype, seed=seed + 1)
    if module == HEAD:
        return y, random_rows(count, TINY_SHAPE.hidden_size, dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return y, torch.randint(0, TINY_SHAPE.vocab_size, (count,), generator=generator)


CASES = [
    pytest.param(EMBEDDING, embed, TINY_SHAPE.hidden_size, id="embedding"),
    pytest.param(HEAD, score, TINY_SHAPE.vocab_size, id="head"),
    # The head leaves out padding ids, which no block of the kernel ends with.
    pytest.param(HEAD, score, TINY_SHAPE.vocab_size - 9, id="head without padding ids"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("module", "add", "num_outputs"), CASES)
def test_deltas_of_embedding_and_head_equal_the_reference(
    make_backend: BackendFactory,
    outside_adapters: list[AdapterArtifact],
    module: ModuleName,
    add: Outside,
    num_outputs: int,
    dtype: torch.dtype,
) -> None:
    slots = [3, -1, 0, 1, 2, 2, 0, -1, 4, 4, 1, 3, 0, 0, 1]
    y, x = outside_rows(module, len(slots), dtype, num_outputs)
    backend = make_backend(outside_adapters, TINY_SHAPE, dtype)

    result = add(backend, y, x, slots)

    wanted = expected_outside(y, x, slots, module, outside_adapters)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)
    untouched = torch.tensor([slot in (-1, 4) for slot in slots])
    assert torch.equal(result[untouched], y[untouched])
    assert not torch.equal(result[~untouched], y[~untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("module", "add", "num_outputs"), CASES[:2])
def test_embedding_and_head_obey_the_row_rule_and_leak_nothing(
    make_backend: BackendFactory,
    row_counts: tuple[int, ...],
    outside_adapters: list[AdapterArtifact],
    tmp_path: Path,
    module: ModuleName,
    add: Outside,
    num_outputs: int,
    dtype: torch.dtype,
) -> None:
    """Every row of crowds of every small size, one of whose adapters overflows, equals the row alone."""
    hostile = make_adapter(tmp_path / "hostile", rank=8, linears=OUTSIDE, size=1e30)
    backend = make_backend([*outside_adapters, hostile], TINY_SHAPE, dtype)
    random = np.random.default_rng(3)
    for count in row_counts:
        y, x = outside_rows(module, count, dtype, num_outputs, seed=count)
        slots = random.integers(-1, len(outside_adapters) + 1, count).tolist()

        crowd = add(backend, y, x, slots)

        for row in range(count):
            one = slice(row, row + 1)
            alone = add(backend, y[one], x[one], slots[one])
            same = crowd[row].view(torch.uint8).equal(alone[0].view(torch.uint8))
            assert same, f"row {row} of {count}, slot {slots[row]}"
        hit = torch.tensor([slot == len(outside_adapters) for slot in slots])
        assert torch.isfinite(crowd[~hit]).all()
        assert not hit.any() or not torch.isfinite(crowd[hit]).all()


def test_only_steps_that_need_it_have_a_head_batch(
    make_backend: BackendFactory, outside_adapters: list[AdapterArtifact]
) -> None:
    backend = make_backend(outside_adapters, TINY_SHAPE, torch.float32)
    for slots, is_adapted in (([4, -1, 1], False), ([4, 2], True)):
        batch = backend.prepare(np.array(slots, dtype=np.int32), 0)
        assert batch is not None
        assert backend.adapts_head(batch) is is_adapted


def test_batches_of_an_older_slot_table_are_let_go(
    make_cpu_backend: BackendFactory, outside_adapters: list[AdapterArtifact]
) -> None:
    """They would keep evicted weights in memory."""
    backend = make_cpu_backend(outside_adapters, TINY_SHAPE, torch.float32)
    two = [np.array(slots, dtype=np.int32) for slots in ([0, 1], [0])]
    first = [backend.prepare(slots, 0) for slots in two]

    assert [backend.prepare(slots, 0) for slots in two] == first, "both are remembered"
    assert backend.prepare(two[0], 1) is not first[0]

    assert len(backend._prepared._batches) == 1  # type: ignore[attr-defined]  # what it keeps


def test_the_embedding_kernel_refuses_what_it_cannot_read(
    kernel: LoraKernel, outside_adapters: list[AdapterArtifact]
) -> None:
    weights = Slots([pack_native(outside_adapters[0], TINY_SHAPE)])
    backend = NativeLora(weights, TINY_SHAPE, kernel)
    batch = backend.prepare(np.zeros(2, dtype=np.int32), 0)
    assert batch is not None
    y, tokens = torch.zeros(2, TINY_SHAPE.hidden_size), torch.zeros(2, dtype=torch.int64)

    with pytest.raises(ValueError, match="bf16 or fp32"):
        backend.add_embedding(y.half(), tokens, batch)
    with pytest.raises(ValueError, match="int32"):
        backend.add_embedding(y, tokens.int(), batch)
    with pytest.raises(ValueError, match="2 rows"):
        backend.add_embedding(y, tokens[:1], batch)
    with pytest.raises(ValueError, match="contiguous"):
        backend.add_embedding(y.T.contiguous().T, tokens, batch)
