"""Weights of eight and four bits: near enough, and what they say they lost is what they lost."""

from __future__ import annotations

import pytest
import torch
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.quantize import INT4_GROUP, Quantizer
from torch import Tensor

from tests.support.adapter_files import native_cache_dir

SHAPES = [(5, 1), (7, 31), (3, 33), (40, 576), (17, 190)]


@pytest.fixture(scope="module")
def quantizer(request: pytest.FixtureRequest) -> Quantizer:
    try:
        return Quantizer(cache_dir=native_cache_dir(request.config), num_threads=2)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")


def draw(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_int8_errs_by_half_a_step_at_most(
    quantizer: Quantizer, num_outputs: int, num_inputs: int
) -> None:
    weight = draw(num_outputs, num_inputs)

    quantized = quantizer.int8(weight)

    step = weight.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(quantized.scale_NG, step)
    assert int(quantized.q_NK.abs().max()) == 127
    error = (quantized.dequantized() - weight).abs()
    assert bool((error <= step * (0.5 + 127 * 2**-23)).all())


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_int4_is_no_worse_than_its_whole_range(
    quantizer: Quantizer, num_outputs: int, num_inputs: int
) -> None:
    weight = draw(num_outputs, num_inputs)

    quantized = quantizer.int4(weight)

    assert quantized.q_NK.dtype is torch.uint8
    assert int(quantized.q_NK.max()) <= 15
    assert quantized.offset_NG is not None
    assert quantized.scale_NG.shape == (num_outputs, -(-num_inputs // INT4_GROUP))
    for part in (quantized.scale_NG, quantized.offset_NG):
        assert torch.equal(part, part.bfloat16().float())
    error = (quantized.dequantized() - weight).square()
    for first in range(0, num_inputs, INT4_GROUP):
        group = weight[:, first : first + INT4_GROUP]
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        # Half a step, and what offset and scale lose as bf16: a share of 2^-8 of the offset and of all steps.
        most = (high - low) / 15 / 2 + 2**-8 * (low.abs() + 2 * (high - low))
        lost = error[:, first : first + INT4_GROUP].sum(1, keepdim=True)
        assert bool((lost <= group.shape[1] * most.square()).all())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.011), (4, 0.08)], ids=["int8", "int4"])
def test_normal_weights_lose_what_the_format_says(
    quantizer: Quantizer, bits: int, most: float
) -> None:
    # A step is the range over 255 or 15 levels, and uniform errors are a step / sqrt(12): of 2,048 normal weights the
    # range is about 2 * 3.5 (one row in thousands more than 2 * 4.7), of 32 about 4.1.
    weight = draw(64, 2048)

    quantized = quantizer.int8(weight) if bits == 8 else quantizer.int4(weight)

    truth = float((quantized.dequantized() - weight).norm() / weight.norm())
    assert quantized.relative_error == pytest.approx(truth, rel=1e-4)
    assert truth < most


def test_int4_for_products_in_bf16_is_rounded_to_it_and_says_what_that_loses(
    quantizer: Quantizer, pytestconfig: pytest.Config
) -> None:
    # Levels far from zero: bf16 keeps 2^-9 of them, much more than a step of the format.
    weight = draw(20, 190) / 1000 + 3.0
    rounding = Quantizer(
        cache_dir=native_cache_dir(pytestconfig), num_threads=2, dtype=torch.bfloat16
    )

    exact, rounded = quantizer.int4(weight), rounding.int4(weight)

    values = rounded.dequantized()
    assert torch.equal(values, exact.dequantized().bfloat16().float())
    truth = float((values - weight).norm() / weight.norm())
    assert rounded.relative_error == pytest.approx(truth, rel=1e-4)
    assert rounded.relative_error > exact.relative_error


def test_what_fits_is_kept_to_the_bit(quantizer: Quantizer) -> None:
    generator = torch.Generator().manual_seed(0)
    level8 = torch.randint(-127, 128, (6, 64), generator=generator)
    level8[:, 0] = 127
    level4 = torch.randint(0, 16, (6, 64), generator=generator)
    level4[:, ::INT4_GROUP], level4[:, 1::INT4_GROUP] = 0, 15

    weight8, weight4 = level8 * 0.25, level4 * 0.5 - 3.0

    assert torch.equal(quantizer.int8(weight8).dequantized(), weight8)
    assert torch.equal(quantizer.int4(weight4).dequantized(), weight4)
    assert quantizer.int4(weight4).relative_error == 0.0


def test_constant_and_zero_weights(quantizer: Quantizer) -> None:
    for value in (0.0, 1.5, -2.0):
        weight = torch.full((3, 70), value)
        assert torch.equal(quantizer.int8(weight).dequantized(), weight)
        assert torch.equal(quantizer.int4(weight).dequantized(), weight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_weights_that_are_not_finite_are_refused(quantizer: Quantizer, bad: float) -> None:
    weight = draw(3, 70)
    weight[1, 69] = bad

    for quantize in (quantizer.int8, quantizer.int4):
        with pytest.raises(ValueError, match="not finite"):
            quantize(weight)
