"""RMSNorm of rows, with the residual addition before it fused in.

One program a row: a row's bits depend on that row only, in both columns and every phase.
Memory-bound: the row is read once, kept in registers, and written once.
Source: Zhang and Sennrich, arXiv 1910.07467; rounding as in transformers' LlamaRMSNorm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import next_power_of_2
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support, dtype_name, dtype_size, triton_type
from loraplex_kernels.tune import Launch, TuneCase, candidates

KERNEL = "rms_norm"
# A row lives in the registers of one program.
MAX_WIDTH = 32_768


@triton.jit
def _rms_norm(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    width,
    eps,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_in_row = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=is_in_row, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual_ptr + row * residual_stride + column
        # Rounded to the model's dtype before the norm sees it, as if the sum had been stored first.
        total = (x + tl.load(at, mask=is_in_row, other=0.0).to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        tl.store(at, total, mask=is_in_row)
        x = total.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=is_in_row, other=0.0).to(tl.float32)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=is_in_row)


def rms_norm(
    x_TH: Tensor,
    weight_H: Tensor,
    eps: float,
    plan: Plan,
    *,
    residual_TH: Tensor | None = None,
    out_TH: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in fp32 up to the multiplication by the weight.

    With a residual: `residual_TH += x_TH` in place first, and the norm is that of the sum.

    Shapes: T rows, H width (at most MAX_WIDTH).
    Args:
        x_TH: (T, H) bf16, fp16 or fp32; the last dimension contiguous.
        weight_H: (H,) contiguous, dtype of x.
        residual_TH: (T, H), dtype of x, last dimension contiguous; changed in place.
        out_TH: (T, H) contiguous, dtype of x, to be overwritten; None: a new one.
    Returns:
        (T, H) contiguous, dtype of x.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.rms_norm`.
    """
    _check(x_TH, weight_H, residual_TH)
    num_rows, width = x_TH.shape
    if out_TH is None:
        out_TH = x_TH.new_empty((num_rows, width))
    elif out_TH.shape != x_TH.shape or out_TH.dtype != x_TH.dtype or not out_TH.is_contiguous():
        raise ValueError(
            f"out is {tuple(out_TH.shape)} {out_TH.dtype}, strides {out_TH.stride()}, "
            f"not {tuple(x_TH.shape)} {x_TH.dtype} contiguous"
        )
    if num_rows:
        residual = x_TH if residual_TH is None else residual_TH
        _rms_norm[(num_rows,)](
            x_TH,
            weight_H,
            residual,
            out_TH,
            x_TH.stride(0),
            residual.stride(0),
            width,
            eps,
            **_constants(width, has_residual=residual_TH is not None),
            **plan.launch(),
        )
    return out_TH


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in bf16 with a residual (the larger kernel), and the last one in fp32 without."""
    entries = table.entries(KERNEL)
    builds = [(entry, "bf16", True) for entry in entries] + [(entries[-1], "fp32", False)]
    for entry, dtype, has_residual in builds:
        width = entry.when.max_k or 16_384
        pointer, rows = f"*{triton_type(dtype)}", 256
        yield AotCase(
            kernel=KERNEL,
            fn=_rms_norm,
            signature={
                "x_ptr": pointer,
                "weight_ptr": pointer,
                "residual_ptr": pointer,
                "out_ptr": pointer,
                "x_stride": "i32",
                "residual_stride": "i32",
                "width": "i32",
                "eps": "fp32",
            },
            constexprs={**_constants(width, has_residual=has_residual), **entry.plan.config},
            divisible_by_16=(
                *("x_ptr", "weight_ptr", "residual_ptr", "out_ptr"),
                *("x_stride", "residual_stride", "width"),
            ),
            plan=entry.plan,
            arch=support.name,
            dtype=dtype,
            needs=None,
            bytes_moved=(rows * (4 if has_residual else 2) + 1) * width * dtype_size(dtype),
            flops=rows * width * 5,
            shape=f"T={rows} H={width}",
        )


def tune_cases(table: PlanTable, device: torch.device) -> Iterator[TuneCase]:
    """Every entry at its largest width: how many warps share a row."""
    for index, entry in enumerate(table.entries(KERNEL)):
        width = entry.when.max_k or 16_384
        x_TH, residual_TH = torch.randn(2, 256, width, device=device, dtype=torch.bfloat16)
        weight_H = torch.ones(width, device=device, dtype=torch.bfloat16)

        def bind(
            plan: Plan, x: Tensor = x_TH, residual: Tensor = residual_TH, weight: Tensor = weight_H
        ) -> Launch:
            return lambda: rms_norm(x, weight, 1e-5, plan, residual_TH=residual)

        yield TuneCase(
            KERNEL, index, f"T=256 H={width}", candidates({}, warps=(1, 2, 4, 8, 16)), bind
        )


def _constants(width: int, *, has_residual: bool) -> dict[str, int | bool]:
    return {"BLOCK": next_power_of_2(width), "HAS_RESIDUAL": has_residual}


def _check(x_TH: Tensor, weight_H: Tensor, residual_TH: Tensor | None) -> None:
    dtype_name(x_TH.dtype)
    if x_TH.ndim != 2 or x_TH.stride(1) != 1 or not x_TH.is_floating_point():
        raise ValueError(f"x is {tuple(x_TH.shape)} {x_TH.dtype}, strides {x_TH.stride()}")
    width = x_TH.shape[1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"x is {width} wide: 1 to {MAX_WIDTH} is supported")
    if weight_H.shape != (width,) or weight_H.dtype != x_TH.dtype or weight_H.stride(0) != 1:
        raise ValueError(
            f"weight is {tuple(weight_H.shape)} {weight_H.dtype}, not ({width},) {x_TH.dtype}"
        )
    if residual_TH is not None and (
        residual_TH.shape != x_TH.shape
        or residual_TH.dtype != x_TH.dtype
        or residual_TH.stride(1) != 1
    ):
        raise ValueError(
            f"residual is {tuple(residual_TH.shape)} {residual_TH.dtype}, "
            f"not {tuple(x_TH.shape)} {x_TH.dtype}"
        )
