"""act(gate) * up for the merged projection of a gated MLP; act is SiLU or the tanh form of GELU.

Elementwise, so a row's bits depend on that row only, in both columns and every phase. Memory-bound: 16-byte
loads of both halves, one store.
Source: Shazeer, arXiv 2002.05202 (SwiGLU, GEGLU); rounding as torch does it: once after act, once after *.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support, dtype_name, dtype_size, triton_type
from loraplex_kernels.tune import Launch, TuneCase, candidates

KERNEL = "gated"
Activation = Literal["silu", "gelu_tanh"]


@triton.jit
def _gated(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    width,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in_row = column < width
    at = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(at, mask=is_in_row, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_in_row, other=0.0).to(tl.float32)
    # GELU: 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    # exp of what is never positive, so that nothing overflows.
    power = tl.exp(-tl.abs(exponent))
    sigmoid = tl.where(exponent < 0, power, 1.0) / (1.0 + power)
    activated = (gate * sigmoid).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        out_ptr + row * width + column,
        (activated * up).to(out_ptr.dtype.element_ty),
        mask=is_in_row,
    )


def gated(
    gate_up_TI: Tensor,
    activation: Activation,
    plan: Plan,
    *,
    out_TI: Tensor | None = None,
) -> Tensor:
    """act(gate) * up; act in fp32, rounded, then multiplied in the model's dtype.

    Shapes: T rows, I the inner width.
    Args:
        gate_up_TI: (T, 2 * I) bf16, fp16 or fp32: gate first; the last dimension contiguous.
        activation: "silu" or "gelu_tanh".
        out_TI: (T, I) contiguous, dtype of gate_up, to be overwritten; None: a new one.
    Returns:
        (T, I) contiguous, dtype of gate_up.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.gated`.
    """
    dtype_name(gate_up_TI.dtype)
    if activation not in get_args(Activation):
        raise ValueError(f"activation is {activation!r}, not one of {get_args(Activation)}")
    is_whole = gate_up_TI.ndim == 2 and gate_up_TI.shape[1] % 2 == 0 and gate_up_TI.shape[1]
    if not is_whole or gate_up_TI.stride(1) != 1 or not gate_up_TI.is_floating_point():
        raise ValueError(
            f"gate_up is {tuple(gate_up_TI.shape)} {gate_up_TI.dtype}, "
            f"strides {gate_up_TI.stride()}, not (T, 2 * I) with contiguous rows"
        )
    num_rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    if out_TI is None:
        out_TI = gate_up_TI.new_empty((num_rows, width))
    elif (
        out_TI.shape != (num_rows, width)
        or out_TI.dtype != gate_up_TI.dtype
        or not out_TI.is_contiguous()
    ):
        raise ValueError(
            f"out is {tuple(out_TI.shape)} {out_TI.dtype}, strides {out_TI.stride()}, "
            f"not ({num_rows}, {width}) {gate_up_TI.dtype} contiguous"
        )
    if num_rows:
        grid = (num_rows, ceil_div(width, plan.config["BLOCK"]))
        _gated[grid](
            gate_up_TI,
            out_TI,
            gate_up_TI.stride(0),
            width,
            IS_GELU=activation == "gelu_tanh",
            **plan.launch(),
        )
    return out_TI


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry with SiLU in bf16; the last one with GELU in fp32 too."""
    entries = table.entries(KERNEL)
    builds = [(entry, "bf16", False) for entry in entries] + [(entries[-1], "fp32", True)]
    for entry, dtype, is_gelu in builds:
        rows, width = (64 if entry.when.phase == "decode" else 8192), 14_336
        pointer = f"*{triton_type(dtype)}"
        yield AotCase(
            kernel=KERNEL,
            fn=_gated,
            signature={
                "gate_up_ptr": pointer,
                "out_ptr": pointer,
                "gate_up_stride": "i32",
                "width": "i32",
            },
            constexprs={**entry.plan.config, "IS_GELU": is_gelu},
            divisible_by_16=("gate_up_ptr", "out_ptr", "gate_up_stride", "width"),
            plan=entry.plan,
            arch=support.name,
            dtype=dtype,
            needs=None,
            bytes_moved=3 * rows * width * dtype_size(dtype),
            flops=rows * width * 6,
            shape=f"T={rows} I={width}",
        )


def tune_cases(table: PlanTable, device: torch.device) -> Iterator[TuneCase]:
    """Every entry at Llama-3.1-8B's inner width."""
    for index, entry in enumerate(table.entries(KERNEL)):
        rows = 64 if entry.when.phase == "decode" else 8192
        gate_up_TI = torch.randn(rows, 2 * 14_336, device=device, dtype=torch.bfloat16)

        def bind(plan: Plan, gate_up: Tensor = gate_up_TI) -> Launch:
            return lambda: gated(gate_up, "silu", plan)

        space = candidates({"BLOCK": (512, 1024, 2048, 4096)}, warps=(2, 4, 8))
        yield TuneCase(KERNEL, index, f"T={rows} I=14336", space, bind)
