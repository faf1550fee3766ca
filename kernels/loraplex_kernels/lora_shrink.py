"""LoRA shrink, grouped: h = A x for blocks of rows that share an adapter, on tensor cores.

A program takes (a tile of ranks, a block of rows, a span of K). Spans are cut at fixed positions of K and each
writes a plane of its own, which `lora_expand` sums in order: no atomics, no zero-fill, same bits every time. The
ranks of all slices of a site are one dimension here, so x is read once for q, k and v.
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
    ROUTE_ALIGNED,
    ROUTE_SIGNATURE,
    pointer_to,
    works,
)
from loraplex_kernels.lora_route import LoraRoute
from loraplex_kernels.lora_slots import UNIT_BYTES, LoraSlots, site_header, slot_weights
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support, dtype_size

KERNEL = "lora_shrink"


@triton.jit(do_not_specialize=["site"])
def _lora_shrink(
    x_ptr,
    weights_ptr,
    headers_ptr,
    row_ptr,
    slot_ptr,
    h_ptr,
    site,
    num_inputs,
    x_stride,
    a_stride,
    slot_units,
    h_stride,
    h_plane,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNIT: tl.constexpr,
):
    # Tiles of ranks are neighbours in time: the second finds the block's x in the cache.
    tile = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    # All that is looked up is asked for before the first branch: each wait less is a round trip to memory less. An
    # unused block reads slot 0's header, which is always there, and leaves. Without the barrier ptxas moves the
    # loads behind the exit, where their numbers are used.
    row = tl.load(row_ptr + place)
    slot = tl.load(slot_ptr + block)
    header = site_header(headers_ptr, tl.maximum(slot, 0), slot_units, site)
    rank = tl.multiple_of(tl.load(header + 1), 16)
    a_unit = tl.load(header)
    tl.debug_barrier()
    if (slot < 0) | (tile * BLOCK_R >= rank):
        return
    a_ptr = slot_weights(weights_ptr, slot, slot_units, a_unit, UNIT)
    is_row = row >= 0
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    is_rank = r < rank
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    a_rows = a_ptr + r[None, :] * a_stride
    span = tl.cdiv(tl.cdiv(num_inputs, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = split * span
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for at in range(begin, tl.minimum(begin + span, num_inputs), BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        is_input = k < num_inputs
        x = tl.load(x_rows + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        a = tl.load(a_rows + k[:, None], mask=is_input[:, None] & is_rank[None, :], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    h_rows = h_ptr + split * h_plane + place.to(tl.int64)[:, None] * h_stride
    tl.store(h_rows + r[None, :], total, mask=is_rank[None, :])


def lora_shrink(
    x_TK: Tensor,
    slots: LoraSlots,
    site: int,
    route: LoraRoute,
    h_SPR: Tensor,
    plan: Plan,
    *,
    a_stride: int,
    max_rank: int,
) -> None:
    """Write h of every routed row: plane s of place p sums A x over the s-th span of K.

    Shapes: T rows, K inputs, S = SPLIT_K planes, P places of the route, R ranks of all slices.
    Args:
        x_TK: (T, K) bf16, fp16 or fp32, the slots' dtype; last dimension contiguous.
        site: which of the slots' sites; below `slots.num_sites`.
        h_SPR: (SPLIT_K, P or more, R) fp32, contiguous. Columns from an adapter's rank on, and places of unused
            blocks, are left as they are.
        a_stride: `lora_slots.a_row_length(K)`, or what the site's A was packed with.
        max_rank: the largest rank (padded, all slices) of any routed adapter at this site; at most R.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.lora_shrink`.
    """
    check_shrink(x_TK, slots, site, route, h_SPR, plan, max_rank)
    grid = (
        ceil_div(max_rank, plan.config["BLOCK_R"]),
        route.num_blocks,
        plan.config["SPLIT_K"],
    )
    _lora_shrink[grid](
        x_TK,
        slots.weights,
        slots.headers,
        route.row_P,
        route.slot_B,
        h_SPR,
        site,
        x_TK.shape[1],
        x_TK.stride(0),
        a_stride,
        slots.slot_units,
        h_SPR.stride(1),
        h_SPR.stride(0),
        BLOCK_M=route.block_rows,
        UNIT=UNIT_BYTES // x_TK.element_size(),
        **plan.launch(),
    )


def check_shrink(
    x_TK: Tensor,
    slots: LoraSlots,
    site: int,
    route: LoraRoute,
    h_SPR: Tensor,
    plan: Plan,
    max_rank: int,
) -> None:
    """Raise ValueError if the arguments of a shrink are not what it documents."""
    if x_TK.ndim != 2 or x_TK.stride(1) != 1 or x_TK.dtype != slots.weights.dtype:
        raise ValueError(
            f"x is {tuple(x_TK.shape)} {x_TK.dtype}, strides {x_TK.stride()}: it must be rows of "
            f"{slots.weights.dtype}"
        )
    if not 0 <= site < slots.num_sites:
        raise ValueError(f"site is {site}: the slots have {slots.num_sites}")
    splits = plan.config["SPLIT_K"]
    if (
        h_SPR.dtype != torch.float32
        or h_SPR.ndim != 3
        or h_SPR.shape[0] != splits
        or h_SPR.shape[1] < route.num_places
        or not h_SPR.is_contiguous()
    ):
        raise ValueError(
            f"h is {tuple(h_SPR.shape)} {h_SPR.dtype}, not ({splits}, {route.num_places} or more, R) "
            "contiguous fp32"
        )
    if not 1 <= max_rank <= h_SPR.shape[2]:
        raise ValueError(f"max_rank is {max_rank}: h has room for {h_SPR.shape[2]}")


def shrink_signature(dtype: str) -> dict[str, str]:
    """Types of the run-time arguments of both shrink kernels."""
    return {
        "x_ptr": pointer_to(dtype),
        "weights_ptr": pointer_to(dtype),
        **ROUTE_SIGNATURE,
        "h_ptr": "*fp32",
        **dict.fromkeys(("num_inputs", "x_stride", "a_stride", "h_stride", "h_plane"), "i32"),
    }


SHRINK_ALIGNED = (
    *("x_ptr", "h_ptr", *ROUTE_ALIGNED),
    *("num_inputs", "x_stride", "a_stride", "h_stride", "h_plane"),
)


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every launch that the plans lead to, in bf16 and, at the longest steps, fp32."""
    seen = set()
    for work in works(table, ("bf16", "fp32"), is_grouped=True):
        plan = work.choose(table, KERNEL)
        if (plan.label, work.block_rows) in seen:
            continue
        seen.add((plan.label, work.block_rows))
        yield AotCase(
            kernel=KERNEL,
            fn=_lora_shrink,
            signature=shrink_signature(work.dtype),
            constexprs={
                "BLOCK_M": work.block_rows,
                "UNIT": UNIT_BYTES // dtype_size(work.dtype),
                **plan.config,
            },
            divisible_by_16=SHRINK_ALIGNED,
            plan=plan,
            arch=support.name,
            dtype=work.dtype,
            needs=work.matrix_instruction(plan),
            bytes_moved=work.shrink_bytes(plan.config["SPLIT_K"]),
            flops=work.shrink_flops(),
            shape=work.shape,
        )
