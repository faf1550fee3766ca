"""What the interpreter gets wrong is mended: kernels tested in it behave as on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from loraplex_kernels.support import is_interpreted

from tests.support.kernel_inputs import normal

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton is not interpreted here")


@triton.jit
def _convert(source, target, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(source + index)
    tl.store(target + index, x.to(target.dtype.element_ty))


@triton.jit
def _multiply(a, b, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    at = index[:, None] * BLOCK + index[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def _add(a, b, out):
    tl.store(out, tl.load(a) + tl.load(b))


def convert(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty_like(source, dtype=dtype)
    _convert[(1,)](source, target, BLOCK=source.numel())
    return target


EDGES = [0.0, -0.0, 1.00390625, 1.01171875, -3e38, torch.inf, torch.nan, 1e-40]


@triton.jit
def _widen(a_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < 3)
    tl.store(out_ptr + at, a.to(tl.bfloat16), mask=at < 3)


@triton.jit
def _highest(a_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(a_ptr + tl.arange(0, BLOCK)), axis=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_conversions_round_to_nearest_even_and_keep_nan(dtype: torch.dtype) -> None:
    x = torch.cat((normal((1016,), torch.float32, torch.device("cpu")), torch.tensor(EDGES)))
    largest = torch.finfo(dtype).max
    # fp8 saturates, as the instruction that Triton emits does; bf16 has infinity.
    expected = (x if dtype == torch.bfloat16 else x.clamp(-largest, largest)).to(dtype)

    narrow = convert(x, dtype)
    wide = convert(narrow, torch.float32)

    assert torch.equal(narrow.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(wide, expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_those_of_the_numbers(dtype: torch.dtype) -> None:
    a, b = (normal((16, 16), dtype, torch.device("cpu"), seed=seed) for seed in (1, 2))
    out = torch.empty(16, 16)

    _multiply[(1,)](a, b, out, BLOCK=16)

    torch.testing.assert_close(out, a.float() @ b.float())


def test_int8_products_are_exact() -> None:
    a, b = (torch.randint(-128, 128, (16, 16), dtype=torch.int8) for _ in range(2))
    out = torch.empty(16, 16, dtype=torch.int32)

    _multiply[(1,)](a, b, out, BLOCK=16)

    assert torch.equal(out, a.int() @ b.int())


def test_arithmetic_on_packed_bits_is_refused() -> None:
    a = torch.ones(1, dtype=torch.bfloat16)

    with pytest.raises(Exception, match="convert to float32 first"):
        _add[(1,)](a, a, a.clone())


def test_infinity_minus_infinity_is_no_warning() -> None:
    a, out = torch.tensor([torch.inf]), torch.empty(1)

    _add[(1,)](a, -a, out)

    assert out.isnan().all()


def test_integers_become_the_numbers_they_are() -> None:
    a, out = torch.tensor([-127, 0, 3], dtype=torch.int8), torch.empty(3, dtype=torch.bfloat16)

    _widen[(1,)](a, out, BLOCK=4)

    assert out.tolist() == [-127.0, 0.0, 3.0]


def test_a_maximum_over_nan_alone_is_no_warning() -> None:
    a, out = torch.full((4,), torch.nan), torch.empty(1)

    _highest[(1,)](a, out, BLOCK=4)

    assert out.isnan().all()
