"""Top-k, top-p and min-p of each row as one cutoff, found without sorting the vocabulary.

Scores become integers in the same order (`order_key`). The ids that top-k or top-p keep are those whose key is
above some key t of the row, and the first few, by id, of those at t. t is the least key of the row above which
there is less than a target: k ids, or p of the probability. It is closed in on from both sides, two probes a
pass: one halfway between the keys, which bounds the passes by 32, and one halfway between the values, which
usually is faster and narrows to keys that occur. It ends when no other key is left.

Probability is counted in integers, round(2^42 exp((x - max) / T)): sums are exact in any order, so the outcome
depends neither on block size nor on how a reduction is arranged. What is lost is below 2^-42 of the most likely
id's probability, an id at a time; the exponentials themselves have fp32's error, as the host's total has.

One program a row; a row without filters leaves at once. A row's outcome depends on that row alone.
The rule (order, ties to the lower id) is that of loraplex_engine.sampling.filters.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.sample_rows import MIN_P_LOG, NUM_FIELDS, TEMPERATURE, TOP_K, TOP_P
from loraplex_kernels.support import Support, dtype_size, triton_type

KERNEL = "sample_cutoff"

_ONE: tl.constexpr = tl.constexpr(2.0**42)  # the most likely id; 2^20 of them fit in 63 bits
_LEAST: tl.constexpr = tl.constexpr(-(2**31))  # below every key of a number
_MOST: tl.constexpr = tl.constexpr(2**31 - 1)
_KEY_OF_INF: tl.constexpr = tl.constexpr(0x7F800000)
_KEY_OF_MINUS_INF: tl.constexpr = tl.constexpr(-0x7F800001)
_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_TOP_K: tl.constexpr = tl.constexpr(TOP_K)
_TOP_P: tl.constexpr = tl.constexpr(TOP_P)
_MIN_P_LOG: tl.constexpr = tl.constexpr(MIN_P_LOG)
_NUM_FIELDS: tl.constexpr = tl.constexpr(NUM_FIELDS)


@triton.jit
def order_key(x):  # noqa: ANN201 -- jitted
    """fp32 -> int32 in the same order; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(key, highest, inverse):
    """Probability relative to the most likely id's, in units of 2^-42."""
    # Halves cannot overflow, and 1e30 below any temperature makes it 0.
    distance = tl.maximum(0.5 * _value_of(key) - 0.5 * highest, -1e30)
    return (tl.exp(distance * (2.0 * inverse)) * _ONE).to(tl.int64)


@triton.jit
def _keys(row_ptr, start, size, BLOCK: tl.constexpr):
    """Keys of a block; `_LEAST` behind the end, which is above no probe."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < size, other=0.0).to(tl.float32)
    return tl.where(ids < size, order_key(x), _LEAST)


@triton.jit
def _mass_from(row_ptr, size, least, highest, inverse, BLOCK: tl.constexpr):
    """Weight of all ids whose key is `least` or above."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        key = _keys(row_ptr, start, size, BLOCK)
        total += tl.where(key >= least, _weight(tl.maximum(key, least), highest, inverse), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _count_at(row_ptr, size, cutoff, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        count += (_keys(row_ptr, start, size, BLOCK) == cutoff).to(tl.int64)
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
        middle = _value_of(low) * 0.5 + _value_of(high) * 0.5
        probe_b = tl.minimum(tl.maximum(order_key(middle), low), high - 1)
        sum_a = tl.zeros([BLOCK], tl.int64)
        sum_b = tl.zeros([BLOCK], tl.int64)
        under = tl.full([BLOCK], _LEAST, tl.int32)  # the largest key not above probe b
        over = tl.full([BLOCK], _MOST, tl.int32)  # the least key above it
        for start in range(0, size, BLOCK):
            key = _keys(row_ptr, start, size, BLOCK)
            is_over = key > probe_b
            if IS_COUNT:
                sum_a += (key > probe_a).to(tl.int64)
                sum_b += is_over.to(tl.int64)
            else:
                weight = _weight(tl.maximum(key, low), highest, inverse)
                sum_a += tl.where(key > probe_a, weight, 0)
                sum_b += tl.where(is_over, weight, 0)
            under = tl.maximum(under, tl.where(is_over, _LEAST, key))
            over = tl.minimum(over, tl.where(is_over, key, _MOST))
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
def _nth_at(row_ptr, size, cutoff, count, BLOCK: tl.constexpr):
    """The id of the `count`-th id with key `cutoff`; size - 1 if there are fewer."""
    last = count * 0 + (size - 1)
    seen = count * 0
    for start in range(0, size, BLOCK):
        if seen < count:
            ids = start + tl.arange(0, BLOCK)
            is_at = (_keys(row_ptr, start, size, BLOCK) == cutoff).to(tl.int32)
            here = tl.sum(is_at, axis=0)
            if seen + here >= count:
                # Halving the block's ids; a prefix sum over them would need scratch memory.
                low = count * 0 + start
                last = tl.minimum(last, start + BLOCK - 1)
                while low < last:
                    middle = (low + last) >> 1
                    if seen + tl.sum(tl.where(ids <= middle, is_at, 0), axis=0) >= count:
                        last = middle
                    else:
                        low = middle + 1
            seen += here
    return last


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
    cutoff = tl.full([], _LEAST, tl.int32)
    nothing = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int32) + (size - 1)
    if (temperature > 0.0) & (has_top_k | has_top_p | has_min_p):
        # The extremes also tell a row that is not all numbers: it keeps everything and is refused later.
        highs = tl.full([BLOCK], _LEAST, tl.int32)
        lows = tl.full([BLOCK], _MOST, tl.int32)
        for start in range(0, size, BLOCK):
            key = _keys(row_ptr, start, size, BLOCK)
            highs = tl.maximum(highs, key)
            lows = tl.minimum(lows, tl.where(key == _LEAST, _MOST, key))
        high = tl.max(highs, axis=0)
        low = tl.min(lows, axis=0)
        if (high < _KEY_OF_INF) & (high > _KEY_OF_MINUS_INF) & (low >= _KEY_OF_MINUS_INF):
            highest = _value_of(high)
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
                total -= tl.maximum(num_at - num_kept, 0) * _weight(cutoff, highest, inverse)
                wanted = top_p * total.to(tl.float64)
                target = wanted.to(tl.int64)
                target += (target.to(tl.float64) < wanted).to(
                    tl.int64
                )  # less than wanted, as integers
                target = tl.maximum(target, 1)
                under_p, above = _search(
                    row_ptr, size, cutoff, high, target, highest, inverse, False, BLOCK
                )
                weight = tl.maximum(_weight(under_p, highest, inverse), 1)
                # Rounded up. A quotient of 64-bit integers would be a call, which costs registers; this one is
                # at most the vocabulary's size, so it is off by one at most.
                rest = target - above
                enough = (rest.to(tl.float32) / weight.to(tl.float32)).to(tl.int64)
                enough += (enough * weight < rest).to(tl.int64)
                enough -= ((enough - 1) * weight >= rest).to(tl.int64)
                # As long as t is that of top-k, some of the ids there may be out already.
                num_kept = tl.where(under_p > cutoff, enough, tl.minimum(num_kept, enough))
                cutoff = under_p
            if has_min_p:
                lowest = highest.to(tl.float64) + min_p_log
                rounded = lowest.to(tl.float32)
                least = order_key(rounded) + (rounded.to(tl.float64) < lowest).to(tl.int32)
                if least > cutoff:
                    cutoff = least
                    num_kept = nothing + size
            if num_kept < size:
                last = _nth_at(row_ptr, size, cutoff, num_kept.to(tl.int32), BLOCK)
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
    _sample_cutoff[(num_rows,)](
        logits_RV, rows_RF, cutoff_R, last_R, logits_RV.stride(0), size, **plan.launch()
    )


def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]:
    """Every entry in bf16, and the last one in fp32, at Llama-3.1-8B's vocabulary."""
    entries = table.entries(KERNEL)
    for entry, dtype in [(entry, "bf16") for entry in entries] + [(entries[-1], "fp32")]:
        num_rows, size = entry.when.max_tokens or 64, 128_256
        yield AotCase(
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
            constexprs=dict(entry.plan.config),
            divisible_by_16=(
                *("logits_ptr", "rows_ptr", "cutoff_ptr", "last_ptr"),
                *("logits_stride", "size"),
            ),
            plan=entry.plan,
            arch=support.name,
            dtype=dtype,
            needs=None,
            # Once from memory; the further passes, about 12, read what is in L2.
            bytes_moved=num_rows * size * dtype_size(dtype),
            flops=num_rows * size * 12 * 16,
            shape=f"R={num_rows} V={size}",
        )
