"""Logits to tokens: greedy, temperature, top-k, top-p, log-probabilities.

Works in numpy, one contiguous row at a time where a row is reduced: numpy reduces a row the same way
however many rows there are, so the row rule holds by construction. Filters in this order: temperature,
top-k, then top-p on what top-k left (the smallest set of most likely ids whose probability reaches p).
Ties go to the lower id everywhere.

R rows that sample, V vocabulary ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.sampling.noise import (
    MAX_GUMBEL,
    Float64Array,
    Int64Array,
    gumbel,
    random_bits,
    random_bits_of_row,
)
from loraplex_engine.step import BoolArray, Int32Array

Float32Array = npt.NDArray[np.float32]

# A nucleus is looked for among this many ids first; nearly all are smaller.
_NUCLEUS_GUESS = 1024
# From this share of the vocabulary on, noise for all ids is cheaper than for the kept ones.
_DENSE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer per row."""

    token_ids_R: Int32Array
    is_finite_R: BoolArray  # False: the row's logits held NaN or Inf; its token id is 0
    logprobs: dict[int, TokenLogprobs]  # row -> for rows that asked


def sample(
    logits_RV: Float32Array, params_R: Sequence[SamplingParams], position_R: Sequence[int]
) -> Sampled:
    """Draw one token per row.

    Args:
        logits_RV: rows contiguous.
        position_R: output position of the token drawn (0: the first after the prompt).
    """
    num_rows = len(params_R)
    assert logits_RV.shape[0] == num_rows
    is_finite_R: BoolArray = np.all(np.isfinite(logits_RV), axis=1)
    token_ids_R = logits_RV.argmax(axis=1).astype(np.int32)
    logprobs: dict[int, TokenLogprobs] = {}
    for row, params in enumerate(params_R):
        if not is_finite_R[row]:
            token_ids_R[row] = 0
            continue
        if params.temperature > 0 and params.top_k != 1:
            token_ids_R[row] = _draw(logits_RV[row], params, position_R[row])
        if params.logprobs is not None:
            logprobs[row] = token_logprobs(logits_RV[row], int(token_ids_R[row]), params.logprobs)
    return Sampled(token_ids_R, is_finite_R, logprobs)


def token_logprobs(logits_V: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the unfiltered distribution at temperature 1; `num_top` most likely ids, best first."""
    log_total = _log_sum_exp(logits_V.astype(np.float64))
    top = _most_likely(logits_V, min(num_top, logits_V.size))
    return TokenLogprobs(
        logprob=float(logits_V[token_id] - log_total),
        top_ids=top.tolist(),
        top_logprobs=(logits_V[top] - log_total).tolist(),
    )


def kept_ids(logits_V: Float32Array, params: SamplingParams) -> Int64Array | None:
    """Ids that top-k and top-p leave, most likely first; None: all."""
    size = logits_V.size
    has_top_k = 0 < params.top_k < size
    if not has_top_k and params.top_p >= 1.0:
        return None
    ids = _most_likely(logits_V, params.top_k if has_top_k else min(_NUCLEUS_GUESS, size))
    if params.top_p >= 1.0:
        return ids
    scaled = _scale(logits_V, params.temperature)
    log_total = _log_sum_exp(scaled[ids] if has_top_k else scaled)
    reached = np.cumsum(np.exp(scaled[ids] - log_total))
    if not has_top_k and ids.size < size and reached[-1] < params.top_p:
        ids = _most_likely(logits_V, size)
        reached = np.cumsum(np.exp(scaled[ids] - log_total))
    # An id stays if those before it fall short of p: at least one always does.
    count = 1 + int(np.searchsorted(reached[:-1], params.top_p, side="left"))
    return ids[:count]


def _draw(logits_V: Float32Array, params: SamplingParams, position: int) -> int:
    ids = kept_ids(logits_V, params)
    if ids is None:
        return _draw_from_all(logits_V, params, position)
    # In id order, so that a tie goes to the lower id.
    ids = np.sort(ids)
    seed_1, position_1 = _stream(params, position)
    noise = gumbel(random_bits(seed_1, position_1, ids))
    return int(ids[np.argmax(_scale(logits_V[ids], params.temperature) + noise)])


def _draw_from_all(logits_V: Float32Array, params: SamplingParams, position: int) -> int:
    """Exact without noise for every id: one that cannot win even with the largest noise is skipped."""
    scaled = _scale(logits_V, params.temperature)
    seed_1, position_1 = _stream(params, position)
    best = np.flatnonzero(scaled >= scaled.max() - 1.0)[:64]
    reached = float((scaled[best] + gumbel(random_bits(seed_1, position_1, best))).max())
    is_possible = scaled >= reached - MAX_GUMBEL
    if np.count_nonzero(is_possible) > _DENSE_SHARE * scaled.size:
        bits = random_bits_of_row(params.seed, position, scaled.size)
        return int(np.argmax(scaled + gumbel(bits)))
    ids = np.flatnonzero(is_possible)
    noise = gumbel(random_bits(seed_1, position_1, ids))
    return int(ids[np.argmax(scaled[ids] + noise)])


def _stream(params: SamplingParams, position: int) -> tuple[npt.NDArray[np.uint64], Int64Array]:
    return np.asarray([params.seed], np.uint64), np.asarray([position], np.int64)


def _scale(logits_V: Float32Array, temperature: float) -> Float64Array:
    """Relative to the highest, so that no temperature however small makes an infinity of it."""
    scores = logits_V.astype(np.float64)
    return np.asarray((scores - scores.max()) / temperature, np.float64)


def _log_sum_exp(scores: Float64Array) -> float:
    highest = float(scores.max())
    return highest + float(np.log(np.exp(scores - highest).sum()))


def _most_likely(logits_V: Float32Array, count: int) -> Int64Array:
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
