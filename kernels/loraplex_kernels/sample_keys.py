"""What both ways of finding a row's cutoff share: keys in the order of the scores, integer probabilities, borders.

Scores become integers in the same order (`order_key`). Probability is counted in integers,
round(2^42 exp((x - max) / T)): sums are exact in any order, so an outcome depends neither on block size nor on how
a sum is arranged or shared out. What is lost is below 2^-42 of the most likely id's probability, an id at a time;
the exponentials themselves have fp32's error, as the host's total has.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ONE: tl.constexpr = tl.constexpr(2.0**42)  # the most likely id; 2^20 of them fit in 63 bits
LEAST: tl.constexpr = tl.constexpr(-(2**31))  # below every key of a number
MOST: tl.constexpr = tl.constexpr(2**31 - 1)  # above every one
_KEY_OF_INF: tl.constexpr = tl.constexpr(0x7F800000)
_KEY_OF_MINUS_INF: tl.constexpr = tl.constexpr(-0x7F800001)


@triton.jit
def order_key(x):  # noqa: ANN201 -- jitted
    """fp32 -> int32 in the same order; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):  # noqa: ANN201 -- jitted
    """int32 -> fp32: the score of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_all_numbers(low, high):  # noqa: ANN201 -- jitted
    """Whether a row with these extremes can be filtered: no NaN, no infinity, but minus infinity as a ban."""
    return (high < _KEY_OF_INF) & (high > _KEY_OF_MINUS_INF) & (low >= _KEY_OF_MINUS_INF)


@triton.jit
def weight_of(key, highest, inverse):  # noqa: ANN201 -- jitted
    """Probability relative to the most likely id's, in units of 2^-42."""
    # Halves cannot overflow, and 1e30 below any temperature makes it 0.
    distance = tl.maximum(0.5 * value_of(key) - 0.5 * highest, -1e30)
    return (tl.exp(distance * (2.0 * inverse)) * _ONE).to(tl.int64)


@triton.jit
def load_keys(row_ptr, start, end, BLOCK: tl.constexpr):  # noqa: ANN201 -- jitted
    """Keys of a block of ids; `LEAST` from `end` on, which is above no probe."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < end, other=0.0).to(tl.float32)
    return tl.where(ids < end, order_key(x), LEAST)


@triton.jit
def nth_at(row_ptr, first, end, cutoff, count, BLOCK: tl.constexpr):  # noqa: ANN201 -- jitted
    """The id of the `count`-th id in [first, end) with key `cutoff`; end - 1 if there are fewer."""
    last = count * 0 + (end - 1)
    seen = count * 0
    for start in range(first, end, BLOCK):
        if seen < count:
            ids = start + tl.arange(0, BLOCK)
            is_at = (load_keys(row_ptr, start, end, BLOCK) == cutoff).to(tl.int32)
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
def top_p_target(top_p, total):  # noqa: ANN201 -- jitted
    """The least integer probability that is p of the total or more."""
    wanted = top_p * total.to(tl.float64)
    target = wanted.to(tl.int64)
    target += (target.to(tl.float64) < wanted).to(tl.int64)  # less than wanted, as integers
    return tl.maximum(target, 1)


@triton.jit
def num_needed(rest, weight):  # noqa: ANN201 -- jitted
    """How many ids of this weight make up `rest`, rounded up."""
    weight = tl.maximum(weight, 1)
    # A quotient of 64-bit integers would be a call, which costs registers; this one is at most the
    # vocabulary's size, so it is off by one at most.
    enough = (rest.to(tl.float32) / weight.to(tl.float32)).to(tl.int64)
    enough += (enough * weight < rest).to(tl.int64)
    return enough - ((enough - 1) * weight >= rest).to(tl.int64)


@triton.jit
def min_p_key(highest, min_p_log):  # noqa: ANN201 -- jitted
    """The least key that min-p keeps."""
    lowest = highest.to(tl.float64) + min_p_log
    rounded = lowest.to(tl.float32)
    return order_key(rounded) + (rounded.to(tl.float64) < lowest).to(tl.int32)
