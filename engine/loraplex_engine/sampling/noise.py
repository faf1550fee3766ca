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


def random_bits(seed_N: UInt64Array, position_N: Int64Array, id_N: Int64Array) -> UInt32Array:
    """32 bits for each (seed, position, id); the three broadcast against each other, to (N,)."""
    seed, position, token = np.broadcast_arrays(seed_N, position_N, id_N)
    word = _philox(seed, position, token // _WORDS)
    bits: UInt32Array = word[token % _WORDS, np.arange(token.size)]
    return bits


def random_bits_of_row(seed: int, position: int, num_ids: int) -> UInt32Array:
    """The bits of ids 0 .. num_ids - 1 of one row; four times cheaper than asking one by one."""
    block = np.arange(-(-num_ids // _WORDS))
    words = _philox(np.asarray([seed], np.uint64), np.asarray([position], np.int64), block)
    return words.T.reshape(-1)[:num_ids]


def gumbel(bits: UInt32Array) -> Float64Array:
    """Standard Gumbel variates; finite for every input."""
    uniform = (bits + 0.5) * _SCALE
    return np.asarray(-np.log(-np.log(uniform)), np.float64)


def _philox(seed: UInt64Array, position: Int64Array, block: Int64Array) -> UInt32Array:
    high_32 = np.uint64(32)
    seed, place = seed.astype(np.uint64), position.astype(np.uint64)
    counter = np.zeros((4, block.size), np.uint32)
    counter[0] = block
    counter[1] = place.astype(np.uint32)  # casts keep the low word
    counter[2] = (place >> high_32).astype(np.uint32)
    key = np.stack((seed.astype(np.uint32), (seed >> high_32).astype(np.uint32)))
    return philox4x32(counter, key)
