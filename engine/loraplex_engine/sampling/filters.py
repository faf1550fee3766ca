"""Which ids a row may draw from: top-k, then top-p on what top-k left, then min-p.

Each row is reduced on its own, in numpy, which reduces a row the same way however many rows there are. Ties
go to the lower id everywhere. Banned ids are minus infinity and are never kept before one that is not.
"""

from __future__ import annotations

import math

import numpy as np
from loraplex_kernels.cpu.cut import LikelyCut

from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.edits import Float32Array
from loraplex_engine.sampling.noise import Float64Array, Int64Array

# A nucleus is looked for among this many ids first; nearly all are smaller.
_NUCLEUS_GUESS = 1024
_NUCLEUS_GROWTH = 4  # then among so many times as many
# Colder than this, fp32 logits that differ at all differ by more than noise: the same as greedy, without
# overflow in the divisions.
_COLDEST = 1e-7


def temperature_of(params: SamplingParams) -> float:
    """The temperature to divide by."""
    return max(params.temperature, _COLDEST)


def kept_ids(
    logits_V: Float32Array, params: SamplingParams, cut: LikelyCut | None = None
) -> Int64Array | None:
    """Ids that the filters leave; None: all.

    Args:
        cut: finds them faster; they are the same without.
    """
    ids = _nucleus(logits_V, params, cut)
    if params.min_p <= 0.0:
        return ids
    # A ratio of probabilities is a difference of logits: nothing needs to be normalised.
    lowest = float(logits_V.max()) + math.log(params.min_p) * temperature_of(params)
    if ids is None:
        return np.flatnonzero(logits_V.astype(np.float64) >= lowest)
    return ids[logits_V[ids].astype(np.float64) >= lowest]


def _nucleus(
    logits_V: Float32Array, params: SamplingParams, cut: LikelyCut | None
) -> Int64Array | None:
    """What top-k and top-p leave, most likely first; None: all."""
    size = logits_V.size
    has_top_k = 0 < params.top_k < size
    if not has_top_k and params.top_p >= 1.0:
        return None
    if cut is not None:
        found = cut(
            logits_V,
            highest=float(logits_V.max()),
            temperature=temperature_of(params),
            top_k=params.top_k if has_top_k else 0,
            top_p=params.top_p,
        )
        if found is not None:
            return found
    ids = most_likely(logits_V, params.top_k if has_top_k else min(_NUCLEUS_GUESS, size))
    if params.top_p >= 1.0:
        return ids
    temperature = temperature_of(params)
    log_total = log_sum_exp(logits_V[ids] if has_top_k else logits_V, temperature)
    reached = _reached(logits_V[ids], temperature, log_total)
    while not has_top_k and ids.size < size and reached[-1] < params.top_p:
        ids = most_likely(logits_V, min(ids.size * _NUCLEUS_GROWTH, size))
        reached = _reached(logits_V[ids], temperature, log_total)
    # An id stays if those before it fall short of p: at least one always does.
    count = 1 + int(np.searchsorted(reached[:-1], params.top_p, side="left"))
    return ids[:count]


def _reached(sorted_logits: Float32Array, temperature: float, log_total: float) -> Float64Array:
    """Probability of each id and all before it."""
    scores = sorted_logits.astype(np.float64)
    return np.cumsum(np.exp((scores - scores[0]) / temperature - log_total))


def log_sum_exp(logits: Float32Array, temperature: float = 1.0) -> float:
    """Of logits / temperature relative to the highest; fp32 exponentials, fp64 sum."""
    with np.errstate(over="ignore"):  # minus infinity is the right rounding of so far below
        scaled = (logits - logits.max()) / np.float32(temperature)
    return float(np.log(np.exp(scaled).sum(dtype=np.float64)))


def most_likely(logits_V: Float32Array, count: int) -> Int64Array:
    """The `count` highest, best first, ties by id: the result does not depend on partition order."""
    if count == 0:
        return np.empty(0, np.int64)
    size = logits_V.size
    threshold = np.partition(logits_V, size - count)[size - count]
    above = np.flatnonzero(logits_V > threshold)
    equal = np.flatnonzero(logits_V == threshold)[: count - above.size]
    ids = np.concatenate((above, equal))
    # Stable on ascending ids: `above` and `equal` each are, and no value is in both.
    return ids[np.argsort(-logits_V[ids], kind="stable")]
