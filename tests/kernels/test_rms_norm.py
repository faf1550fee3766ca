"""RMSNorm, with and without the residual addition, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels import reference
from loraplex_kernels.plans import open_plans
from loraplex_kernels.rms_norm import MAX_WIDTH, rms_norm
from torch import Tensor

from tests.support.kernel_inputs import DTYPES, TOLERANCES, normal

EPS = 1e-5
TABLE = open_plans("sm_90", "invariant")


def plan(width: int):
    return TABLE.choose("rms_norm", phase="decode", tokens=1, k=width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 576, 2049])
def test_equals_the_reference(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = normal((3, width), dtype, device), normal((width,), dtype, device, seed=1)
    poisoned = torch.full_like(x, torch.nan)

    y = rms_norm(x, weight, EPS, plan(width), out_TH=poisoned)

    assert y is poisoned
    torch.testing.assert_close(y, reference.rms_norm(x, weight, EPS), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_first_and_kept(dtype: torch.dtype, device: torch.device) -> None:
    x, residual = normal((5, 96), dtype, device), normal((5, 96), dtype, device, seed=1)
    weight = normal((96,), dtype, device, seed=2)
    total = residual + x

    y = rms_norm(x, weight, EPS, plan(96), residual_TH=residual)

    assert torch.equal(residual, total), "bit for bit what the model's dtype adds up to"
    torch.testing.assert_close(y, reference.rms_norm(total, weight, EPS), **TOLERANCES[dtype])


def test_rows_may_be_columns_of_something_wider(device: torch.device) -> None:
    wide = normal((4, 50), torch.float32, device)
    untouched = wide[:, 40:].clone()
    x, residual, weight = wide[:, :20], wide[:, 20:40], normal((20,), torch.float32, device)
    expected = reference.rms_norm(x + residual, weight, EPS)

    y = rms_norm(x, weight, EPS, plan(20), residual_TH=residual)

    torch.testing.assert_close(y, expected)
    assert torch.equal(wide[:, 40:], untouched)


def test_a_poisoned_row_stays_alone(device: torch.device) -> None:
    x, weight = normal((3, 40), torch.bfloat16, device), normal((40,), torch.bfloat16, device)
    expected = rms_norm(x, weight, EPS, plan(40))
    x[1, 3] = torch.nan

    y = rms_norm(x, weight, EPS, plan(40))

    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


@given(rows=st.integers(0, 9), width=st.integers(1, 300), eps=st.sampled_from([1e-6, 1e-5, 0.1]))
@settings(max_examples=25, deadline=None)
def test_a_row_has_the_same_bits_alone(rows: int, width: int, eps: float) -> None:
    device = torch.device("cpu")
    x, weight = (
        normal((rows, width), torch.bfloat16, device),
        normal((width,), torch.bfloat16, device),
    )

    together = rms_norm(x, weight, eps, plan(width))

    assert together.shape == x.shape
    for row in range(rows):
        assert torch.equal(rms_norm(x[row : row + 1], weight, eps, plan(width))[0], together[row])


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("x", {"x_TH": zeros(8)}),
        ("x", {"x_TH": zeros(8, 2).T}),
        ("x", {"x_TH": zeros(1, 1).expand(2, MAX_WIDTH + 1).contiguous()}),
        ("weight", {"weight_H": zeros(7)}),
        ("weight", {"weight_H": zeros(8, dtype=torch.bfloat16)}),
        ("residual", {"residual_TH": zeros(1, 8)}),
        ("residual", {"residual_TH": zeros(2, 8, dtype=torch.float16)}),
        ("out", {"out_TH": zeros(2, 16)[:, :8]}),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, Tensor]) -> None:
    right = {"x_TH": zeros(2, 8), "weight_H": zeros(8)}

    with pytest.raises(ValueError, match=rf"^{name} is "):
        rms_norm(**{**right, **arguments}, eps=EPS, plan=plan(8))
