"""LoRA shrink and expand for a few rows: a program takes one row, without tensor cores.

A step of one to four rows is all latency. A matrix unit would work on sixteen rows of which fifteen are padding;
here every thread multiplies and adds for the one row there is, and more, smaller programs share the reading of A
and B. Same route (blocks of one row), same h, same rounding as the grouped kernels, but not the same bits: only
the `fast` column uses it.
Source: Punica BGMV, arXiv 2310.18547; the layout is that of `lora_slots`.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div
from loraplex_kernels.lora_aot import NUM_OUTPUTS, works
from loraplex_kernels.lora_expand import (
    EXPAND_ALIGNED,
    check_expand,
    expand_signature,
    find_slice,
)
from loraplex_kernels.lora_route import LoraRoute
from loraplex_kernels.lora_shrink import SHRINK_ALIGNED, check_shrink, shrink_signature
from loraplex_kernels.lora_slots import (
    MAX_SLICES,
    UNIT_BYTES,
    LoraSlots,
    site_header,
    slot_weights,
)
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import Support, dtype_size

SHRINK = "lora_rows_shrink"
EXPAND = "lora_rows_expand"


@triton.jit(do_not_specialize=["site"])
def _lora_rows_shrink(
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
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNIT: tl.constexpr,
):
    tile = tl.program_id(0)
    place = tl.program_id(1)
    split = tl.program_id(2)
    # As in `lora_shrink`: all look-ups before the first branch, slot 0's for an unused place.
    row = tl.load(row_ptr + place)
    slot = tl.load(slot_ptr + place)
    header = site_header(headers_ptr, tl.maximum(slot, 0), slot_units, site)
    rank = tl.multiple_of(tl.load(header + 1), 16)
    a_unit = tl.load(header)
    tl.debug_barrier()
    if (slot < 0) | (tile * BLOCK_R >= rank):
        return
    a_ptr = slot_weights(weights_ptr, slot, slot_units, a_unit, UNIT)
    x_row = x_ptr + row.to(tl.int64) * x_stride
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    is_rank = r < rank
    span = tl.cdiv(tl.cdiv(num_inputs, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = split * span
    # One sum a thread over all of the span; the tree over threads comes once, at the end.
    total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for at in range(begin, tl.minimum(begin + span, num_inputs), BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        is_input = k < num_inputs
        x = tl.load(x_row + k, mask=is_input, other=0.0).to(tl.float32)
        a = tl.load(
            a_ptr + r[:, None] * a_stride + k[None, :],
            mask=is_rank[:, None] & is_input[None, :],
            other=0.0,
        )
        total += a.to(tl.float32) * x[None, :]
    h_row = h_ptr + split * h_plane + place.to(tl.int64) * h_stride
    tl.store(h_row + r, tl.sum(total, axis=1), mask=is_rank)


@triton.jit(do_not_specialize=["site"])
def _lora_rows_expand(
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
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    UNIT: tl.constexpr,
):
    tile = tl.program_id(0)
    place = tl.program_id(1)
    part, first, width, begin = find_slice(tile, width0, width1, width2, BLOCK_N)
    row = tl.load(row_ptr + place)
    slot = tl.load(slot_ptr + place)
    record = site_header(headers_ptr, tl.maximum(slot, 0), slot_units, site) + 4 + part * 4
    rank = tl.multiple_of(tl.load(record), 16)
    scale = tl.load(record + 1).to(tl.float32, bitcast=True)
    b_unit = tl.load(record + 2)
    h_begin = tl.multiple_of(tl.load(record + 3), 16)
    tl.debug_barrier()
    if (slot < 0) | (rank == 0):
        return
    b_ptr = slot_weights(weights_ptr, slot, slot_units, b_unit, UNIT)
    h_row = h_ptr + place.to(tl.int64) * h_stride + h_begin

    n = begin + tl.arange(0, BLOCK_N)
    is_output = n < width
    b_rows = b_ptr + n.to(tl.int64)[:, None] * rank
    total = tl.zeros((BLOCK_N,), tl.float32)
    for at in range(0, rank, BLOCK_R):
        r = at + tl.arange(0, BLOCK_R)
        is_rank = r < rank
        h = tl.zeros((BLOCK_R,), tl.float32)
        for split in tl.static_range(SPLIT_K):
            h += tl.load(h_row + split * h_plane + r, mask=is_rank, other=0.0)
        b = tl.load(b_rows + r[None, :], mask=is_output[:, None] & is_rank[None, :], other=0.0)
        total += tl.sum(b.to(tl.float32) * h[None, :], axis=1)
    at_y = y_ptr + row.to(tl.int64) * y_stride + first + n
    y = tl.load(at_y, mask=is_output, other=0.0).to(tl.float32)
    tl.store(at_y, (y + total * scale).to(y_ptr.dtype.element_ty), mask=is_output)


def lora_rows_shrink(
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
    """`lora_shrink` for a route of one row a block: same arguments, same errors, same reference."""
    _check_route(route)
    check_shrink(x_TK, slots, site, route, h_SPR, plan, max_rank)
    grid = (
        ceil_div(max_rank, plan.config["BLOCK_R"]),
        route.num_blocks,
        plan.config["SPLIT_K"],
    )
    _lora_rows_shrink[grid](
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
        UNIT=UNIT_BYTES // x_TK.element_size(),
        **plan.launch(),
    )


def lora_rows_expand(
    y_TN: Tensor,
    h_SPR: Tensor,
    slots: LoraSlots,
    site: int,
    route: LoraRoute,
    widths: tuple[int, ...],
    plan: Plan,
) -> None:
    """`lora_expand` for a route of one row a block: same arguments, same errors, same reference."""
    _check_route(route)
    check_expand(y_TN, h_SPR, slots, site, route, widths)
    width0, width1, width2 = (*widths, 0, 0)[:MAX_SLICES]
    block = plan.config["BLOCK_N"]
    num_tiles = ceil_div(width0, block) + ceil_div(width1, block) + ceil_div(width2, block)
    _lora_rows_expand[(num_tiles, route.num_blocks)](
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
        SPLIT_K=h_SPR.shape[0],
        UNIT=UNIT_BYTES // y_TN.element_size(),
        **plan.launch(),
    )


def _check_route(route: LoraRoute) -> None:
    if route.block_rows != 1:
        raise ValueError(f"the route has blocks of {route.block_rows} rows, not of one")


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry of both kernels in bf16; the `invariant` column leads to none of them."""
    seen: set[tuple[str, int]] = set()
    for work in works(table, ("bf16",), is_grouped=False):
        unit = UNIT_BYTES // dtype_size(work.dtype)
        shrinks = [entry.plan for entry in table.entries(SHRINK)]
        expand = work.choose(table, EXPAND)
        for plan in shrinks:
            if (plan.label, 0) in seen:
                continue
            seen.add((plan.label, 0))
            yield AotCase(
                kernel=SHRINK,
                fn=_lora_rows_shrink,
                signature=shrink_signature(work.dtype),
                constexprs={"UNIT": unit, **plan.config},
                divisible_by_16=SHRINK_ALIGNED,
                plan=plan,
                arch=support.name,
                dtype=work.dtype,
                needs=None,
                bytes_moved=work.shrink_bytes(plan.config["SPLIT_K"]),
                flops=work.shrink_flops(),
                shape=work.shape,
            )
        for split_k in sorted({plan.config["SPLIT_K"] for plan in shrinks}):
            if (expand.label, split_k) in seen:
                continue
            seen.add((expand.label, split_k))
            yield AotCase(
                kernel=EXPAND,
                fn=_lora_rows_expand,
                signature=expand_signature(work.dtype),
                constexprs={"SPLIT_K": split_k, "UNIT": unit, **expand.config},
                divisible_by_16=EXPAND_ALIGNED,
                plan=expand,
                arch=support.name,
                dtype=work.dtype,
                needs=None,
                bytes_moved=work.expand_bytes(NUM_OUTPUTS, split_k),
                flops=work.expand_flops(NUM_OUTPUTS),
                shape=work.shape,
            )
