"""Top-k, top-p and min-p of each row as one cutoff, found without sorting the vocabulary.

Scores become integers in the same order (`sample_keys.order_key`). The ids that top-k or top-p keep are those whose
key is above some key t of the row, and the first few, by id, of those at t. t is the least key of the row above which
there is less than a target: k ids, or p of the probability, counted in integers. It is closed in on from both sides,
two probes a pass: one halfway between the keys, which bounds the passes by 32, and one halfway between the values,
which usually is faster and narrows to keys that occur. It ends when no other key is left.

One program a row, where rows are many or short; `sample_split` has the same outcome with several. A row without
filters leaves at once. A row's outcome depends on that row alone.
The rule (order, ties to the lower id) is that of loraplex_engine.sampling.filters.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.plans import Plan, PlanEntry, PlanTable
from loraplex_kernels.sample_keys import (
    LEAST,
    MOST,
    is_all_numbers,
    load_keys,
    min_p_key,
    nth_at,
    num_needed,
    order_key,
    top_p_target,
    value_of,
    weight_of,
)
from loraplex_kernels.sample_rows import MIN_P_LOG, NUM_FIELDS, TEMPERATURE, TOP_K, TOP_P
from loraplex_kernels.sample_split import num_shares, sample_split, split_case
from loraplex_kernels.support import Support, dtype_size, triton_type

KERNEL = "sample_cutoff"

_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_TOP_K: tl.constexpr = tl.constexpr(TOP_K)
_TOP_P: tl.constexpr = tl.constexpr(TOP_P)
_MIN_P_LOG: tl.constexpr = tl.constexpr(MIN_P_LOG)
_NUM_FIELDS: tl.constexpr = tl.constexpr(NUM_FIELDS)


@triton.jit
def _mass_from(row_ptr, size, least, highest, inverse, BLOCK: tl.constexpr):
    """Weight of all ids whose key is `least` or above."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        key = load_keys(row_ptr, start, size, BLOCK)
        total += tl.where(key >= least, weight_of(tl.maximum(key, least), highest, inverse), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _count_at(row_ptr, size, cutoff, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        count += (load_keys(row_ptr, start, size, BLOCK) == cutoff).to(tl.int64)
    return tl.sum(count, axis=0)


@triton.jit
def _search(
    row_ptr,
    size,
    low,
    high,
    target,
    highest,
    inverse,
    IS_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(t, what is above t): the least key t in [low, high] above which there is less than `target`.

    low, high: keys of the row; above high there is less than the target. What is above changes at keys of the
    row alone, so t is one of them whatever was probed.
    """
    above_high = target * 0
    while low < high:
        # Both below high, so that each pass takes at least one key away.
        probe_a = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
        middle = value_of(low) * 0.5 + value_of(high) * 0.5
        probe_b = tl.minimum(tl.maximum(order_key(middle), low), high - 1)
        sum_a = tl.zeros([BLOCK], tl.int64)
        sum_b = tl.zeros([BLOCK], tl.int64)
        under = tl.full([BLOCK], LEAST, tl.int32)  # the largest key not above probe b
        over = tl.full([BLOCK], MOST, tl.int32)  # the least key above it
        for start in range(0, size, BLOCK):
            key = load_keys(row_ptr, start, size, BLOCK)
            is_over = key > probe_b
            if IS_COUNT:
                sum_a += (key > probe_a).to(tl.int64)
                sum_b += is_over.to(tl.int64)
            else:
                weight = weight_of(tl.maximum(key, low), highest, inverse)
                sum_a += tl.where(key > probe_a, weight, 0)
                sum_b += tl.where(is_over, weight, 0)
            under = tl.maximum(under, tl.where(is_over, LEAST, key))
            over = tl.minimum(over, tl.where(is_over, key, MOST))
        above_a, above_b = tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0)
        # Only probe b narrows to keys that occur: that of the other one would cost registers.
        if above_b < target:
            high = tl.max(under, axis=0)
            above_high = above_b
        else:
            low = tl.min(over, axis=0)
        if above_a < target:
            if probe_a < high:
                high = probe_a
                above_high = above_a
        else:
            low = tl.maximum(low, probe_a + 1)
    return high, above_high


@triton.jit
def _sample_cutoff(
    logits_ptr,
    rows_ptr,
    cutoff_ptr,
    last_ptr,
    logits_stride,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    record = rows_ptr + row * _NUM_FIELDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float64, bitcast=True)
    top_k = tl.load(record + _TOP_K)
    top_p = tl.load(record + _TOP_P).to(tl.float64, bitcast=True)
    min_p_log = tl.load(record + _MIN_P_LOG).to(tl.float64, bitcast=True)
    has_top_k = (top_k > 0) & (top_k < size)
    has_top_p = top_p < 1.0
    has_min_p = min_p_log > float("-inf")
    cutoff = tl.full([], LEAST, tl.int32)
    nothing = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int32) + (size - 1)
    if (temperature > 0.0) & (has_top_k | has_top_p | has_min_p):
        # The extremes also tell a row that is not all numbers: it keeps everything and is refused later.
        highs = tl.full([BLOCK], LEAST, tl.int32)
        lows = tl.full([BLOCK], MOST, tl.int32)
        for start in range(0, size, BLOCK):
            key = load_keys(row_ptr, start, size, BLOCK)
            highs = tl.maximum(highs, key)
            lows = tl.minimum(lows, tl.where(key == LEAST, MOST, key))
        high = tl.max(highs, axis=0)
        low = tl.min(lows, axis=0)
        if is_all_numbers(low, high):
            highest = value_of(high)
            inverse = 1.0 / temperature.to(tl.float32)
            cutoff = tl.minimum(low, high)
            num_kept = nothing + size  # of the ids at the cutoff
            num_at = nothing
            if has_top_k:
                cutoff, above = _search(
                    row_ptr, size, cutoff, high, top_k, highest, inverse, True, BLOCK
                )
                num_kept = top_k - above
                num_at = _count_at(row_ptr, size, cutoff, BLOCK)
            if has_top_p:
                total = _mass_from(row_ptr, size, cutoff, highest, inverse, BLOCK)
                # Of the ids at the cutoff top-k may have left some out.
                total -= tl.maximum(num_at - num_kept, 0) * weight_of(cutoff, highest, inverse)
                target = top_p_target(top_p, total)
                under_p, above = _search(
                    row_ptr, size, cutoff, high, target, highest, inverse, False, BLOCK
                )
                enough = num_needed(target - above, weight_of(under_p, highest, inverse))
                # As long as t is that of top-k, some of the ids there may be out already.
                num_kept = tl.where(under_p > cutoff, enough, tl.minimum(num_kept, enough))
                cutoff = under_p
            if has_min_p:
                least = min_p_key(highest, min_p_log)
                if least > cutoff:
                    cutoff = least
                    num_kept = nothing + size
            if num_kept < size:
                last = nth_at(row_ptr, 0, size, cutoff, num_kept.to(tl.int32), BLOCK)
    tl.store(cutoff_ptr + row, cutoff)
    tl.store(last_ptr + row, last)


def sample_cutoff(
    logits_RV: Tensor, rows_RF: Tensor, cutoff_R: Tensor, last_R: Tensor, plan: Plan
) -> None:
    """Per row the key below which no id is kept, and the last id kept among those at it.

    `sample.sample` checks the arguments and allocates.

    Shapes: R rows, V vocabulary ids, F fields of `sample_rows`.
    Args:
        logits_RV: (R, V) bf16, fp16 or fp32, rows contiguous.   rows_RF: (R, F) int64.
        cutoff_R, last_R: (R,) int32, written. An id is kept where its `order_key` is above the cutoff, or
            equal to it and the id is at most `last`.
    """
    num_rows, size = logits_RV.shape
    if num_shares(size, plan) > 1:
        sample_split(logits_RV, rows_RF, cutoff_R, last_R, plan)
        return
    _sample_cutoff[(num_rows,)](
        logits_RV,
        rows_RF,
        cutoff_R,
        last_R,
        logits_RV.stride(0),
        size,
        BLOCK=plan.config["BLOCK"],
        **plan.options(),
    )


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in bf16, for many rows and split where it splits them; fp32 of the first and the last one. At
    Llama-3.1-8B's vocabulary."""
    entries = table.entries(KERNEL)
    for entry in entries:
        dtypes = ("bf16", "fp32") if entry in (entries[0], entries[-1]) else ("bf16",)
        for dtype in dtypes:
            yield (
                split_case(entry, support, dtype)
                if entry.plan.config["NUM_SPLITS"] > 1
                else _whole_case(entry, support, dtype)
            )
        if entry.plan.config["NUM_SPLITS"] > 1:  # its rows that are too short to be split
            yield _whole_case(entry, support, "bf16")


def _whole_case(entry: PlanEntry, support: Support, dtype: str) -> AotCase:
    num_rows, size = entry.when.max_tokens or 64, 128_256
    if entry.plan.config["NUM_SPLITS"] > 1:
        size = entry.plan.config["BLOCK"]
    pointers = ("logits_ptr", "rows_ptr", "cutoff_ptr", "last_ptr")
    return AotCase(
        kernel=KERNEL,
        fn=_sample_cutoff,
        signature={
            "logits_ptr": f"*{triton_type(dtype)}",
            "rows_ptr": "*i64",
            "cutoff_ptr": "*i32",
            "last_ptr": "*i32",
            "logits_stride": "i32",
            "size": "i32",
        },
        constexprs={"BLOCK": entry.plan.config["BLOCK"]},
        divisible_by_16=(*pointers, "logits_stride", "size"),
        plan=entry.plan,
        arch=support.name,
        dtype=dtype,
        needs=None,
        # Once from memory; the further passes, about 12, read what is in L2.
        bytes_moved=num_rows * size * dtype_size(dtype),
        flops=num_rows * size * 12 * 16,
        shape=f"R={num_rows} V={size}",
    )
