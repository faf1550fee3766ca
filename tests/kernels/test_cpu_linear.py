"""The native linear layers: right for every format, and every row on its own, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loraplex_kernels.cpu.linear import LinearKernel, PackedLinear
from loraplex_kernels.cpu.quantize import quantize_int4, quantize_int8
from torch import Tensor

from tests.support.adapter_files import native_cache_dir

FORMATS = ["fp32", "bf16", "int8", "int4"]
# A tile's rows end at 6, a block's at 192, a block of inputs at 256, a panel at 16.
SHAPES = [(190, 33), (576, 72), (1, 1), (33, 190), (261, 16), (513, 7)]
ROW_COUNTS = (*range(1, 18), 33, 130, 193, 513)


@pytest.fixture(scope="module")
def native_cache(pytestconfig: pytest.Config) -> Path:
    return native_cache_dir(pytestconfig)


@pytest.fixture(scope="module")
def kernel(native_cache: Path) -> LinearKernel:
    return LinearKernel(cache_dir=native_cache, num_threads=2)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def pack(
    kernel: LinearKernel, weight_format: str, weight: Tensor, bias: Tensor | None = None
) -> tuple[PackedLinear, Tensor]:
    """The weight in that format, and the fp32 values it then stands for."""
    if weight_format in ("fp32", "bf16"):
        values = weight.bfloat16() if weight_format == "bf16" else weight
        linear = kernel.pack(values, bias)
        assert linear.weight_format == weight_format or bool((weight.bfloat16() == weight).all())
        return linear, values.float()
    quantize = quantize_int8 if weight_format == "int8" else quantize_int4
    quantized = quantize(weight)
    return kernel.pack_quantized(quantized, bias), quantized.dequantized()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["x-fp32", "x-bf16"])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_every_row_is_right_and_the_same_at_every_count(
    kernel: LinearKernel, weight_format: str, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    bias = draw(num_outputs, seed=1)
    linear, values = pack(kernel, weight_format, draw(num_outputs, num_inputs), bias)
    x = draw(max(ROW_COUNTS), num_inputs, seed=2).to(dtype)

    whole = kernel.forward(x, linear)

    exact = x.double() @ values.double().T + bias.double()
    # A chain of K + 1 roundings to fp32 errs by less than this share of the sum of magnitudes.
    magnitude = x.double().abs() @ values.double().abs().T + bias.double().abs()
    bound = 1.01 * (num_inputs + 1) * 2**-24 * magnitude
    if dtype is torch.bfloat16:
        bound += 2**-8 * (exact.abs() + bound)
    assert bool(((whole.double() - exact).abs() <= bound).all())
    assert whole.dtype == dtype
    for count in ROW_COUNTS:
        for start in {0, min(5, len(x) - count), len(x) - count}:
            part = kernel.forward(x[start : start + count], linear)
            assert torch.equal(part, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("weight_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("num_rows", [1, 2, 6, 40])
def test_narrow_weights_give_the_bits_of_their_values_in_fp32(
    kernel: LinearKernel, weight_format: str, num_rows: int
) -> None:
    linear, values = pack(kernel, weight_format, draw(70, 333))
    plain = kernel.pack(values)
    # Kept as fp32 even where bf16 would hold all but one of the values.
    values[0, 0] = torch.nextafter(values[0, 0], torch.tensor(torch.inf))
    wide = kernel.pack(values)
    x = draw(num_rows, 333, seed=2)

    y = kernel.forward(x, linear)

    assert torch.equal(y, kernel.forward(x, plain))
    assert wide.weight_format == "fp32"
    assert torch.equal(y[:, 1:], kernel.forward(x, wide)[:, 1:])


def test_fp32_weights_are_kept_as_bf16_only_where_no_bit_is_lost(kernel: LinearKernel) -> None:
    values = draw(20, 40).bfloat16().float()
    odd = values.clone()
    odd[19, 39] += 2**-20

    assert kernel.pack(values).weight_format == "bf16"
    assert kernel.pack(odd).weight_format == "fp32"
    assert kernel.pack(values).num_bytes * 2 == kernel.pack(odd).num_bytes


def test_bf16_rows_are_summed_in_fp32_and_rounded_once(kernel: LinearKernel) -> None:
    linear, _ = pack(kernel, "bf16", draw(50, 300), draw(50))
    x = draw(9, 300, seed=2).bfloat16()

    y = kernel.forward(x, linear)

    assert torch.equal(y, kernel.forward(x.float(), linear).bfloat16())


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 6, 7, 200])
def test_threads_change_no_bit(native_cache: Path, weight_format: str, num_rows: int) -> None:
    x, weight = draw(num_rows, 576, seed=2), draw(960, 576)

    def run(num_threads: int) -> Tensor:
        own = LinearKernel(cache_dir=native_cache, num_threads=num_threads)
        return own.forward(x, pack(own, weight_format, weight)[0])

    alone = run(1)

    assert torch.equal(run(2), alone)
    assert torch.equal(run(4), alone)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_finite_harms_no_other(
    kernel: LinearKernel, weight_format: str, bad: float
) -> None:
    linear, _ = pack(kernel, weight_format, draw(40, 190))
    x = draw(31, 190, seed=2)
    clean = kernel.forward(x, linear)
    generator = torch.Generator().manual_seed(3)
    victims = torch.randperm(31, generator=generator)[:9]
    x[victims, torch.randint(190, (9,), generator=generator)] = bad

    for count in (1, 2, 6, 7, 31):
        rows = torch.randperm(31, generator=generator)[:count]
        y = kernel.forward(x[rows], linear)
        is_victim = torch.isin(rows, victims)
        assert torch.equal(y[~is_victim], clean[rows[~is_victim]])
        assert not bool(y[is_victim].isfinite().any())


def test_rows_may_lie_apart(kernel: LinearKernel) -> None:
    linear, _ = pack(kernel, "fp32", draw(40, 100))
    wide = draw(12, 250, seed=2)

    y = kernel.forward(wide[:, 50:150], linear)

    assert torch.equal(y, kernel.forward(wide[:, 50:150].contiguous(), linear))


def test_no_rows_give_no_rows(kernel: LinearKernel) -> None:
    linear, _ = pack(kernel, "fp32", draw(40, 100))

    assert kernel.forward(torch.empty(0, 100), linear).shape == (0, 40)


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
    kernel: LinearKernel, change: Callable[[Tensor], Tensor], message: str
) -> None:
    linear, _ = pack(kernel, "fp32", draw(40, 100))

    with pytest.raises(ValueError, match=message):
        kernel.forward(change(draw(4, 100)), linear)


def test_weights_that_do_not_fit_are_refused(kernel: LinearKernel) -> None:
    with pytest.raises(ValueError, match=r"weight is \(3, 4\) torch.float64"):
        kernel.pack(torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"bias is \(4,\): it must be \(3,\)"):
        kernel.pack(torch.ones(3, 4), torch.ones(4))


def test_quantized_weights_take_the_memory_they_should(kernel: LinearKernel) -> None:
    weight = draw(64, 640)
    sizes = {kind: pack(kernel, kind, weight)[0].num_bytes for kind in FORMATS}

    assert sizes["fp32"] == weight.numel() * 4
    assert sizes["bf16"] == weight.numel() * 2
    assert sizes["int8"] == weight.numel() + 64 * 4
    assert sizes["int4"] == weight.numel() * 5 // 8
