"""Gumbel noise inside a kernel: Philox4x32-10 of (seed, position, vocabulary id), the integers of `philox.py`.

Key = seed, low word first; counter = (id // 4, position low, position high, 0); id takes word id % 4. The same
stream as loraplex_engine.sampling.noise, bit for bit. Jitted functions only: they are part of kernels.

Noise is -log(-log u) with u = (bits + 0.5) / 2^32. In fp32 u loses what matters near 1, where the winners are:
there 1 - u is kept in its place. fp64 needs no such care.
"""

from __future__ import annotations

import triton
import triton.language as tl

# No noise exceeds this (23.3 by 0.6): what is that far below the best needs none to be out.
MOST_NOISE = 24.0
_NUM_ROUNDS: tl.constexpr = tl.constexpr(10)
_MULTIPLIER_0: tl.constexpr = tl.constexpr(0xD2511F53)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0xCD9E8D57)
_WEYL_0: tl.constexpr = tl.constexpr(0x9E3779B9)
_WEYL_1: tl.constexpr = tl.constexpr(0xBB67AE85)
_2_TO_MINUS_32: tl.constexpr = tl.constexpr(2.0**-32)


@triton.jit
def random_bits_from(seed, position, first_id, BLOCK: tl.constexpr):  # noqa: ANN201 -- jitted
    """uint32 for each of the ids first_id .. first_id + BLOCK - 1; both must be multiples of 4.

    seed: int64, the bits of a uint64.   position: int64.   first_id: int32.
    """
    counter = first_id // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = _four_words(seed, position, counter)
    # Ids 4c .. 4c + 3 side by side, so that a thread's four words are those of its four logits.
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def random_bits_at(seed, position, ids):  # noqa: ANN201 -- jitted
    """uint32 for each of a tensor of int32 ids, in any order."""
    w0, w1, w2, w3 = _four_words(seed, position, ids // 4)
    word = ids % 4
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def _four_words(seed, position, counter):
    # Written out rather than tl.philox: the interpreter takes most of a second for that one's nested calls.
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = counter.to(tl.uint32)
    c1 = c0 * 0 + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = c0 * 0 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = c0 * 0
    for _ in tl.static_range(_NUM_ROUNDS):
        high_0 = tl.umulhi(c0, _MULTIPLIER_0)
        high_1 = tl.umulhi(c2, _MULTIPLIER_1)
        low_0 = c0 * _MULTIPLIER_0
        low_1 = c2 * _MULTIPLIER_1
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def gumbel_32(bits):  # noqa: ANN201 -- jitted
    """Noise in fp32, within a few 1e-6 of `gumbel_64`."""
    low = (bits.to(tl.float32) + 0.5) * _2_TO_MINUS_32  # u
    high = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _2_TO_MINUS_32  # 1 - u
    # -log(1 - w) = 2 atanh(w / (2 - w)) for w up to 1/2: a series in s^2 <= 1/9.
    s = high / (2.0 - high)
    q = s * s
    series = 1.0 + q * (
        1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))))
    )
    is_low = bits < 0x80000000
    # The logarithm that is not taken sees a number it can take.
    rate = tl.where(is_low, -tl.log(tl.where(is_low, low, 0.5)), 2.0 * s * series)
    return -tl.log(rate)


@triton.jit
def gumbel_64(bits):  # noqa: ANN201 -- jitted
    """Noise in fp64: what the host computes, up to the last bits of a logarithm."""
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * _2_TO_MINUS_32))
