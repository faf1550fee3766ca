"""LoRA kernels, grouped and row by row, against the reference; nothing of a neighbour, nothing of unused memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels.lora_embed import lora_embed
from loraplex_kernels.lora_expand import lora_expand
from loraplex_kernels.lora_image import LoraPart, LoraSitePairs, image_size, write_image
from loraplex_kernels.lora_rows import lora_rows_expand, lora_rows_shrink
from loraplex_kernels.lora_shrink import lora_shrink
from loraplex_kernels.lora_slots import LoraSlots, a_row_length
from loraplex_kernels.plans import open_plans
from torch import Tensor

from tests.support.kernel_inputs import DTYPES
from tests.support.lora_inputs import (
    EMBED,
    EXPAND,
    LINEAR,
    NOTHING,
    SHRINK,
    Adapters,
    add_embedding,
    add_linear,
    exact_embedding,
    exact_linear,
    expected_embedding,
    expected_linear,
    make_adapters,
    make_route,
)

CPU = torch.device("cpu")
# bf16 and fp16, in units in the last place of the result, or of y where they cancel: rounding once costs half of one;
# the sums before it are in another order than the reference's, and h is split in two for the tensor cores.
# fp32, against fp64, in units of what may be lost: each term is rounded by its scale and by y's addition (epsilon of
# its size), the result once more; sums in between round either way. A lost last k is a thousand of them.
UNITS = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float16: 1.0}
KINDS = {"grouped": 16, "wide": 32, "rows": 1}
# (kernel, dtype) -> worst error in the units above
worst: dict[tuple[str, str], tuple[float, int]] = {}


@dataclass(frozen=True)
class Shape:
    ranks: tuple[tuple[int, ...], ...]
    num_inputs: int
    widths: tuple[int, ...]
    slots: tuple[int, ...]


SHAPES = {
    "one row": Shape(((8,),), 32, (16,), (0,)),
    # Slot 1 lacks a slice, slot 2 is not in the step, slot 3 has all of its rows in one block.
    "odd": Shape(
        ((8, 5, 16), (33, 0, 1), (4, 4, 4), (1, 17, 2)),
        75,
        (40, 17, 17),
        (3, 0, -1, 1, 1, 0, -1, 0, 3, *[0] * 14, 1, -1),
    ),
    "gate_up": Shape(((64, 64), (16, 48)), 96, (48, 48), (1, 0, 0, -1, 1)),
    "rank 256": Shape(((256,), (128,)), 64, (33,), (0, 1, -1, 0)),
    "nobody": Shape(((8,),), 32, (16,), (-1, -1, -1)),
}


def inputs(shape: Shape, dtype: torch.dtype, seed: int = 0) -> tuple[Adapters, Tensor, Tensor]:
    """(adapters, y, x); base rows of x are NaN: nothing may read them."""
    adapters = make_adapters(
        shape.ranks, dtype, num_inputs=shape.num_inputs, widths=shape.widths, seed=seed
    )
    generator = torch.Generator().manual_seed(seed + 1)
    count = len(shape.slots)
    x_TK = torch.randn(count, shape.num_inputs, generator=generator).to(dtype)
    y_TN = torch.randn(count, sum(shape.widths), generator=generator).to(dtype)
    x_TK[torch.tensor(shape.slots) < 0] = torch.nan
    return adapters, y_TN, x_TK


def note(kernel: str, dtype: torch.dtype, error: Tensor, unit: Tensor) -> float:
    """The worst error in units; remembered for the table."""
    most = (error.abs() / unit).max().item() if len(error) else 0.0
    key = kernel, str(dtype).removeprefix("torch.")
    before, count = worst.get(key, (0.0, 0))
    worst[key] = max(before, most), count + 1
    return most


def fp32_unit(exact: Tensor, size: Tensor) -> Tensor:
    """What fp32 may lose of a sum in any order but a bad one; fp64, like `exact` and the `size` of its terms."""
    return torch.finfo(torch.float32).eps * (0.5 * exact.abs() + size)


def unit_of(y_TN: Tensor, wanted: Tensor) -> Tensor:
    """Of the last place of what the rounding of the last sum is relative to, and of the delta where it cancels."""
    largest = torch.maximum(y_TN.float().abs(), wanted.float().abs())
    return torch.finfo(y_TN.dtype).eps * largest.clamp_min(1.0)


def error_of_linear(
    kernel: str,
    result: Tensor,
    y_TN: Tensor,
    x_TK: Tensor,
    adapters: Adapters,
    slots: tuple[int, ...],
) -> float:
    """In the units of y's dtype."""
    if y_TN.dtype == torch.float32:
        exact, size = exact_linear(y_TN, x_TK, adapters, slots)
        return note(kernel, y_TN.dtype, result - exact, fp32_unit(exact, size))
    wanted = expected_linear(y_TN, x_TK, adapters, slots)
    return note(kernel, y_TN.dtype, result.float() - wanted.float(), unit_of(y_TN, wanted))


def is_repeated(name: str, kind: str, dtype: torch.dtype) -> bool:
    """Whether the case costs seconds and others go the same ways: blocks of 32 rows, float16, 256 ranks."""
    return (
        (kind == "wide" and name != "odd")
        or (dtype == torch.float16 and name != "odd")
        or (name == "rank 256" and kind == "rows")
    )


# What is large, or like another, in one dtype.
CASES = [
    pytest.param(
        name,
        kind,
        dtype,
        id=f"{name}, {kind}, {str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.slow] if is_repeated(name, kind, dtype) else [],
    )
    for name in SHAPES
    for kind in KINDS
    for dtype in DTYPES
    if dtype == torch.bfloat16 or (name in ("odd", "gate_up") and kind != "wide")
]


@pytest.mark.parametrize(("name", "kind", "dtype"), CASES)
def test_equals_the_reference(name: str, kind: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    if kind == "rows":
        shape = replace(shape, slots=shape.slots[:8])
    adapters, y_TN, x_TK = inputs(shape, dtype)

    result = add_linear(y_TN, x_TK, adapters, shape.slots, block_rows=KINDS[kind])

    error = error_of_linear(f"linear, {kind}", result, y_TN, x_TK, adapters, shape.slots)
    assert error <= UNITS[dtype]
    base = torch.tensor(shape.slots) < 0
    assert torch.equal(result[base], y_TN[base])
    assert base.all() or not torch.equal(result[~base], y_TN[~base])


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "nobody"])
def test_the_fp32_bound_sees_a_lost_k(name: str) -> None:
    """In every row, by far: what a kernel may lose to rounding is no term of the sum."""
    shape = SHAPES[name]
    adapters, y_TN, x_TK = inputs(shape, torch.float32)
    is_routed = torch.tensor(shape.slots) >= 0
    exact, size = exact_linear(y_TN, x_TK, adapters, shape.slots)
    short_x = x_TK.clone()
    short_x[:, -1] = 0.0

    lost, _ = exact_linear(y_TN, short_x, adapters, shape.slots)

    error = ((lost - exact).abs() / fp32_unit(exact, size))[is_routed]
    assert error.amax(1).min() > 1000 * UNITS[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["grouped", "rows"])
def test_the_embedding_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    slots = (3, 0, -1, 1, 1, 0, -1, 0, 3, 1)
    adapters = make_adapters(((8,), (33,), (4,), (1,)), dtype, num_inputs=16, widths=(75,))
    generator = torch.Generator().manual_seed(1)
    y_TH = torch.randn(len(slots), 75, generator=generator).to(dtype)
    token_T = torch.randint(0, adapters.vocabulary, (len(slots),), generator=generator)
    token_T[2] = 10**12  # a base row's token is not looked up

    result = add_embedding(y_TH, token_T, adapters, slots, block_rows=KINDS[kind])

    token_T[2] = 0
    if dtype == torch.float32:
        exact, size = exact_embedding(y_TH, token_T, adapters, slots)
        error = note(f"embedding, {kind}", dtype, result - exact, fp32_unit(exact, size))
    else:
        wanted = expected_embedding(y_TH, token_T, adapters, slots)
        error = note(
            f"embedding, {kind}", dtype, result.float() - wanted.float(), unit_of(y_TH, wanted)
        )
    assert error <= UNITS[dtype]
    assert torch.equal(result[[2, 6]], y_TH[[2, 6]])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    ranks=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(any), min_size=1, max_size=3
    ),
    num_inputs=st.integers(1, 80),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    slots=st.lists(st.integers(-1, 2), min_size=1, max_size=20),
    kind=st.sampled_from(["grouped", "rows"]),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_reference_at_any_shape(
    ranks: list[tuple[int, int]],
    num_inputs: int,
    widths: tuple[int, int],
    slots: list[int],
    kind: str,
    dtype: torch.dtype,
) -> None:
    rows = tuple(min(slot, len(ranks) - 1) for slot in slots[: 20 if kind == "grouped" else 4])
    shape = Shape(tuple(ranks), num_inputs, widths, rows)
    adapters, y_TN, x_TK = inputs(shape, dtype)

    result = add_linear(y_TN, x_TK, adapters, rows, block_rows=KINDS[kind])

    error = error_of_linear(f"linear, {kind}", result, y_TN, x_TK, adapters, rows)
    assert error <= UNITS[dtype]


# ------------------------------------------------------------------------------------ neighbours

Add = Callable[[Adapters, Tensor, Tensor, tuple[int, ...]], Tensor]


def linear(kind: str) -> Add:
    return lambda adapters, y, x, slots: add_linear(y, x, adapters, slots, block_rows=KINDS[kind])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["grouped", "rows"])
def test_an_adapter_that_overflows_changes_no_bit_of_a_victim(
    kind: str, dtype: torch.dtype
) -> None:
    slots = (0, 1, 0, -1, 1, 2)
    shape = Shape(((8,), (16,), (5,)), 40, (33,), slots)
    largest = 6e4 if dtype == torch.float16 else 1e30
    adapters = make_adapters(
        shape.ranks, dtype, num_inputs=40, widths=(33,), sizes=(0.3, largest, 0.3)
    )
    _, y_TN, x_TK = inputs(shape, dtype)
    calm = tuple(-1 if slot == 1 else slot for slot in slots)

    crowd = linear(kind)(adapters, y_TN, x_TK, slots)

    alone = linear(kind)(adapters, y_TN, x_TK, calm)
    hit = torch.tensor(slots) == 1
    assert not torch.isfinite(crowd[hit]).all()
    assert torch.equal(crowd[~hit], alone[~hit])
    assert torch.isfinite(crowd[~hit]).all()


@pytest.mark.parametrize("kind", ["grouped", "rows"])
def test_a_row_of_nan_stays_alone_among_rows_of_its_adapter(kind: str) -> None:
    shape = Shape(((8, 4),), 40, (33, 16), (0, 0, 0))
    adapters, y_TN, x_TK = inputs(shape, torch.bfloat16)
    clean = linear(kind)(adapters, y_TN, x_TK, shape.slots)
    x_TK[1] = torch.nan

    result = linear(kind)(adapters, y_TN, x_TK, shape.slots)

    assert result[1].isnan().all()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", ["grouped", "rows"])
def test_what_is_not_the_adapters_stays_bit_for_bit(kind: str) -> None:
    """Base rows, slices that are not targeted, columns beyond y: all NaN of one pattern."""
    shape = Shape(((0, 5, 0), (8, 0, 3)), 40, (33, 16, 7), (0, -1, 1, 0))
    adapters, y_TN, x_TK = inputs(shape, torch.bfloat16)
    wide = torch.full((4, 64), 0x7FC5, dtype=torch.int16).view(torch.bfloat16)
    result = wide[:, :56]
    owned = torch.zeros(4, 64, dtype=torch.bool)
    owned[[0, 3], 33:49] = True
    owned[2, :33], owned[2, 49:56] = True, True
    result[owned[:, :56]] = y_TN[owned[:, :56]]
    before = wide.view(torch.int16).clone()
    block_rows = KINDS[kind]
    route = make_route(shape.slots, block_rows)
    shrink, expand = (
        (lora_shrink, lora_expand) if block_rows > 1 else (lora_rows_shrink, lora_rows_expand)
    )
    h_SPR = torch.full((2, route.num_places, 48), torch.nan)
    stride = a_row_length(40)

    shrink(x_TK, adapters.slots, LINEAR, route, h_SPR, SHRINK, a_stride=stride, max_rank=48)
    expand(result, h_SPR, adapters.slots, LINEAR, route, shape.widths, EXPAND)

    assert torch.equal(wide.view(torch.int16)[~owned], before[~owned])
    wanted = expected_linear(y_TN, x_TK, adapters, shape.slots)
    torch.testing.assert_close(
        wide[:, :56][owned[:, :56]], wanted[owned[:, :56]], rtol=8e-3, atol=0
    )


def test_a_site_that_is_not_targeted_is_left_before_anything_is_read() -> None:
    shape = Shape(((8,),), 40, (33,), (0, 0))
    adapters, y_TN, x_TK = inputs(shape, torch.float32)
    for block_rows in (16, 1):
        route = make_route(shape.slots, block_rows)
        h_SPR = torch.full((2, route.num_places, 16), 7.0)
        shrink, expand = (
            (lora_shrink, lora_expand) if block_rows > 1 else (lora_rows_shrink, lora_rows_expand)
        )
        result = y_TN.clone()

        shrink(x_TK, adapters.slots, NOTHING, route, h_SPR, SHRINK, a_stride=48, max_rank=16)
        expand(result, h_SPR, adapters.slots, NOTHING, route, shape.widths, EXPAND)

        assert (h_SPR == 7.0).all()
        assert torch.equal(result, y_TN)
        lora_embed(result, torch.zeros(2, dtype=torch.int64), adapters.slots, NOTHING, route, EMBED)
        assert torch.equal(result, y_TN)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_invariant_plans_give_a_row_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Alone, among rows of its adapter at every place of a block, among others; 300 inputs in three spans."""
    slots = (0, 1, *[0] * 17, 2, -1, 0, 1)
    shape = Shape(((8,), (40,), (16,)), 300, (70,), slots)
    adapters, y_TN, x_TK = inputs(shape, dtype)
    table = open_plans("sm_90", "invariant")
    name = "fp32" if dtype == torch.float32 else "bf16"

    def run(rows: list[int], phase: str, tokens: int) -> Tensor:
        shrink, expand, route = (
            table.choose(kernel, phase=phase, tokens=tokens, rank=64, k=300, dtype=name)  # type: ignore[arg-type]
            for kernel in ("lora_shrink", "lora_expand", "lora_route")
        )
        return add_linear(
            y_TN[rows],
            x_TK[rows],
            adapters,
            tuple(slots[row] for row in rows),
            block_rows=route.config["BLOCK_M"],
            shrink=shrink,
            expand=expand,
        )

    everybody = list(range(len(slots)))
    crowd = run(everybody, "prefill", 8192)

    assert torch.equal(run(everybody[::-1], "decode", 23).flip(0), crowd)
    for row in (0, 1, 17, 18, 19, 21):
        assert torch.equal(run([row], "decode", 1)[0], crowd[row]), row


# ------------------------------------------------------------------------------------- arguments


def _break(what: str) -> dict[str, object]:
    """Arguments of one launch of each kind, one of them wrong."""
    shape = Shape(((8,),), 40, (33,), (0, 0))
    adapters, y_TN, x_TK = inputs(shape, torch.float32)
    arguments: dict[str, object] = {
        "x": x_TK,
        "y": y_TN,
        "h": torch.zeros(2, 64, 16),
        "site": LINEAR,
        "widths": (33,),
        "max_rank": 16,
        "token": torch.zeros(2, dtype=torch.int64),
    }
    wrong: dict[str, object] = {
        "x": x_TK.half(),
        "y": y_TN.T.contiguous().T,
        "h": torch.zeros(3, 1, 16),
        "site": 3,
        "widths": (16, 16),
        "max_rank": 17,
        "token": torch.zeros(2, dtype=torch.int32),
    }
    return {**arguments, what: wrong[what], "slots": adapters.slots}


@pytest.mark.parametrize("block_rows", [16, 1])
@pytest.mark.parametrize("what", ["x", "y", "h", "site", "widths", "max_rank", "token"])
def test_a_wrong_argument_is_named(what: str, block_rows: int) -> None:
    bad = _break(what)
    route = make_route((0, 0), block_rows)
    shrink, expand = (
        (lora_shrink, lora_expand) if block_rows > 1 else (lora_rows_shrink, lora_rows_expand)
    )
    slots, site = bad["slots"], bad["site"]

    with pytest.raises(ValueError, match=what):  # noqa: PT012 -- whichever of them takes it
        shrink(
            bad["x"], slots, site, route, bad["h"], SHRINK, a_stride=48, max_rank=bad["max_rank"]
        )
        expand(bad["y"], bad["h"], slots, site, route, bad["widths"], EXPAND)
        lora_embed(bad["y"], bad["token"], slots, site, route, EMBED)


def test_row_kernels_take_routes_of_single_rows_only() -> None:
    adapters, y_TN, x_TK = inputs(Shape(((8,),), 40, (33,), (0, 0)), torch.float32)
    route, h_SPR = make_route((0, 0), 16), torch.zeros(2, 64, 16)

    with pytest.raises(ValueError, match="blocks of 16 rows"):
        lora_rows_shrink(
            x_TK, adapters.slots, LINEAR, route, h_SPR, SHRINK, a_stride=48, max_rank=16
        )
    with pytest.raises(ValueError, match="blocks of 16 rows"):
        lora_rows_expand(y_TN, h_SPR, adapters.slots, LINEAR, route, (33,), EXPAND)


def test_slots_and_images_that_do_not_fit_are_refused() -> None:
    part = LoraPart(0, torch.zeros(4, 8), torch.zeros(6, 4), 1.0)
    memory = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not 3 slots"):
        LoraSlots.over(memory, dtype=torch.float32, num_slots=3, num_sites=1)
    with pytest.raises(ValueError, match="header alone"):
        LoraSlots.over(memory, dtype=torch.float32, num_slots=64, num_sites=3)
    with pytest.raises(ValueError, match="multiple of 16"):
        LoraSlots.over(memory[8:-8], dtype=torch.float32, num_slots=1, num_sites=3)
    for parts, problem in (
        ((part, part), "each once"),
        ((replace(part, position=3),), "below 3"),
        ((replace(part, b_NR=torch.zeros(6, 5)),), "B is"),
        ((part, LoraPart(1, torch.zeros(4, 9), torch.zeros(6, 4), 1.0)), "inputs"),
    ):
        sites = [LoraSitePairs(parts)]
        image = torch.zeros(image_size(sites, torch.float32), dtype=torch.uint8)
        with pytest.raises(ValueError, match=problem):
            write_image(image, sites, torch.float32)
    with pytest.raises(ValueError, match="image is"):
        write_image(memory, [LoraSitePairs((part,))], torch.float32)


def test_table_of_worst_errors() -> None:
    """`pytest -rP` shows it. In the units above `UNITS`."""
    print(f"{'kernel':20} {'dtype':10} {'cases':>5} {'worst':>8}")
    for (kernel, dtype), (error, count) in sorted(worst.items()):
        print(f"{kernel:20} {dtype:10} {count:5} {error:8.3f}")
    assert all(error <= UNITS[getattr(torch, dtype)] for (_, dtype), (error, _) in worst.items())
