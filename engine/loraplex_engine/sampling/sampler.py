"""Logits to tokens: greedy, temperature, top-k, top-p, log-probabilities.

Works in numpy, one contiguous row at a time where a row is reduced: numpy reduces a row the same way
however many rows there are, so the row rule holds by construction. Filters in this order: temperature,
top-k, then top-p on what top-k left (the smallest set of most likely ids whose probability reaches p).
Ties go to the lower id everywhere.

A draw is an argmax of scaled logits plus Gumbel noise, and noise is bounded: an id too far below the
best cannot win with any noise, so only the others get some. The draw is exactly that over all ids.

R rows that sample, V vocabulary ids, N candidates over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
)
from loraplex_engine.step import BoolArray, Int32Array

Float32Array = npt.NDArray[np.float32]

# A nucleus is looked for among this many ids first; nearly all are smaller.
_NUCLEUS_GUESS = 1024
# Candidates drawn at once: bounds scratch memory (about 100 bytes each) and keeps it in cache.
_CANDIDATES_AT_ONCE = 1 << 17
# Far more than the rounding of the bound below, far less than would let many more ids through.
_SLACK = 1e-3
# Colder than this, fp32 logits that differ at all differ by more than noise: the same as greedy, without
# overflow in the divisions.
_COLDEST = 1e-7


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
    best_R = logits_RV.argmax(axis=1)
    token_ids_R = np.where(is_finite_R, best_R, 0).astype(np.int32)
    drawn = [
        row
        for row, params in enumerate(params_R)
        if params.temperature > 0 and params.top_k != 1 and is_finite_R[row]
    ]
    if drawn:
        token_ids_R[drawn] = _draw(
            logits_RV,
            best_R[drawn],
            np.asarray(drawn),
            [params_R[row] for row in drawn],
            np.asarray([position_R[row] for row in drawn], np.int64),
        )
    logprobs = {
        row: token_logprobs(logits_RV[row], int(token_ids_R[row]), params.logprobs)
        for row, params in enumerate(params_R)
        if params.logprobs is not None and is_finite_R[row]
    }
    return Sampled(token_ids_R, is_finite_R, logprobs)


def token_logprobs(logits_V: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the unfiltered distribution at temperature 1; `num_top` most likely ids, best first."""
    log_total = float(logits_V.max()) + _log_sum_exp(logits_V)
    top = _most_likely(logits_V, min(num_top, logits_V.size))
    return TokenLogprobs(
        logprob=float(logits_V[token_id]) - log_total,
        top_ids=top.tolist(),
        top_logprobs=(logits_V[top].astype(np.float64) - log_total).tolist(),
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
    log_total = _log_sum_exp(logits_V[ids] if has_top_k else logits_V, _temperature(params))
    reached = _reached(logits_V[ids], _temperature(params), log_total)
    if not has_top_k and ids.size < size and reached[-1] < params.top_p:
        ids = _most_likely(logits_V, size)
        reached = _reached(logits_V[ids], _temperature(params), log_total)
    # An id stays if those before it fall short of p: at least one always does.
    count = 1 + int(np.searchsorted(reached[:-1], params.top_p, side="left"))
    return ids[:count]


def _temperature(params: SamplingParams) -> float:
    return max(params.temperature, _COLDEST)


def _reached(sorted_logits: Float32Array, temperature: float, log_total: float) -> Float64Array:
    """Probability of each id and all before it."""
    scores = sorted_logits.astype(np.float64)
    return np.cumsum(np.exp((scores - scores[0]) / temperature - log_total))


def _draw(
    logits_RV: Float32Array,
    best_D: Int64Array,
    row_D: Int64Array,
    params_D: Sequence[SamplingParams],
    position_D: Int64Array,
) -> Int64Array:
    """One id for each of D drawn rows (`row_D` of the logits), in groups of bounded size."""
    seed_D = np.asarray([params.seed for params in params_D], np.uint64)
    temperature_D = np.asarray([_temperature(params) for params in params_D], np.float64)
    highest_D = logits_RV[row_D, best_D].astype(np.float64)
    # The best id's own score is a floor for the winner's; relative to the highest it is its noise.
    floor_D = gumbel(random_bits(seed_D, position_D, np.arange(len(row_D)), best_D))
    needed_D = highest_D + (floor_D - MAX_GUMBEL - _SLACK) * temperature_D
    token_D = best_D.copy()
    candidates = _candidates(logits_RV, row_D, params_D, needed_D)
    for place_N, id_N in _grouped(candidates):
        noise = gumbel(random_bits(seed_D, position_D, place_N, id_N))
        logit = logits_RV[row_D[place_N], id_N].astype(np.float64)
        # Relative to the highest, so that no temperature however small makes an infinity of it.
        score = (logit - highest_D[place_N]) / temperature_D[place_N] + noise
        starts = np.flatnonzero(np.diff(place_N, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(id_N)], strict=True):
            token_D[place_N[start]] = id_N[start + score[start:stop].argmax()]
    return token_D


def _candidates(
    logits_RV: Float32Array,
    row_D: Int64Array,
    params_D: Sequence[SamplingParams],
    needed_D: Float64Array,
) -> Iterator[Int64Array]:
    """Per drawn row, ascending, the ids that filters leave and noise can lift to the top."""
    for row, params, needed in zip(row_D, params_D, needed_D, strict=True):
        logits_V = logits_RV[row]
        kept = kept_ids(logits_V, params)
        if kept is None:
            yield np.flatnonzero(logits_V >= needed)
        else:
            yield np.sort(kept[logits_V[kept] >= needed])


def _grouped(candidates: Iterator[Int64Array]) -> Iterator[tuple[Int64Array, Int64Array]]:
    """(place, id) pairs of whole rows, about `_CANDIDATES_AT_ONCE` at a time."""
    places: list[Int64Array] = []
    ids: list[Int64Array] = []
    size = 0
    for place, row_ids in enumerate(candidates):
        places.append(np.full(row_ids.size, place, np.int64))
        ids.append(row_ids)
        size += row_ids.size
        if size >= _CANDIDATES_AT_ONCE:
            yield np.concatenate(places), np.concatenate(ids)
            places, ids, size = [], [], 0
    if ids:
        yield np.concatenate(places), np.concatenate(ids)


def _log_sum_exp(logits: Float32Array, temperature: float = 1.0) -> float:
    """Of logits / temperature relative to the highest; fp32 exponentials, fp64 sum."""
    total = np.exp((logits - logits.max()) / np.float32(temperature)).sum(dtype=np.float64)
    return float(np.log(total))


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
