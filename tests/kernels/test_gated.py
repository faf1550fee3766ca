"""act(gate) * up against the reference, both activations."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels import reference
from loraplex_kernels.gated import Activation, gated
from loraplex_kernels.plans import Plan, open_plans

from tests.support.kernel_inputs import DTYPES, TOLERANCES, normal

TABLE = open_plans("sm_90", "fast")
ACTIVATIONS = get_args(Activation)


def plan(tokens: int = 1) -> Plan:
    return TABLE.choose("gated", phase="decode" if tokens <= 64 else "prefill", tokens=tokens)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 33, 1024, 1500, 2049])
def test_equals_the_reference(
    width: int, dtype: torch.dtype, activation: Activation, device: torch.device
) -> None:
    gate_up = 3 * normal((3, 2 * width), dtype, device)
    poisoned = torch.full_like(gate_up[:, :width], torch.nan).contiguous()

    y = gated(gate_up, activation, plan(), out_TI=poisoned)

    assert y is poisoned
    torch.testing.assert_close(y, reference.gated(gate_up, activation), **TOLERANCES[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_do_not_overflow(activation: Activation, device: torch.device) -> None:
    gates = torch.tensor([[-1e30, -1e4, -90.0, -0.0, 90.0, 1e4, 1e30]], device=device)
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)

    y = gated(gate_up, activation, plan())

    torch.testing.assert_close(y, gates.clamp(min=0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_poisoned_row_stays_alone(
    bad: float, activation: Activation, device: torch.device
) -> None:
    gate_up = normal((3, 80), torch.bfloat16, device)
    expected = gated(gate_up, activation, plan())
    gate_up[1] = bad

    y = gated(gate_up, activation, plan())

    assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


@given(rows=st.integers(0, 6), width=st.integers(1, 200), extra=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_a_row_has_the_same_bits_alone_and_under_every_plan(
    rows: int, width: int, extra: int
) -> None:
    # Rows of something wider: the stride is not the width.
    gate_up = normal((rows, 2 * width + extra), torch.bfloat16, torch.device("cpu"))[:, : 2 * width]

    together = gated(gate_up, "silu", plan(tokens=512))

    assert together.shape == (rows, width)
    for row in range(rows):
        assert torch.equal(gated(gate_up[row : row + 1], "silu", plan())[0], together[row])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gate_up", {"gate_up_TI": torch.zeros(8)}),
        ("gate_up", {"gate_up_TI": torch.zeros(2, 7)}),
        ("gate_up", {"gate_up_TI": torch.zeros(8, 2).T}),
        ("gate_up", {"gate_up_TI": torch.zeros(2, 0)}),
        ("activation", {"activation": "relu"}),
        ("out", {"out_TI": torch.zeros(2, 8)}),
        ("out", {"out_TI": torch.zeros(2, 4, dtype=torch.bfloat16)}),
        ("out", {"out_TI": torch.zeros(4, 2).T}),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, object]) -> None:
    right = {"gate_up_TI": torch.zeros(2, 8), "activation": "silu"}

    with pytest.raises(ValueError, match=rf"^{name} is "):
        gated(**{**right, **arguments}, plan=plan())
