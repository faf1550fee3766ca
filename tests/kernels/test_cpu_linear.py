"""The native linear layers: right for every format, and every row on its own, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loraplex_kernels.cpu import linear as linear_module
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.linear import Arithmetic, LinearKernel, PackedLinear, list_arithmetics
from loraplex_kernels.cpu.quantize import Quantizer
from torch import Tensor

from tests.support.adapter_files import native_cache_dir
from tests.support.tile_state import leaves_tiles_in_use

FORMATS = ["fp32", "bf16", "int8", "int4"]
ARITHMETICS: list[Arithmetic] = ["fp32", "avx512_bf16", "amx"]
# A tile's rows end at 6, 12, 16 or 32, a block's at 192 or 512, a block of inputs at 32 or 256, of those widened at
# 2,048; a panel at 16 or 32.
SHAPES = [(190, 33), (576, 72), (1, 1), (33, 190), (261, 16), (513, 7), (2090, 40)]
ROW_COUNTS = (*range(1, 18), 31, 33, 48, 64, 130, 193, 513, 540)


class Packer:
    """The kernel and the quantizer for a number of threads."""

    def __init__(self, cache_dir: Path, num_threads: int, arithmetic: Arithmetic) -> None:
        self.kernel = LinearKernel(
            cache_dir=cache_dir, num_threads=num_threads, arithmetic=arithmetic
        )
        self.forward = self.kernel.forward
        self.cache_dir = cache_dir
        self.arithmetic = arithmetic
        self.dtype = torch.float32 if arithmetic == "fp32" else torch.bfloat16  # of rows
        self._quantizer = Quantizer(
            cache_dir=cache_dir, num_threads=num_threads, dtype=self.kernel.weight_dtype
        )

    def pack(
        self, weight_format: str, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[PackedLinear, Tensor]:
        """The weight in that format, and the fp32 values that are multiplied (fp64: with int8's scale)."""
        if weight_format in ("fp32", "bf16"):
            values = weight.bfloat16() if weight_format == "bf16" else weight
            linear = self.kernel.pack(values, bias)
            assert linear.weight_format == weight_format
            return linear, values.float()
        of = self._quantizer
        quantized = of.int8(weight) if weight_format == "int8" else of.int4(weight)
        linear = self.kernel.pack_quantized(quantized, bias)
        assert linear.weight_format == weight_format
        if weight_format == "int8" and self.arithmetic != "fp32":
            return linear, quantized.q_NK.double() * quantized.scale_NG.double()
        return linear, quantized.dequantized()


def open_packer(config: pytest.Config, arithmetic: Arithmetic, num_threads: int = 2) -> Packer:
    cache_dir = native_cache_dir(config)
    try:
        found = list_arithmetics(torch.bfloat16, cache_dir)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    if arithmetic not in found:
        pytest.skip(f"this CPU has no {arithmetic}")
    return Packer(cache_dir, num_threads, arithmetic)


@pytest.fixture(scope="module", params=ARITHMETICS)
def packer(request: pytest.FixtureRequest) -> Packer:
    return open_packer(request.config, request.param)


@pytest.fixture(scope="module")
def fp32_packer(request: pytest.FixtureRequest) -> Packer:
    return open_packer(request.config, "fp32")


@pytest.fixture(scope="module", params=ARITHMETICS[1:])
def bf16_packer(request: pytest.FixtureRequest) -> Packer:
    """Of products in hardware."""
    return open_packer(request.config, request.param)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_every_row_is_right_and_the_same_at_every_count(
    packer: Packer, weight_format: str, num_inputs: int, num_outputs: int
) -> None:
    check_rows(packer, weight_format, num_inputs, num_outputs, packer.dtype)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_rows_of_bf16_are_right_in_fp32_too(
    fp32_packer: Packer, weight_format: str, num_inputs: int, num_outputs: int
) -> None:
    check_rows(fp32_packer, weight_format, num_inputs, num_outputs, torch.bfloat16)


def check_rows(
    packer: Packer, weight_format: str, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    bias = draw(num_outputs, seed=1)
    linear, values = packer.pack(weight_format, draw(num_outputs, num_inputs), bias)
    x = draw(max(ROW_COUNTS), num_inputs, seed=2).to(dtype)

    whole = packer.forward(x, linear)

    exact = x.double() @ values.double().T + bias.double()
    # K products, a bias and perhaps a scale: whatever the order of additions, no product (two numbers of bf16: exact;
    # else part of an FMA) takes part in more than K + 1 roundings to fp32.
    magnitude = x.double().abs() @ values.double().abs().T + bias.double().abs()
    bound = 1.01 * (num_inputs + 1) * 2**-24 * magnitude
    if dtype is torch.bfloat16:
        bound += 2**-8 * (exact.abs() + bound)
    assert bool(((whole.double() - exact).abs() <= bound).all())
    assert whole.dtype == dtype
    for count in ROW_COUNTS:
        for start in {0, min(5, len(x) - count), len(x) - count}:
            part = packer.forward(x[start : start + count], linear)
            assert torch.equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("num_rows", [1, 2, 6, 40])
def test_narrow_weights_give_the_bits_of_their_values_in_fp32(
    fp32_packer: Packer, weight_format: str, num_rows: int
) -> None:
    linear, values = fp32_packer.pack(weight_format, draw(70, 333))
    plain = fp32_packer.kernel.pack(values)
    # Kept as fp32 even where bf16 would hold all but one of the values.
    values[0, 0] = torch.nextafter(values[0, 0], torch.tensor(torch.inf))
    wide = fp32_packer.kernel.pack(values)
    x = draw(num_rows, 333, seed=2)

    y = fp32_packer.forward(x, linear)

    assert torch.equal(y, fp32_packer.forward(x, plain))
    assert wide.weight_format == "fp32"
    assert torch.equal(y[:, 1:], fp32_packer.forward(x, wide)[:, 1:])


def test_fp32_weights_are_kept_as_bf16_only_where_no_bit_is_lost(packer: Packer) -> None:
    values = draw(32, 64).bfloat16().float()
    odd = values.clone()
    odd[19, 39] += 2**-20

    assert packer.kernel.pack(values).weight_format == "bf16"
    assert packer.kernel.pack(odd).weight_format == "fp32"
    assert packer.kernel.pack(values).num_bytes * 2 == packer.kernel.pack(odd).num_bytes


def test_bf16_rows_are_summed_in_fp32_and_rounded_once(fp32_packer: Packer) -> None:
    linear, _ = fp32_packer.pack("bf16", draw(50, 300), draw(50))
    x = draw(9, 300, seed=2).bfloat16()

    y = fp32_packer.forward(x, linear)

    assert torch.equal(y, fp32_packer.forward(x.float(), linear).bfloat16())


@pytest.mark.parametrize("num_rows", [1, 6, 7, 32, 200])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_change_no_bit(packer: Packer, num_rows: int, num_threads: int) -> None:
    x, weight = draw(num_rows, 576, seed=2).to(packer.dtype), draw(960, 576)
    other = LinearKernel(
        cache_dir=packer.cache_dir, num_threads=num_threads, arithmetic=packer.arithmetic
    )

    for weight_format in FORMATS:
        linear, _ = packer.pack(weight_format, weight)
        assert torch.equal(other.forward(x, linear), packer.forward(x, linear)), weight_format


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_finite_harms_no_other(
    packer: Packer, weight_format: str, bad: float
) -> None:
    linear, _ = packer.pack(weight_format, draw(40, 190))
    x = draw(45, 190, seed=2).to(packer.dtype)
    clean = packer.forward(x, linear)
    generator = torch.Generator().manual_seed(3)
    victims = torch.randperm(45, generator=generator)[:13]
    x[victims, torch.randint(190, (13,), generator=generator)] = bad

    for count in (1, 2, 6, 7, 31, 45):
        rows = torch.randperm(45, generator=generator)[:count]
        y = packer.forward(x[rows], linear)
        is_victim = torch.isin(rows, victims)
        assert torch.equal(y[~is_victim], clean[rows[~is_victim]])
        assert not bool(y[is_victim].isfinite().any())


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_rows", [12, 40])
def test_rows_may_lie_apart(packer: Packer, weight_format: str, num_rows: int) -> None:
    linear, _ = packer.pack(weight_format, draw(40, 100))
    wide = draw(num_rows, 251, seed=2).to(packer.dtype)

    y = packer.forward(wide[:, 50:150], linear)

    assert torch.equal(y, packer.forward(wide[:, 50:150].contiguous(), linear))


def test_no_rows_give_no_rows(packer: Packer) -> None:
    linear, _ = packer.pack("bf16", draw(40, 100))

    assert packer.forward(torch.empty(0, 100, dtype=packer.dtype), linear).shape == (0, 40)


def test_products_in_hardware_are_of_bf16_rows_only(bf16_packer: Packer) -> None:
    linear, _ = bf16_packer.pack("int8", draw(40, 100))

    with pytest.raises(ValueError, match=r"x is \(4, 100\) torch.float32: \(M, 100\) bfloat16"):
        bf16_packer.forward(draw(4, 100), linear)


def test_arithmetic_that_the_cpu_does_not_have_is_refused(
    fp32_packer: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "list_arithmetics", lambda *_: ("fp32",))

    with pytest.raises(ValueError, match="this CPU has no amx: use fp32"):
        LinearKernel(cache_dir=fp32_packer.cache_dir, num_threads=1, arithmetic="amx")


def test_int4_that_is_rounded_in_another_way_is_refused(
    bf16_packer: Packer, fp32_packer: Packer
) -> None:
    weight = draw(40, 100)
    of = {
        dtype: Quantizer(cache_dir=fp32_packer.cache_dir, num_threads=1, dtype=dtype).int4(weight)
        for dtype in (torch.float32, torch.bfloat16)
    }

    with pytest.raises(ValueError, match=r"int4 is of torch.float32, .* of torch.bfloat16"):
        bf16_packer.kernel.pack_quantized(of[torch.float32])
    with pytest.raises(ValueError, match=r"int4 is of torch.bfloat16, fp32 of torch.float32"):
        fp32_packer.kernel.pack_quantized(of[torch.bfloat16])


def test_weights_that_bf16_does_not_hold_are_multiplied_in_fp32(
    bf16_packer: Packer, fp32_packer: Packer
) -> None:
    weight, x = draw(40, 100), draw(20, 100, seed=2).bfloat16()

    y = bf16_packer.forward(x, bf16_packer.kernel.pack(weight))

    assert torch.equal(y, fp32_packer.forward(x, fp32_packer.kernel.pack(weight)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), r"x is \(4, 100\) torch.float64: \(M, 100\) float32 or bfloat16"),
        (lambda x: x[:, :99], r"x is \(4, 99\) torch.float32: \(M, 100\)"),
        (lambda x: x.T.contiguous().T, "its rows must be contiguous"),
    ],
    ids=["dtype", "width", "layout"],
)
def test_rows_that_do_not_fit_are_refused(
    fp32_packer: Packer, change: Callable[[Tensor], Tensor], message: str
) -> None:
    linear, _ = fp32_packer.pack("fp32", draw(40, 100))

    with pytest.raises(ValueError, match=message):
        fp32_packer.forward(change(draw(4, 100)), linear)


def test_weights_that_do_not_fit_are_refused(packer: Packer) -> None:
    with pytest.raises(ValueError, match=r"weight is \(3, 4\) torch.float64"):
        packer.kernel.pack(torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"bias is \(4,\): it must be \(3,\)"):
        packer.kernel.pack(torch.ones(3, 4), torch.ones(4))


def test_quantized_weights_take_the_memory_they_should(packer: Packer) -> None:
    weight = draw(64, 640)
    sizes = {kind: packer.pack(kind, weight)[0].num_bytes for kind in FORMATS}

    assert sizes["fp32"] == weight.numel() * 4
    assert sizes["bf16"] == weight.numel() * 2
    assert sizes["int8"] == weight.numel() + 64 * 4
    assert sizes["int4"] == weight.numel() * 5 // 8


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_tiles_are_released(pytestconfig: pytest.Config, weight_format: str, num_rows: int) -> None:
    packer = open_packer(pytestconfig, "amx", num_threads=1)
    linear, _ = packer.pack(weight_format, draw(72, 576))
    x = draw(num_rows, 576).bfloat16()

    assert not leaves_tiles_in_use(lambda: packer.forward(x, linear), packer.cache_dir)
