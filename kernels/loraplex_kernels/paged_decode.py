"""Attention of rows with one query each over a paged cache: split-KV ("flash-decoding"), combined in fixed order.

A row's keys are cut into splits that different programs attend, so that few rows fill a GPU; a second launch
combines the splits. The query heads that share a KV head are the rows of one matrix product.

`fast`: as many splits as the batch leaves room for (NUM_SPLITS of the plan), each an equal part of the row but not
less than LEAST_PART keys: a short row is one split, a long one among many short ones still has several programs.
`invariant`: splits of SPLIT_SIZE positions, aligned to position 0, PROGRAMS of them at
a time; a split's sums and the order they are combined in follow from the row alone, whatever the batch.

Grids depend on the number of entries and the plan only, never on lengths: a captured launch holds for any.
Source: Flash-Decoding (Dao et al., 2023); online softmax, arXiv 1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.grid import ceil_div, next_power_of_2
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

KERNEL = "paged_decode"
COMBINE_KERNEL = "paged_decode_combine"
# The combining launch holds a row's splits in registers.
MAX_SPLITS = 64


@triton.jit
def _splits(
    length, num_splits, least_part, split_size, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """(origin, size, first, end): split s, first <= s < end, covers origin + s * size and `size` positions."""
    origin, first = length * 0, length * 0
    if WINDOW > 0:
        origin = tl.maximum(length - WINDOW, 0)
    if split_size > 0:
        size = split_size // BLOCK_N
        first = origin // split_size
        origin = length * 0
    else:
        origin = origin // BLOCK_N * BLOCK_N
        least = tl.cdiv(least_part, BLOCK_N)
        size = tl.maximum(tl.cdiv(tl.cdiv(length - origin, num_splits), BLOCK_N), least)
    # Written so that the compiler knows it as a multiple of the tile.
    size = size * BLOCK_N
    return origin, size, first, tl.cdiv(length - origin, size)


# What differs from bucket to bucket, from column to column or with the context's length gets no variant of the kernel
# of its own.
@triton.jit(do_not_specialize=["num_splits", "num_planes", "least_part", "split_size"])
def _paged_decode(
    q_ptr,
    kv_ptr,
    scale_ptr,
    entry_ptr,
    table_ptr,
    total_ptr,
    stat_ptr,
    q_stride,
    plane_rows,
    num_splits,
    num_planes,
    least_part,
    split_size,
    score_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    entry = tl.program_id(0)
    kv_head = tl.program_id(1)
    out_row = tl.load(entry_ptr + entry * 4).to(tl.int64)
    length = tl.load(entry_ptr + entry * 4 + 1)
    table_at = table_ptr + tl.load(entry_ptr + entry * 4 + 2)

    head = tl.arange(0, BLOCK_H)
    width = tl.arange(0, PAD_DIM)
    is_head = head < GROUP
    mask = is_head[:, None] & (width < HEAD_DIM)[None, :]
    column = (kv_head * GROUP + head)[:, None] * HEAD_DIM + width[None, :]
    q = tl.load(q_ptr + out_row * q_stride + column, mask=mask, other=0.0)

    origin, size, first, end = _splits(length, num_splits, least_part, split_size, BLOCK_N, WINDOW)
    for split in range(first + tl.program_id(2), end, tl.num_programs(2)):
        top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_H,), tl.float32)
        total = tl.zeros((BLOCK_H, PAD_DIM), tl.float32)
        begin = origin + split * size
        stop = tl.minimum(begin + size, length)
        for start in range(begin, stop, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            is_there = position < stop
            if WINDOW > 0:
                is_there = is_there & (position >= length - WINDOW)
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
                True,
                SOFT_CAP,
            )
        of_head = entry.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head
        plane = of_head * num_planes + split
        tl.store(stat_ptr + plane * 2, top, mask=is_head)
        tl.store(stat_ptr + plane * 2 + 1, weight, mask=is_head)
        tl.store(total_ptr + plane[:, None] * HEAD_DIM + width[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["num_splits", "num_planes", "least_part", "split_size"])
def _paged_decode_combine(
    entry_ptr,
    total_ptr,
    stat_ptr,
    out_ptr,
    out_stride,
    num_splits,
    num_planes,
    least_part,
    split_size,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PAD_PLANES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    entry = tl.program_id(0)
    head = tl.program_id(1)
    out_row = tl.load(entry_ptr + entry * 4).to(tl.int64)
    length = tl.load(entry_ptr + entry * 4 + 1)
    _origin, _size, first, end = _splits(
        length, num_splits, least_part, split_size, BLOCK_N, WINDOW
    )

    split = tl.arange(0, PAD_PLANES)
    width = tl.arange(0, PAD_DIM)
    # Planes of splits that the row does not have hold whatever an earlier step left there.
    is_used = (split >= first) & (split < end)
    plane = (entry.to(tl.int64) * tl.num_programs(1) + head) * num_planes + split
    top = tl.load(stat_ptr + plane * 2, mask=is_used, other=float("-inf"))
    weight = tl.load(stat_ptr + plane * 2 + 1, mask=is_used, other=0.0)
    highest = tl.max(top, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.where(is_used, tl.exp2(top - highest), 0.0)
    total = tl.load(
        total_ptr + plane[:, None] * HEAD_DIM + width[None, :],
        mask=is_used[:, None] & (width < HEAD_DIM)[None, :],
        other=0.0,
    )
    mean = tl.sum(total * share[:, None], axis=0)
    weight_sum = tl.sum(weight * share, axis=0)
    mean = tl.where(weight_sum == 0.0, 0.0, mean / weight_sum)
    at = out_ptr + out_row * out_stride + head * HEAD_DIM + width
    tl.store(at, mean.to(out_ptr.dtype.element_ty), mask=width < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a plan cuts rows; the same for every entry of a launch."""

    num_planes: int  # per (entry, head) in the workspace
    num_splits: int  # fast: parts of a row; invariant: 0
    least_part: int  # fast: keys of a part at least; invariant: 0
    split_size: int  # invariant: positions of a split; fast: 0
    programs: int  # that share a (row, kv head)

    @classmethod
    def of(cls, plan: Plan, max_length: int) -> Splitting:
        """For rows of at most `max_length` keys.

        A plan has NUM_SPLITS and LEAST_PART, or SPLIT_SIZE and PROGRAMS; SPLIT_SIZE is doubled until
        `MAX_SPLITS` are enough.
        """
        size = plan.config.get("SPLIT_SIZE", 0)
        if not size:
            num_splits = min(plan.config["NUM_SPLITS"], MAX_SPLITS)
            return cls(num_splits, num_splits, plan.config["LEAST_PART"], 0, num_splits)
        while size * MAX_SPLITS < max_length:
            size *= 2
        num_planes = max(1, ceil_div(max_length, size))
        return cls(num_planes, 0, 0, size, min(plan.config["PROGRAMS"], num_planes))

    def workspace_size(self, num_entries: int, num_heads: int, head_dim: int) -> int:
        """Fp32 numbers that a launch needs for its splits."""
        return num_entries * num_heads * self.num_planes * (head_dim + 2)


def paged_decode(
    q_TC: Tensor,
    kv: Tensor,
    entry_E4: Tensor,
    table: Tensor,
    out_TW: Tensor,
    workspace: Tensor,
    plan: Plan,
    *,
    num_heads: int,
    max_length: int,
    scale: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(q K^T / sqrt(D)) V of one query per entry, over the last `length` positions of its own blocks.

    Shapes: T rows of the step, E entries, H query heads, D head_dim, N blocks.
    Args:
        q_TC: (T, H * D or more) bf16, fp16 or fp32: rotated queries first; rows contiguous.
        kv: (2, N, kv heads, block_size, D), dtype of q, int8 or float8_e4m3fn, contiguous.
        entry_E4: (E, 4) int32: row of q and out, number of keys (0: the row becomes zero), where the entry's blocks
            begin in `table`, unused. A row is named at most once.
        table: int32, block ids of all sequences; what no entry's length reaches is not read.
        out_TW: (T, H * D) contiguous, dtype of q: rows that no entry names are left as they are.
        workspace: fp32, contiguous, of at least `Splitting.workspace_size` numbers; its content means nothing.
        max_length: no entry has more keys; decides the number of splits of an `invariant` plan.
        scale: (2, N, kv heads, block_size) fp32 for int8 and fp8.
        window: keys further back than this are not seen.   soft_cap: scores become cap * tanh(score / cap).
    Returns:
        out_TW.
    Raises:
        ValueError: an argument differs from the above.
    Reference: `reference_attention.paged_attention`.
    """
    num_blocks, num_kv_heads, block_size, head_dim = check_cache(
        q_TC, kv, scale, num_heads=num_heads
    )
    check_output(out_TW, q_TC, num_heads * head_dim)
    check_work("entry", entry_E4)
    splitting = Splitting.of(plan, max_length)
    num_entries = entry_E4.shape[0]
    needed = splitting.workspace_size(num_entries, num_heads, head_dim)
    if workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(
            f"workspace has {workspace.numel()} {workspace.dtype}, needs {needed} fp32"
        )
    if not num_entries:
        return out_TW
    # Totals first: their length is a multiple of 16 bytes, so both begin at one.
    num_totals = num_entries * num_heads * splitting.num_planes * head_dim
    total, stat = workspace.view(-1)[:num_totals], workspace.view(-1)[num_totals:]
    constants = _constants(
        plan,
        splitting,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        is_quantized=scale is not None,
        window=window,
        soft_cap=soft_cap,
    )
    _paged_decode[(num_entries, num_kv_heads, splitting.programs)](
        q_TC,
        kv,
        kv if scale is None else scale,
        entry_E4,
        table,
        total,
        stat,
        q_TC.stride(0),
        num_blocks * num_kv_heads * block_size,
        splitting.num_splits,
        splitting.num_planes,
        splitting.least_part,
        splitting.split_size,
        head_dim**-0.5,
        **constants,
        **plan.options(),
    )
    _paged_decode_combine[(num_entries, num_heads)](
        entry_E4,
        total,
        stat,
        out_TW,
        out_TW.stride(0),
        splitting.num_splits,
        splitting.num_planes,
        splitting.least_part,
        splitting.split_size,
        **_combine_constants(constants, splitting),
        **_combine_plan(plan).options(),
    )
    return out_TW


def _constants(
    plan: Plan,
    splitting: Splitting,
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
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAD_DIM": next_power_of_2(head_dim),
        # A matrix product has at least 16 rows.
        "BLOCK_H": max(16, next_power_of_2(group)),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": plan.config["BLOCK_N"],
        "IS_QUANTIZED": is_quantized,
        "WINDOW": window or 0,
        "SOFT_CAP": soft_cap or 0.0,
    }


def _combine_constants(
    constants: Mapping[str, int | float | bool], splitting: Splitting
) -> dict[str, int | float | bool]:
    shared = ("HEAD_DIM", "PAD_DIM", "BLOCK_N", "WINDOW")
    return {
        "PAD_PLANES": next_power_of_2(splitting.num_planes),
        **{name: constants[name] for name in shared},
    }


def _combine_plan(plan: Plan) -> Plan:
    return Plan(
        {}, 4, 1, "one (row, head) a program: its splits are read once, in one go", plan.label
    )


# Llama-3.1-8B's heads, over 8k keys of context.
_HEADS, _KV_HEADS, _DIM, _BLOCK_SIZE, _KEYS = 32, 8, 128, 16, 8192


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in the dtypes it is for; the last invariant one also with a window and soft cap."""
    entries = table.entries(KERNEL)
    for entry in entries:
        dtype: KvDtype = "fp32" if entry.when.dtype == "fp32" else "bf16"
        is_quantized = entry.when.max_n == 1
        rows, head_dim = entry.when.max_tokens or 2048, entry.when.max_k or _DIM
        yield _case(
            entry.plan,
            support,
            dtype,
            "int8" if is_quantized else dtype,
            rows=rows,
            head_dim=head_dim,
        )
        # Of the builds that differ little, the one with more registers.
        has_most = table.column == "invariant" and entry.when.max_tokens is None
        if is_quantized and has_most and support.allows("fp8"):
            yield _case(entry.plan, support, dtype, "fp8", rows=rows)
    plain = [entry.plan for entry in entries if not entry.when.dtype and not entry.when.max_k]
    # The most splits and the fewest.
    for plan in (plain[0], plain[-1]):
        yield _combine_case(plan, support)
    if table.column == "invariant":
        yield _case(plain[-1], support, "bf16", "bf16", rows=2048, window=4096, soft_cap=50.0)


def _case(
    plan: Plan,
    support: Support,
    dtype: KvDtype,
    kv_dtype: KvDtype,
    *,
    rows: int,
    head_dim: int = _DIM,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AotCase:
    entries = max(1, rows // _KV_HEADS)
    splitting = Splitting.of(plan, _KEYS)
    keys = min(window or _KEYS, _KEYS)
    scale_bytes = 4 if kv_dtype in QUANTIZED else 0
    seen = f" window={window} cap={soft_cap:g}" if window and soft_cap else ""
    pointer = f"*{triton_type(dtype)}"
    return AotCase(
        kernel=KERNEL,
        fn=_paged_decode,
        signature={
            "q_ptr": pointer,
            "kv_ptr": f"*{triton_type(kv_dtype)}",
            "scale_ptr": "*fp32" if scale_bytes else f"*{triton_type(kv_dtype)}",
            "entry_ptr": "*i32",
            "table_ptr": "*i32",
            "total_ptr": "*fp32",
            "stat_ptr": "*fp32",
            "q_stride": "i32",
            "plane_rows": "i32",
            "num_splits": "i32",
            "num_planes": "i32",
            "least_part": "i32",
            "split_size": "i32",
            "score_scale": "fp32",
        },
        constexprs=_constants(
            plan,
            splitting,
            num_heads=_HEADS,
            num_kv_heads=_KV_HEADS,
            block_size=_BLOCK_SIZE,
            head_dim=head_dim,
            is_quantized=scale_bytes > 0,
            window=window,
            soft_cap=soft_cap,
        ),
        divisible_by_16=(
            *("q_ptr", "kv_ptr", "scale_ptr", "entry_ptr", "table_ptr", "total_ptr"),
            *("stat_ptr", "q_stride", "plane_rows"),
        ),
        plan=plan,
        arch=support.name,
        dtype=dtype,
        needs=None if dtype == "fp32" else "mma",
        bytes_moved=entries
        * (
            2 * keys * _KV_HEADS * (head_dim * dtype_size(kv_dtype) + scale_bytes)
            + 2 * _HEADS * head_dim * dtype_size(dtype)
        ),
        flops=4 * entries * keys * _HEADS * head_dim,
        shape=f"rows={entries} keys={_KEYS} H={_HEADS}/{_KV_HEADS} D={head_dim} kv={kv_dtype}{seen}",
    )


def _combine_case(plan: Plan, support: Support) -> AotCase:
    splitting = Splitting.of(plan, _KEYS)
    constants = _constants(
        plan,
        splitting,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        block_size=_BLOCK_SIZE,
        head_dim=_DIM,
        is_quantized=False,
        window=None,
        soft_cap=None,
    )
    return AotCase(
        kernel=COMBINE_KERNEL,
        fn=_paged_decode_combine,
        signature={
            "entry_ptr": "*i32",
            "total_ptr": "*fp32",
            "stat_ptr": "*fp32",
            "out_ptr": "*bf16",
            "out_stride": "i32",
            "num_splits": "i32",
            "num_planes": "i32",
            "least_part": "i32",
            "split_size": "i32",
        },
        constexprs=_combine_constants(constants, splitting),
        divisible_by_16=("entry_ptr", "total_ptr", "stat_ptr", "out_ptr", "out_stride"),
        plan=_combine_plan(plan),
        arch=support.name,
        dtype="bf16",
        needs=None,
        bytes_moved=_HEADS * (splitting.num_planes * (_DIM + 2) * 4 + _DIM * 2),
        flops=2 * _HEADS * splitting.num_planes * _DIM,
        shape=f"rows=1 splits={splitting.num_planes} H={_HEADS} D={_DIM}",
    )
