"""y = x W^T + b with a fixed order of sums: the linear layers of the `invariant` column.

cuBLAS picks another kernel, and with it another order of sums, for another number of rows. Here each output
is one accumulator that walks K from 0 in steps of BLOCK_K whatever the rows around it, so a row's bits do not
depend on M. The plans of decode and prefill differ in tile shape only: same instruction, K in the same order; split-K is
not offered, as its planes would need a second launch.
Operands go to the tensor cores in the model's dtype; fp32 is multiplied in full precision on the fp32 units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div
from loraplex_kernels.plans import COLUMNS, Plan, PlanTable
from loraplex_kernels.support import Support, dtype_name, dtype_size, triton_type
from loraplex_kernels.tune import Launch, TuneCase, candidates

KERNEL = "gemm"
_OUTPUTS, _INPUTS = 28_672, 4096  # gate_up of Llama-3.1-8B


@triton.jit
def _gemm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_K_EVEN: tl.constexpr,
):
    # Programs that run side by side share GROUP_M row tiles, so that a weight tile is read once from device
    # memory and then found in L2.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(num_outputs, BLOCK_N)
    group = program // (GROUP_M * column_tiles)
    first_row_tile = group * GROUP_M
    group_rows = tl.minimum(row_tiles - first_row_tile, GROUP_M)
    within = program % (GROUP_M * column_tiles)
    row_tile = first_row_tile + within % group_rows
    column_tile = within // group_rows

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the end read the last one instead of a mask's zero: unmasked loads are
    # the wide ones, and what they yield is never stored.
    safe_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    safe_column = tl.minimum(column, num_outputs - 1).to(tl.int64)
    x_at = x_ptr + safe_row[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + safe_column[None, :] * num_inputs + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        if IS_K_EVEN:
            x = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            is_in_k = k < num_inputs - start
            x = tl.load(x_at, mask=is_in_k[None, :], other=0.0)
            weight = tl.load(weight_at, mask=is_in_k[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias_ptr + safe_column).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    mask = (row < num_rows)[:, None] & (column < num_outputs)[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=mask)


def gemm(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    plan: Plan,
    *,
    out_MN: Tensor | None = None,
) -> Tensor:
    """x W^T + b, summed in fp32 in the order of K and rounded once.

    Shapes: M rows, K inputs, N outputs.
    Args:
        x_MK: (M, K) bf16, fp16 or fp32, rows contiguous.   weight_NK: (N, K) contiguous, dtype of x.
        bias_N: (N,) contiguous, dtype of x, or None.
        out_MN: (M, N) contiguous, dtype of x, to be overwritten; None: a new one.
    Returns:
        (M, N) contiguous, dtype of x.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.gemm`.
    """
    _check(x_MK, weight_NK, bias_N)
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    if out_MN is None:
        out_MN = x_MK.new_empty((num_rows, num_outputs))
    elif (
        out_MN.shape != (num_rows, num_outputs)
        or out_MN.dtype != x_MK.dtype
        or not out_MN.is_contiguous()
    ):
        raise ValueError(
            f"out is {tuple(out_MN.shape)} {out_MN.dtype}, strides {out_MN.stride()}, "
            f"not ({num_rows}, {num_outputs}) {x_MK.dtype} contiguous"
        )
    if num_rows:
        config = plan.config
        grid = (ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(num_outputs, config["BLOCK_N"]),)
        _gemm[grid](
            x_MK,
            weight_NK,
            weight_NK if bias_N is None else bias_N,
            out_MN,
            num_rows,
            num_outputs,
            num_inputs,
            x_MK.stride(0),
            **_constants(plan, num_inputs, has_bias=bias_N is not None),
            **plan.launch(),
        )
    return out_MN


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry at gate_up of Llama-3.1-8B; bf16 on tensor cores, fp32 where the entry is made for it."""
    num_outputs, num_inputs = _OUTPUTS, _INPUTS
    for entry in table.entries(KERNEL):
        dtype = entry.when.dtype or "bf16"
        rows = 64 if entry.when.phase == "decode" else 8192
        pointer, config = f"*{triton_type(dtype)}", entry.plan.config
        needs_wide = config["BLOCK_M"] >= 64 and entry.plan.num_warps % 4 == 0
        yield AotCase(
            kernel=KERNEL,
            fn=_gemm,
            signature={
                "x_ptr": pointer,
                "weight_ptr": pointer,
                "bias_ptr": pointer,
                "out_ptr": pointer,
                "num_rows": "i32",
                "num_outputs": "i32",
                "num_inputs": "i32",
                "x_stride": "i32",
            },
            constexprs={**_constants(entry.plan, num_inputs, has_bias=False), **config},
            divisible_by_16=(
                *("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"),
                *("num_outputs", "num_inputs", "x_stride"),
            ),
            plan=entry.plan,
            arch=support.name,
            dtype=dtype,
            needs=None if dtype == "fp32" else ("wgmma" if needs_wide else "mma"),
            bytes_moved=dtype_size(dtype)
            * (rows * num_inputs + num_outputs * num_inputs + rows * num_outputs),
            flops=2 * rows * num_inputs * num_outputs,
            shape=f"M={rows} N={num_outputs} K={num_inputs}",
        )


def tune_cases(
    table: PlanTable,
    device: torch.device,
    *,
    num_outputs: int = _OUTPUTS,
    num_inputs: int = _INPUTS,
) -> Iterator[TuneCase]:
    """Every entry at gate_up of Llama-3.1-8B; tensors are made when a plan is bound.

    Every candidate walks K in the same order by the same instruction, so both columns may be rewritten, each entry
    on its own: decode's sums and prefill's stay the same.
    """

    @cache
    def operands(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x_MK = torch.randn(rows, num_inputs, device=device, dtype=dtype)
        weight_NK = torch.randn(num_outputs, num_inputs, device=device, dtype=dtype)
        return x_MK, weight_NK, x_MK.new_empty(rows, num_outputs)

    for index, entry in enumerate(table.entries(KERNEL)):
        dtype = torch.float32 if entry.when.dtype == "fp32" else torch.bfloat16
        rows = 64 if entry.when.phase == "decode" else 2048

        def bind(plan: Plan, rows: int = rows, dtype: torch.dtype = dtype) -> Launch:
            x_MK, weight_NK, out_MN = operands(rows, dtype)
            return lambda: gemm(x_MK, weight_NK, None, plan, out_MN=out_MN)

        yield TuneCase(
            KERNEL,
            index,
            f"M={rows} N={num_outputs} K={num_inputs}",
            _space(entry.when.dtype == "fp32"),
            bind,
            columns=COLUMNS,
        )


def _space(is_fp32: bool) -> Sequence[Plan]:
    """Tiles of 64 rows or more, in warps by four: wgmma where there is one, as all of the table's."""
    if is_fp32:
        tiles = {"BLOCK_M": (64,), "BLOCK_N": (32, 64), "BLOCK_K": (16, 32), "GROUP_M": (8,)}
        return candidates(tiles, warps=(4, 8), stages=(2, 3))
    tiles = {
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 128, 256),
        "BLOCK_K": (64, 128),
        "GROUP_M": (8,),
    }
    return candidates(tiles, warps=(4, 8), stages=(3, 4))


def _constants(plan: Plan, num_inputs: int, *, has_bias: bool) -> dict[str, bool]:
    return {"HAS_BIAS": has_bias, "IS_K_EVEN": num_inputs % plan.config["BLOCK_K"] == 0}


def _check(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> None:
    dtype_name(x_MK.dtype)
    if x_MK.ndim != 2 or x_MK.stride(1) != 1 or not x_MK.is_floating_point():
        raise ValueError(f"x is {tuple(x_MK.shape)} {x_MK.dtype}, strides {x_MK.stride()}")
    if (
        weight_NK.ndim != 2
        or weight_NK.shape[1] != x_MK.shape[1]
        or weight_NK.dtype != x_MK.dtype
        or not weight_NK.is_contiguous()
        or 0 in weight_NK.shape
    ):
        raise ValueError(
            f"weight is {tuple(weight_NK.shape)} {weight_NK.dtype}, strides {weight_NK.stride()}, "
            f"not (N, {x_MK.shape[1]}) {x_MK.dtype} contiguous"
        )
    if bias_N is not None and (
        bias_N.shape != weight_NK.shape[:1]
        or bias_N.dtype != x_MK.dtype
        or not bias_N.is_contiguous()
    ):
        raise ValueError(
            f"bias is {tuple(bias_N.shape)} {bias_N.dtype}, "
            f"not ({weight_NK.shape[0]},) {x_MK.dtype} contiguous"
        )
