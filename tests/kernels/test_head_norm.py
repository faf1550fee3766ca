"""The norm of query and key heads, in place, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels import reference
from loraplex_kernels.head_norm import head_norm
from loraplex_kernels.plans import open_plans
from torch import Tensor

from tests.support.kernel_inputs import DTYPES, TOLERANCES, normal

EPS = 1e-6
PLAN = open_plans("sm_90", "fast").choose("head_norm", phase="decode", tokens=1)


def inputs(
    rows: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = normal((rows, (q_heads + 2 * kv_heads) * dim), dtype, device)
    return qkv, normal((dim,), dtype, device, seed=1), normal((dim,), dtype, device, seed=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(1, 1, 16), (3, 1, 80), (9, 3, 64), (16, 8, 128), (2, 2, 6)]
)
def test_equals_the_reference_and_leaves_v(
    q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv, q_weight, k_weight = inputs(4, q_heads, kv_heads, dim, dtype, device)
    heads = {"num_q_heads": q_heads, "num_kv_heads": kv_heads}
    expected = reference.head_norm(qkv, q_weight, k_weight, EPS, **heads)
    v = qkv[:, (q_heads + kv_heads) * dim :].clone()

    head_norm(qkv, q_weight, k_weight, EPS, PLAN, **heads)

    torch.testing.assert_close(qkv, expected, **TOLERANCES[dtype])
    assert torch.equal(qkv[:, (q_heads + kv_heads) * dim :], v)


def test_a_poisoned_head_stays_alone(device: torch.device) -> None:
    qkv, q_weight, k_weight = inputs(3, 3, 2, 16, torch.bfloat16, device)
    healthy = qkv.clone()
    qkv[1, 20] = torch.nan  # of query head 1

    for tensor in (healthy, qkv):
        head_norm(tensor, q_weight, k_weight, EPS, PLAN, num_q_heads=3, num_kv_heads=2)

    assert qkv[1, 16:32].isnan().all()
    qkv[1, 16:32] = healthy[1, 16:32]
    assert torch.equal(qkv, healthy)


@given(
    rows=st.integers(0, 5),
    q_heads=st.integers(1, 12),
    kv_heads=st.integers(1, 4),
    dim=st.integers(1, 20),
)
@settings(max_examples=25, deadline=None)
def test_a_row_has_the_same_bits_alone(rows: int, q_heads: int, kv_heads: int, dim: int) -> None:
    qkv, q_weight, k_weight = inputs(
        rows, q_heads, kv_heads, 2 * dim, torch.bfloat16, torch.device("cpu")
    )
    together = qkv.clone()
    heads = {"num_q_heads": q_heads, "num_kv_heads": kv_heads}

    head_norm(together, q_weight, k_weight, EPS, PLAN, **heads)

    for row in range(rows):
        alone = qkv[row : row + 1]
        head_norm(alone, q_weight, k_weight, EPS, PLAN, **heads)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("^qkv is ", {"qkv_TC": torch.zeros(32)}),
        ("^qkv is ", {"qkv_TC": torch.zeros(32, 2).T}),
        ("^q_weight is ", {"q_weight_D": torch.zeros(8, dtype=torch.bfloat16)}),
        ("^k_weight is ", {"k_weight_D": torch.zeros(4)}),
        ("do not fit in qkv", {"num_q_heads": 4}),
        ("do not fit in qkv", {"num_kv_heads": 0}),
    ],
)
def test_a_wrong_argument_is_named(match: str, arguments: dict[str, object]) -> None:
    right = {
        "qkv_TC": torch.zeros(2, 32),
        "q_weight_D": torch.zeros(8),
        "k_weight_D": torch.zeros(8),
        "num_q_heads": 2,
        "num_kv_heads": 1,
    }

    with pytest.raises(ValueError, match=match):
        head_norm(**{**right, **arguments}, eps=EPS, plan=PLAN)
