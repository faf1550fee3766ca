"""Attention of rows with several queries each over a paged cache: chunked prefill, lengths as they come.

The new tokens' keys are in the cache already, behind the prefix that earlier steps computed, so a chunk is attended
like a whole prompt. A task is up to BLOCK_Q consecutive queries of one sequence; with the query heads that share a
KV head they are the rows of one matrix product. Keys are walked in tiles of BLOCK_N, aligned to position 0, so a
query's sums follow from its position alone, in whichever task and chunk it comes. Keys that a later query
of the task sees and this one does not weigh exactly zero; should their values be NaN, it is the sequence's own NaN.
Source: FlashAttention-2, arXiv 2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import next_power_of_2
from loraplex_kernels.paged_tile import (
    QUANTIZED,
    attend_tile,
    cache_rows,
    check_cache,
    check_output,
    check_work,
)
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.support import KvDtype, Support, dtype_size, triton_type

KERNEL = "paged_prefill"


@triton.jit
def _paged_prefill(
    q_ptr,
    kv_ptr,
    scale_ptr,
    task_ptr,
    table_ptr,
    out_ptr,
    q_stride,
    out_stride,
    plane_rows,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    task = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(task_ptr + task * 4)
    count = tl.load(task_ptr + task * 4 + 1)
    first_position = tl.load(task_ptr + task * 4 + 2)
    table_at = table_ptr + tl.load(task_ptr + task * 4 + 3)

    line = tl.arange(0, BLOCK_M)
    query = line // GROUP
    width = tl.arange(0, PAD_DIM)
    is_query = query < count
    mask = is_query[:, None] & (width < HEAD_DIM)[None, :]
    step_row = (first_row + query).to(tl.int64)
    column = (kv_head * GROUP + line % GROUP)[:, None] * HEAD_DIM + width[None, :]
    q = tl.load(q_ptr + step_row[:, None] * q_stride + column, mask=mask, other=0.0)

    own = first_position + query
    end = first_position + count
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_end = begin
    else:
        # Every query sees all of the tiles up to here; they need no mask.
        full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, PAD_DIM), tl.float32)
    for start in range(begin, full_end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        is_there = position < full_end
        row = cache_rows(table_at, position, is_there, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        top, weight, total = attend_tile(
            q,
            top,
            weight,
            total,
            kv_ptr,
            scale_ptr,
            row,
            is_there,
            is_there[None, :],
            plane_rows,
            score_scale,
            HEAD_DIM,
            PAD_DIM,
            IS_QUANTIZED,
            False,
            SOFT_CAP,
        )
    for start in range(full_end, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        is_there = position < end
        is_seen = position[None, :] <= own[:, None]
        if WINDOW > 0:
            is_there = is_there & (position > first_position - WINDOW)
            is_seen = is_seen & (position[None, :] > own[:, None] - WINDOW)
        row = cache_rows(table_at, position, is_there, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        top, weight, total = attend_tile(
            q,
            top,
            weight,
            total,
            kv_ptr,
            scale_ptr,
            row,
            is_there,
            is_seen & is_there[None, :],
            plane_rows,
            score_scale,
            HEAD_DIM,
            PAD_DIM,
            IS_QUANTIZED,
            True,
            SOFT_CAP,
        )
    # Lines without a query may have seen no key.
    mean = tl.where(weight[:, None] == 0.0, 0.0, total / weight[:, None])
    at = out_ptr + step_row[:, None] * out_stride + column
    tl.store(at, mean.to(out_ptr.dtype.element_ty), mask=mask)


def queries_per_task(plan: Plan, *, num_heads: int, num_kv_heads: int) -> int:
    """The most queries that one task of `paged_prefill` may have."""
    return max(1, plan.config["BLOCK_M"] // (num_heads // num_kv_heads))


def paged_prefill(
    q_TC: Tensor,
    kv: Tensor,
    task_N4: Tensor,
    table: Tensor,
    out_TW: Tensor,
    plan: Plan,
    *,
    num_heads: int,
    scale: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(q K^T / sqrt(D)) V of consecutive queries, each over positions 0 .. own of its own blocks.

    Shapes: T rows of the step, N tasks, H query heads, D head_dim.
    Args:
        q_TC: (T, H * D or more) bf16, fp16 or fp32: rotated queries first; rows contiguous.
        kv: (2, blocks, kv heads, block_size, D), dtype of q, int8 or float8_e4m3fn, contiguous; holds the keys of
            the step's own tokens too.
        task_N4: (N, 4) int32: first row of q and out, number of queries (1 .. `queries_per_task`), position of the
            first, where the sequence's blocks begin in `table`.
        table: int32, block ids of all sequences; what no query sees is not read.
        out_TW: (T, H * D) contiguous, dtype of q: rows that no task names are left as they are.
        scale: (2, blocks, kv heads, block_size) fp32 for int8 and fp8.
        window: keys further back than this are not seen.   soft_cap: scores become cap * tanh(score / cap).
    Returns:
        out_TW.
    Raises:
        ValueError: an argument differs from the above, or BLOCK_M of the plan is below H / kv heads.
    Reference: `reference_attention.paged_attention`.
    """
    num_blocks, num_kv_heads, block_size, head_dim = check_cache(
        q_TC, kv, scale, num_heads=num_heads
    )
    check_output(out_TW, q_TC, num_heads * head_dim)
    check_work("task", task_N4)
    constants = _constants(
        plan,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        is_quantized=scale is not None,
        window=window,
        soft_cap=soft_cap,
    )
    if len(task_N4):
        _paged_prefill[(len(task_N4), num_kv_heads)](
            q_TC,
            kv,
            kv if scale is None else scale,
            task_N4,
            table,
            out_TW,
            q_TC.stride(0),
            out_TW.stride(0),
            num_blocks * num_kv_heads * block_size,
            head_dim**-0.5,
            **constants,
            **plan.options(),
        )
    return out_TW


def _constants(
    plan: Plan,
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    is_quantized: bool,
    window: int | None,
    soft_cap: float | None,
) -> dict[str, int | float | bool]:
    group = num_heads // num_kv_heads
    if group > plan.config["BLOCK_M"]:
        raise ValueError(
            f"num_heads: {group} share a kv head, the plan has {plan.config['BLOCK_M']}"
        )
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAD_DIM": next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": plan.config["BLOCK_M"],
        "BLOCK_N": plan.config["BLOCK_N"],
        "IS_QUANTIZED": is_quantized,
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
    }


# Llama-3.1-8B's heads, one prompt of 8k tokens.
_HEADS, _KV_HEADS, _DIM, _BLOCK_SIZE, _TOKENS = 32, 8, 128, 16, 8192


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in the dtypes it is for; the last one also for heads of 64, and with a window and soft cap."""
    entries = table.entries(KERNEL)
    # Both where products are asynchronous; elsewhere int8 and fp8 come to the same registers.
    quantized: list[KvDtype] = ["int8", "fp8"] if support.has_wgmma else ["int8"]
    for entry in entries:
        dtype: KvDtype = "fp32" if entry.when.dtype == "fp32" else "bf16"
        for kv_dtype in quantized if entry.when.max_n == 1 else [dtype]:
            yield _case(entry.plan, support, dtype, kv_dtype)
    last = entries[-1].plan
    if all(entry.when.max_n != 1 for entry in entries):
        for kv_dtype in quantized:
            yield _case(last, support, "bf16", kv_dtype)
    # Smaller models' heads (SmolLM2, Llama-3.2-1B).
    yield _case(last, support, "bf16", "bf16", head_dim=64)
    yield _case(last, support, "bf16", "bf16", window=4096, soft_cap=50.0)


def _case(
    plan: Plan,
    support: Support,
    dtype: KvDtype,
    kv_dtype: KvDtype,
    *,
    head_dim: int = _DIM,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AotCase:
    scale_bytes = 4 if kv_dtype in QUANTIZED else 0
    pairs = _TOKENS * (_TOKENS + 1) // 2
    if window:
        pairs -= (_TOKENS - window) * (_TOKENS - window + 1) // 2
    seen = f" window={window} cap={soft_cap:g}" if window and soft_cap else ""
    pointer = f"*{triton_type(dtype)}"
    return AotCase(
        kernel=KERNEL,
        fn=_paged_prefill,
        signature={
            "q_ptr": pointer,
            "kv_ptr": f"*{triton_type(kv_dtype)}",
            "scale_ptr": "*fp32" if scale_bytes else f"*{triton_type(kv_dtype)}",
            "task_ptr": "*i32",
            "table_ptr": "*i32",
            "out_ptr": pointer,
            "q_stride": "i32",
            "out_stride": "i32",
            "plane_rows": "i32",
            "score_scale": "fp32",
        },
        constexprs=_constants(
            plan,
            num_heads=_HEADS,
            num_kv_heads=_KV_HEADS,
            block_size=_BLOCK_SIZE,
            head_dim=head_dim,
            is_quantized=scale_bytes > 0,
            window=window,
            soft_cap=soft_cap,
        ),
        divisible_by_16=(
            *("q_ptr", "kv_ptr", "scale_ptr", "task_ptr", "table_ptr", "out_ptr"),
            *("q_stride", "out_stride", "plane_rows"),
        ),
        plan=plan,
        arch=support.name,
        dtype=dtype,
        needs=None
        if dtype == "fp32"
        else ("wgmma" if plan.config["BLOCK_M"] >= 64 and plan.num_warps % 4 == 0 else "mma"),
        bytes_moved=_TOKENS
        * (
            2 * _KV_HEADS * (head_dim * dtype_size(kv_dtype) + scale_bytes)
            + 2 * _HEADS * head_dim * dtype_size(dtype)
        ),
        flops=4 * pairs * _HEADS * head_dim,
        shape=f"T={_TOKENS} H={_HEADS}/{_KV_HEADS} D={head_dim} kv={kv_dtype}{seen}",
    )
