"""Linear layers: right, and every row on its own, with every method this CPU has."""

from __future__ import annotations

import pytest
import torch
from loraplex_engine.model.linear import (
    CublasMethod,
    LinearMethod,
    PackedMethod,
    PlainMethod,
    UpcastMethod,
    choose_method,
    has_fast_bf16,
)
from torch.nn import functional

METHODS: list[tuple[LinearMethod, torch.dtype]] = [
    (PlainMethod(), torch.float32),
    (PlainMethod(), torch.bfloat16),
    (choose_method(torch.float32), torch.float32),
    (choose_method(torch.bfloat16), torch.bfloat16),
    (UpcastMethod(choose_method(torch.float32)), torch.bfloat16),
]
# How many rows a method wants at a time.
MULTIPLES = {"torch": 4, "onednn": 4, "torch_fp32": 4, "onednn_fp32": 4, "cublas": 1}
IDS = [f"{method.name}-{str(dtype).removeprefix('torch.')}" for method, dtype in METHODS]
SHAPES = [(576, 960), (100, 48), (1536, 576), (40, 7)]


@pytest.mark.parametrize(("method", "dtype"), METHODS, ids=IDS)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_every_row_is_right_and_the_same_at_every_count(
    method: LinearMethod, dtype: torch.dtype, num_in: int, num_out: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype)
    x = torch.randn(132, num_in, generator=generator).to(dtype)
    linear = method.pack(weight.clone(), bias.clone())

    with torch.inference_mode():
        whole = linear(x)
        parts = [
            (start, count, linear(x[start : start + count]))
            for count in (*range(1, 18), 33, 130)
            for start in (0, 2)
        ]

    exact = functional.linear(x.double(), weight.double(), bias.double())
    error = (whole.double() - exact).abs() / exact.abs().clamp(min=num_in**0.5)
    assert error.max() < (1e-5 if dtype == torch.float32 else 2**-7)
    assert whole.dtype == dtype
    assert (linear.in_features, linear.out_features) == (num_in, num_out)
    for start, count, part in parts:
        assert torch.equal(part, whole[start : start + count]), (start, count)


def test_an_upcast_row_is_the_exact_sum_rounded_once() -> None:
    weight, x = torch.randn(8, 64).bfloat16(), torch.randn(4, 64).bfloat16()

    y = UpcastMethod(PlainMethod()).pack(weight, None)(x)

    assert torch.equal(y, functional.linear(x.float(), weight.float()).bfloat16())


def test_zero_rows_give_zero_rows() -> None:
    linear = PlainMethod().pack(torch.ones(3, 5), None)

    assert linear(torch.ones(0, 5)).shape == (0, 3)


def test_methods_say_what_rows_they_want() -> None:
    methods = [*(method for method, _ in METHODS), CublasMethod()]

    assert {method.name: method.row_multiple for method in methods}.items() <= MULTIPLES.items()


@pytest.mark.parametrize("method", [method for method, _ in METHODS[:3]], ids=IDS[:3])
def test_a_head_is_a_linear_without_bias(method: LinearMethod) -> None:
    weight, x = torch.randn(9, 24), torch.randn(5, 24)
    dtype = torch.bfloat16 if method is METHODS[1][0] else torch.float32

    y = method.pack_head(weight.to(dtype))(x.to(dtype))

    assert torch.equal(y, method.pack(weight.to(dtype), None)(x.to(dtype)))


def test_the_method_fits_the_cpu() -> None:
    fp32, bf16 = choose_method(torch.float32), choose_method(torch.bfloat16)

    assert fp32.name in ("onednn", "torch")
    assert (bf16.name in ("onednn", "torch")) == has_fast_bf16()
    assert isinstance(PackedMethod().name, str)
