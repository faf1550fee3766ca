"""The linear layer with a fixed order of sums: right, and every row on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_kernels import reference
from loraplex_kernels.gemm import gemm, tune_cases
from loraplex_kernels.plans import COLUMNS, Phase, Plan, open_plans
from loraplex_kernels.support import ARCHITECTURES, dtype_name
from torch import Tensor

from bench.gpu_check.device_only import ORDER_DTYPES, num_out_of_order
from bench.gpu_check.machine import CudaMachine
from tests.support.kernel_inputs import DTYPES, TOLERANCES, normal

SMALL = Plan({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2}, 4, 2, "for tests")


def plan(dtype: torch.dtype, phase: Phase, arch: str = "sm_90") -> Plan:
    table = open_plans(arch, "invariant")
    return table.choose("gemm", phase=phase, tokens=1, dtype=dtype_name(dtype))


def inputs(
    rows: int, num_in: int, num_out: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal((rows, num_in), dtype, device, seed=1),
        normal((num_out, num_in), dtype, device, seed=2) / num_in**0.5,
        normal((num_out,), dtype, device, seed=3),
    )


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 17), (64, 48), (100, 7), (96, 130)])
def test_equals_the_reference(
    num_in: int, num_out: int, dtype: torch.dtype, has_bias: bool, device: torch.device
) -> None:
    x, weight, bias = inputs(35, num_in, num_out, dtype, device)
    bias_or_none = bias if has_bias else None
    poisoned = torch.full((35, num_out), torch.nan, dtype=dtype, device=device)

    y = gemm(x, weight, bias_or_none, SMALL, out_MN=poisoned)

    assert y is poisoned
    torch.testing.assert_close(y, reference.gemm(x, weight, bias_or_none), **TOLERANCES[dtype])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_committed_plans_compute_the_same(
    dtype: torch.dtype, phase: Phase, arch: str, device: torch.device
) -> None:
    x, weight, bias = inputs(70, 150, 300, dtype, device)

    y = gemm(x, weight, bias, plan(dtype, phase, arch))

    torch.testing.assert_close(y, reference.gemm(x, weight, bias), **TOLERANCES[dtype])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_phase_has_one_plan_for_every_number_of_rows(arch: str) -> None:
    table = open_plans(arch, "invariant")
    for phase in ("decode", "prefill"):
        for dtype in ("bf16", "fp32"):
            plans = {
                str(table.choose("gemm", phase=phase, tokens=tokens, k=k, n=k, dtype=dtype))
                for tokens in (1, 2, 16, 17, 64, 65, 256, 512, 4096)
                for k in (64, 4096)
            }
            assert len(plans) == 1


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_row_has_the_same_bits_in_any_company(phase: Phase, device: torch.device) -> None:
    x, weight, bias = inputs(150, 200, 40, torch.bfloat16, device)
    chosen = plan(torch.bfloat16, phase)
    together = gemm(x, weight, bias, chosen)

    for first, count in [(0, 1), (3, 5), (63, 3), (129, 21), (17, 130)]:
        rows = slice(first, first + count)
        assert torch.equal(gemm(x[rows], weight, bias, chosen), together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ORDER_DTYPES, ids=str)
def test_decode_and_prefill_sum_in_the_same_order(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    assert num_out_of_order(CudaMachine(), dtype) == (0, 300 * 1000)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_poisoned_row_stays_alone(bad: float, device: torch.device) -> None:
    # The last row is what rows past the end read.
    x, weight, bias = inputs(18, 40, 20, torch.bfloat16, device)
    expected = gemm(x, weight, bias, SMALL)
    x[[4, 17]] = bad

    y = gemm(x, weight, bias, SMALL)

    assert not y[[4, 17]].isfinite().any()
    healthy = [row for row in range(18) if row not in (4, 17)]
    assert torch.equal(y[healthy], expected[healthy])


def test_a_poisoned_output_column_stays_alone(device: torch.device) -> None:
    x, weight, _ = inputs(5, 40, 20, torch.bfloat16, device)
    expected = gemm(x, weight, None, SMALL)
    weight[[3, 19]] = torch.nan

    y = gemm(x, weight, None, SMALL)

    assert y[:, [3, 19]].isnan().all()
    healthy = [column for column in range(20) if column not in (3, 19)]
    assert torch.equal(y[:, healthy], expected[:, healthy])


@given(
    rows=st.integers(0, 40),
    num_in=st.integers(1, 70),
    num_out=st.integers(1, 40),
    extra=st.integers(0, 5),
)
@settings(max_examples=25, deadline=None)
def test_any_shape_equals_the_reference(rows: int, num_in: int, num_out: int, extra: int) -> None:
    cpu = torch.device("cpu")
    wide, weight, bias = inputs(rows, num_in + extra, num_out, torch.float32, cpu)
    x, weight = wide[:, :num_in], weight[:, :num_in].contiguous()

    y = gemm(x, weight, bias, SMALL)

    torch.testing.assert_close(y, reference.gemm(x, weight, bias), **TOLERANCES[torch.float32])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("x", {"x_MK": torch.zeros(8)}),
        ("x", {"x_MK": torch.zeros(8, 3).T}),
        ("weight", {"weight_NK": torch.zeros(4, 7)}),
        ("weight", {"weight_NK": torch.zeros(8, 4).T}),
        ("weight", {"weight_NK": torch.zeros(4, 8, dtype=torch.bfloat16)}),
        ("weight", {"weight_NK": torch.zeros(0, 8)}),
        ("bias", {"bias_N": torch.zeros(5)}),
        ("bias", {"bias_N": torch.zeros(4, dtype=torch.bfloat16)}),
        ("out", {"out_MN": torch.zeros(3, 5)}),
        ("out", {"out_MN": torch.zeros(4, 3).T}),
    ],
)
def test_a_wrong_argument_is_named(name: str, arguments: dict[str, Tensor]) -> None:
    right = {"x_MK": torch.zeros(3, 8), "weight_NK": torch.zeros(4, 8), "bias_N": torch.zeros(4)}

    with pytest.raises(ValueError, match=rf"^{name} is "):
        gemm(**{**right, **arguments}, plan=SMALL)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_entry_is_tuned_in_both_columns_by_tiles_of_the_same_instruction(arch: str) -> None:
    table = open_plans(arch, "fast")

    cases = list(tune_cases(table, torch.device("cpu")))

    assert [case.entry_index for case in cases] == list(range(len(table.entries("gemm"))))
    for case in cases:
        assert case.columns == COLUMNS
        assert len(case.candidates) > 1
        present = table.entries("gemm")[case.entry_index].plan
        for candidate in (present, *case.candidates):
            assert candidate.config["BLOCK_M"] % 64 == 0
            assert candidate.num_warps % 4 == 0


def test_a_case_of_the_tuner_launches_its_candidates(device: torch.device) -> None:
    case = list(tune_cases(open_plans("sm_90", "fast"), device, num_outputs=40, num_inputs=40))[1]

    out = case.bind(case.candidates[0])()

    assert isinstance(out, Tensor)
    assert out.shape == (64, 40)
