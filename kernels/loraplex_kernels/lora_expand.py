"""LoRA expand, grouped: y += scale * B h in place, for blocks of rows that share an adapter.

All slices of a merged linear are one launch: a program finds its slice from its tile of outputs. h is fp32; for
the tensor cores it is split into two numbers of B's precision, whose products are exact enough that y is rounded
once, at the end (bf16: hi + lo carry 16 bits, y has 8). fp16 has too small a range for h, so B is widened to tf32,
exactly; fp32 is multiplied in fp32.
Source: Punica SGMV, arXiv 2310.18547; the layout is that of `lora_slots`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div
from loraplex_kernels.lora_aot import (
    NUM_OUTPUTS,
    ROUTE_ALIGNED,
    ROUTE_SIGNATURE,
    pointer_to,
    works,
)
from loraplex_kernels.lora_route import LoraRoute
from loraplex_kernels.lora_slots import (
    MAX_SLICES,
    UNIT_BYTES,
    LoraSlots,
    site_header,
    slot_weights,
)
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support, dtype_size

KERNEL = "lora_expand"


@triton.jit
def find_slice(tile, width0, width1, width2, BLOCK_N: tl.constexpr):  # noqa: ANN201 -- jitted
    """(slice, its first output, its width, first output of the tile within it)."""
    end0 = tl.cdiv(width0, BLOCK_N)
    end1 = end0 + tl.cdiv(width1, BLOCK_N)
    part = (tile >= end0).to(tl.int32) + (tile >= end1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, width0, width0 + width1))
    width = tl.where(part == 0, width0, tl.where(part == 1, width1, width2))
    begin = tile - tl.where(part == 0, 0, tl.where(part == 1, end0, end1))
    return part, first, width, begin * BLOCK_N


@triton.jit
def product(h, b, total):  # noqa: ANN201 -- jitted
    """total + h b for fp32 h, without losing h's precision; b is in the model's dtype."""
    if b.dtype == tl.bfloat16:
        high = h.to(tl.bfloat16)
        low = (h - high.to(tl.float32)).to(tl.bfloat16)
        # An infinite h has no remainder, and Inf - Inf is NaN: the row is its own, and lost either way.
        total = tl.dot(high, b, total)
        return tl.dot(low, b, total)
    wide = b.to(tl.float32)
    if b.dtype == tl.float16:
        # The upper 19 bits are what tf32 keeps of an fp32 number.
        high = (h.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(high, wide, total, input_precision="tf32")
        return tl.dot(h - high, wide, total, input_precision="tf32")
    return tl.dot(h, wide, total, input_precision="ieee")


@triton.jit(do_not_specialize=["site"])
def _lora_expand(
    y_ptr,
    h_ptr,
    weights_ptr,
    headers_ptr,
    row_ptr,
    slot_ptr,
    site,
    width0,
    width1,
    width2,
    y_stride,
    slot_units,
    h_stride,
    h_plane,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNIT: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    part, first, width, begin = find_slice(tile, width0, width1, width2, BLOCK_N)
    # As in `lora_shrink`: all look-ups before the first branch, slot 0's for an unused block.
    row = tl.load(row_ptr + place)
    slot = tl.load(slot_ptr + block)
    record = site_header(headers_ptr, tl.maximum(slot, 0), slot_units, site) + 4 + part * 4
    rank = tl.multiple_of(tl.load(record), 16)
    scale = tl.load(record + 1).to(tl.float32, bitcast=True)
    b_unit = tl.load(record + 2)
    h_begin = tl.multiple_of(tl.load(record + 3), 16)
    tl.debug_barrier()
    if (slot < 0) | (rank == 0):
        return
    b_ptr = slot_weights(weights_ptr, slot, slot_units, b_unit, UNIT)

    n = begin + tl.arange(0, BLOCK_N)
    is_output = n < width
    # Asked for before the sums, so that it arrives while they are made.
    at_y = y_ptr + row.to(tl.int64)[:, None] * y_stride + first + n[None, :]
    is_y = (row >= 0)[:, None] & is_output[None, :]
    y = tl.load(at_y, mask=is_y, other=0.0)
    h_rows = h_ptr + place.to(tl.int64)[:, None] * h_stride + h_begin
    b_rows = b_ptr + n.to(tl.int64)[None, :] * rank
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, rank, BLOCK_R):
        r = at + tl.arange(0, BLOCK_R)
        is_rank = r < rank
        h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for split in tl.static_range(SPLIT_K):
            h += tl.load(h_rows + split * h_plane + r[None, :], mask=is_rank[None, :], other=0.0)
        b = tl.load(b_rows + r[:, None], mask=is_rank[:, None] & is_output[None, :], other=0.0)
        total = product(h, b, total)
    tl.store(at_y, (y.to(tl.float32) + total * scale).to(y_ptr.dtype.element_ty), mask=is_y)


def lora_expand(
    y_TN: Tensor,
    h_SPR: Tensor,
    slots: LoraSlots,
    site: int,
    route: LoraRoute,
    widths: tuple[int, ...],
    plan: Plan,
) -> None:
    """Add the site's deltas to every routed row of y, in place; other rows and slices stay bit for bit.

    Shapes: T rows, N outputs over all slices, S planes, P places of the route, R ranks of all slices.
    Args:
        y_TN: (T, N) bf16, fp16 or fp32, the slots' dtype; last dimension contiguous.
        h_SPR: (S, P or more, R) fp32, contiguous, from `lora_shrink` with the same route.
        widths: outputs of each slice, in order; their sum is N, except that a single slice may end before its
            adapter's outputs do.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.lora_expand`.
    """
    check_expand(y_TN, h_SPR, slots, site, route, widths)
    width0, width1, width2 = (*widths, 0, 0)[:MAX_SLICES]
    block = plan.config["BLOCK_N"]
    num_tiles = ceil_div(width0, block) + ceil_div(width1, block) + ceil_div(width2, block)
    _lora_expand[(num_tiles, route.num_blocks)](
        y_TN,
        h_SPR,
        slots.weights,
        slots.headers,
        route.row_P,
        route.slot_B,
        site,
        width0,
        width1,
        width2,
        y_TN.stride(0),
        slots.slot_units,
        h_SPR.stride(1),
        h_SPR.stride(0),
        BLOCK_M=route.block_rows,
        SPLIT_K=h_SPR.shape[0],
        UNIT=UNIT_BYTES // y_TN.element_size(),
        **plan.launch(),
    )


def check_expand(
    y_TN: Tensor,
    h_SPR: Tensor,
    slots: LoraSlots,
    site: int,
    route: LoraRoute,
    widths: tuple[int, ...],
) -> None:
    """Raise ValueError if the arguments of an expand are not what it documents."""
    if y_TN.ndim != 2 or y_TN.stride(1) != 1 or y_TN.dtype != slots.weights.dtype:
        raise ValueError(
            f"y is {tuple(y_TN.shape)} {y_TN.dtype}, strides {y_TN.stride()}: it must be rows of "
            f"{slots.weights.dtype}"
        )
    if not 1 <= len(widths) <= MAX_SLICES or min(widths) < 1 or sum(widths) != y_TN.shape[1]:
        raise ValueError(f"widths {widths} are not the slices of {y_TN.shape[1]} outputs")
    if not 0 <= site < slots.num_sites:
        raise ValueError(f"site is {site}: the slots have {slots.num_sites}")
    if (
        h_SPR.dtype != torch.float32
        or h_SPR.ndim != 3
        or h_SPR.shape[1] < route.num_places
        or not h_SPR.is_contiguous()
    ):
        raise ValueError(
            f"h is {tuple(h_SPR.shape)} {h_SPR.dtype}, not (S, {route.num_places} or more, R) "
            "contiguous fp32"
        )


def expand_signature(dtype: str) -> dict[str, str]:
    """Types of the run-time arguments of both expand kernels."""
    return {
        "y_ptr": pointer_to(dtype),
        "h_ptr": "*fp32",
        "weights_ptr": pointer_to(dtype),
        **ROUTE_SIGNATURE,
        **dict.fromkeys(("width0", "width1", "width2"), "i32"),
        **dict.fromkeys(("y_stride", "h_stride", "h_plane"), "i32"),
    }


EXPAND_ALIGNED = (
    *("y_ptr", "h_ptr", *ROUTE_ALIGNED),
    *("width0", "width1", "width2", "y_stride", "h_stride", "h_plane"),
)


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every launch that the plans lead to, with the planes that its shrink writes: in bf16 and, at the longest
    steps, fp32 and fp16, which take other products."""
    seen = set()
    dtypes = ("bf16", "fp32", "fp16") if table.column == "fast" else ("bf16", "fp32")
    for work in works(table, dtypes, is_grouped=True):
        plan = work.choose(table, KERNEL)
        split_k = work.choose(table, "lora_shrink").config["SPLIT_K"]
        key = (plan.label, work.block_rows, split_k, work.dtype)
        if key in seen or (work.dtype == "fp16" and work.phase == "decode"):
            continue
        seen.add(key)
        yield AotCase(
            kernel=KERNEL,
            fn=_lora_expand,
            signature=expand_signature(work.dtype),
            constexprs={
                "BLOCK_M": work.block_rows,
                "SPLIT_K": split_k,
                "UNIT": UNIT_BYTES // dtype_size(work.dtype),
                **plan.config,
            },
            divisible_by_16=EXPAND_ALIGNED,
            plan=plan,
            arch=support.name,
            dtype=work.dtype,
            needs=work.matrix_instruction(plan),
            bytes_moved=work.expand_bytes(NUM_OUTPUTS, split_k),
            flops=work.expand_flops(NUM_OUTPUTS),
            shape=work.shape,
        )
