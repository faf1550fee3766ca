"""LoRA of the embedding: y += scale * B A[:, token], in place.

The input is a token id, so h is no product: it is a row of A, which lies as (vocabulary, rank). One launch looks it
up and expands it. h has the model's dtype: nothing is to be split for the tensor cores.
The layout is that of `lora_slots`.
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

KERNEL = "lora_embed"


@triton.jit(do_not_specialize=["site"])
def _lora_embed(
    y_ptr,
    token_ptr,
    weights_ptr,
    headers_ptr,
    row_ptr,
    slot_ptr,
    site,
    num_outputs,
    y_stride,
    slot_units,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UNIT: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    # As in `lora_shrink`: all look-ups before the first branch, slot 0's for an unused block.
    row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    slot = tl.load(slot_ptr + block)
    header = site_header(headers_ptr, tl.maximum(slot, 0), slot_units, site)
    rank = tl.multiple_of(tl.load(header + 1), 16)
    scale = tl.load(header + 5).to(tl.float32, bitcast=True)
    a_unit, b_unit = tl.load(header), tl.load(header + 6)
    tl.debug_barrier()
    if (slot < 0) | (rank == 0):
        return
    a_ptr = slot_weights(weights_ptr, slot, slot_units, a_unit, UNIT)
    b_ptr = slot_weights(weights_ptr, slot, slot_units, b_unit, UNIT)

    is_row = row >= 0
    token = tl.load(token_ptr + row, mask=is_row, other=0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < num_outputs
    a_rows = a_ptr + token[:, None] * rank
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, rank, BLOCK_R):
        r = at + tl.arange(0, BLOCK_R)
        is_rank = r < rank
        h = tl.load(a_rows + r[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
        if BLOCK_M == 1:
            b = tl.load(
                b_ptr + n.to(tl.int64)[:, None] * rank + r[None, :],
                mask=is_output[:, None] & is_rank[None, :],
                other=0.0,
            )
            total += tl.sum(b.to(tl.float32) * h.to(tl.float32), axis=1)[None, :]
        else:
            b = tl.load(
                b_ptr + n.to(tl.int64)[None, :] * rank + r[:, None],
                mask=is_rank[:, None] & is_output[None, :],
                other=0.0,
            )
            total = tl.dot(h, b, total, input_precision="ieee")
    at_y = y_ptr + row.to(tl.int64)[:, None] * y_stride + n[None, :]
    is_y = is_row[:, None] & is_output[None, :]
    y = tl.load(at_y, mask=is_y, other=0.0).to(tl.float32)
    tl.store(at_y, (y + total * scale).to(y_ptr.dtype.element_ty), mask=is_y)


def lora_embed(
    y_TH: Tensor, token_T: Tensor, slots: LoraSlots, site: int, route: LoraRoute, plan: Plan
) -> None:
    """Add the embedding's deltas to every routed row of y, in place; other rows stay bit for bit.

    Shapes: T rows, H hidden size.
    Args:
        y_TH: (T, H) bf16, fp16 or fp32, the slots' dtype; last dimension contiguous.
        token_T: (T,) int64, contiguous, ids below the vocabulary that A was packed for.
        site: the embedding's.
    Raises:
        ValueError: a shape, stride or dtype differs from the above.
    Reference: `reference.lora_embed_shrink`, `reference.lora_expand`.
    """
    if y_TH.ndim != 2 or y_TH.stride(1) != 1 or y_TH.dtype != slots.weights.dtype:
        raise ValueError(
            f"y is {tuple(y_TH.shape)} {y_TH.dtype}, strides {y_TH.stride()}: it must be rows of "
            f"{slots.weights.dtype}"
        )
    if token_T.shape != y_TH.shape[:1] or token_T.dtype != torch.int64 or token_T.stride(0) != 1:
        raise ValueError(
            f"token is {tuple(token_T.shape)} {token_T.dtype}, not ({len(y_TH)},) int64 contiguous"
        )
    if not 0 <= site < slots.num_sites:
        raise ValueError(f"site is {site}: the slots have {slots.num_sites}")
    num_tiles = ceil_div(y_TH.shape[1], plan.config["BLOCK_N"])
    _lora_embed[(num_tiles, route.num_blocks)](
        y_TH,
        token_T,
        slots.weights,
        slots.headers,
        route.row_P,
        route.slot_B,
        site,
        y_TH.shape[1],
        y_TH.stride(0),
        slots.slot_units,
        BLOCK_M=route.block_rows,
        UNIT=UNIT_BYTES // y_TH.element_size(),
        **plan.launch(),
    )


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in the blocks of single rows and of the longest steps."""
    width, seen = 4096, set()
    dtypes = ("bf16", "fp32") if table.column == "fast" else ("bf16",)
    grouped = [work for work in works(table, dtypes, is_grouped=True) if work.tokens == 8192]
    for work in (*grouped, *works(table, ("bf16",), is_grouped=False)):
        plan = work.choose(table, KERNEL)
        if (plan.label, work.block_rows) in seen:
            continue
        seen.add((plan.label, work.block_rows))
        yield AotCase(
            kernel=KERNEL,
            fn=_lora_embed,
            signature={
                "y_ptr": pointer_to(work.dtype),
                "token_ptr": "*i64",
                "weights_ptr": pointer_to(work.dtype),
                **ROUTE_SIGNATURE,
                "num_outputs": "i32",
                "y_stride": "i32",
            },
            constexprs={
                "BLOCK_M": work.block_rows,
                "UNIT": UNIT_BYTES // dtype_size(work.dtype),
                **plan.config,
            },
            divisible_by_16=("y_ptr", "token_ptr", *ROUTE_ALIGNED, "num_outputs", "y_stride"),
            plan=plan,
            arch=support.name,
            dtype=work.dtype,
            needs=work.matrix_instruction(plan),
            bytes_moved=work.expand_bytes(width, 0),
            flops=work.expand_flops(width),
            shape=f"T={work.rows} L={work.adapters} r={work.rank} H={width}",
        )
