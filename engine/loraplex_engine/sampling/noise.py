"""Gumbel noise as a pure function of (seed, output position, vocabulary id).

argmax(logit / temperature + Gumbel noise) is a draw from the softmax. Because no generator advances, a
row's draw depends on nothing but its own seed and position: not on neighbours, filters, preemption, or
which other ids were looked at.

The stream: Philox4x32-10 with key = seed (low word first) and counter = (id // 4, position low word,
position high word, 0); id takes word id % 4 of the four.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from loraplex_kernels.philox import UInt32Array, UInt64Array, philox4x32

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_WORDS = 4
_SCALE = 2.0**-32

# No draw exceeds this: a candidate that far below the best needs no noise to be out.
MAX_GUMBEL = float(-np.log(-np.log((2.0**32 - 0.5) * _SCALE)))


def random_bits(
    seed_R: UInt64Array, position_R: Int64Array, row_N: Int64Array, id_N: Int64Array
) -> UInt32Array:
    """32 bits for each of N (row, id) pairs.

    Any order is right; pairs sorted by row and id are cheapest, because four neighbouring ids share one
    evaluation.
    """
    if not id_N.size:
        return np.empty(0, np.uint32)
    block_N = id_N // _WORDS
    is_first_N = np.ones(id_N.size, np.bool_)
    is_first_N[1:] = (np.diff(row_N) != 0) | (np.diff(block_N) != 0)
    first = np.flatnonzero(is_first_N)
    words = _philox(seed_R[row_N[first]], position_R[row_N[first]], block_N[first])
    bits: UInt32Array = words[id_N % _WORDS, np.cumsum(is_first_N) - 1]
    return bits


def gumbel(bits: UInt32Array) -> Float64Array:
    """Standard Gumbel variates; finite for every input."""
    uniform = (bits + 0.5) * _SCALE
    return np.asarray(-np.log(-np.log(uniform)), np.float64)


def _philox(seed: UInt64Array, position: Int64Array, block: Int64Array) -> UInt32Array:
    high_32 = np.uint64(32)
    place = position.astype(np.uint64)
    counter = np.zeros((4, block.size), np.uint32)
    counter[0] = block
    counter[1] = place.astype(np.uint32)  # casts keep the low word
    counter[2] = (place >> high_32).astype(np.uint32)
    key = np.stack((seed.astype(np.uint32), (seed >> high_32).astype(np.uint32)))
    return philox4x32(counter, key)
