"""Philox4x32-10: 128 random bits as a pure function of a 128-bit counter and a 64-bit key.

The reference, in numpy: integers only, so that a kernel can be compared with it bit for bit. Without
state, any element of the stream can be computed alone, in any order, on any device.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

NUM_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter_4N: UInt32Array, key_2N: UInt32Array) -> UInt32Array:
    """Ten rounds for N counters.

    Args:
        counter_4N: (4, N), word 0 first.   key_2N: (2, N) or (2, 1).

    Returns:
        (4, N) uint32.
    """
    # Words live in 64 bits, so that a product needs no split; each stays below 2^32.
    c0, c1, c2, c3 = counter_4N.astype(np.uint64)
    k0, k1 = key_2N.astype(np.uint64)
    for _ in range(NUM_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW_32,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW_32,
        )
        k0 = (k0 + _WEYL_0) & _LOW_32
        k1 = (k1 + _WEYL_1) & _LOW_32
    return np.stack((c0, c1, c2, c3)).astype(np.uint32)
