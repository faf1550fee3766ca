"""Logits to tokens: edits, filters, the draw, log-probabilities.

Works in numpy, one contiguous row at a time where a row is reduced: numpy reduces a row the same way
however many rows there are, so the row rule holds by construction. What a row did not ask for is not done
for it: `edits.py` and `filters.py` hold those passes.

A draw is an argmax of scaled logits plus Gumbel noise, and noise is bounded: an id too far below the
best cannot win with any noise, so only the others get some. The draw is exactly that over all ids.

R rows that sample, V vocabulary ids, D rows that draw (the others are greedy), N candidates of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from loraplex_kernels.cpu.gumbel import GumbelSurvivors

from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.sampling.edits import Float32Array, RowRules, edited
from loraplex_engine.sampling.filters import kept_ids, log_sum_exp, most_likely, temperature_of
from loraplex_engine.sampling.noise import (
    MAX_GUMBEL,
    Float64Array,
    Int64Array,
    gumbel,
    random_bits,
)
from loraplex_engine.step import BoolArray, Int32Array, UInt32Array

# Candidates drawn at once: bounds scratch memory (about 100 bytes each) and keeps it in cache.
_CANDIDATES_AT_ONCE = 1 << 17
# With fewer of them numpy is as fast as the native filter.
_MANY_CANDIDATES = 512
# Far more than the rounding of the bound below, far less than would let many more ids through.
_SLACK = 1e-3


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One position to sample. A request with k drafts has k + 1 of them, each with its own history."""

    params: SamplingParams
    position: int  # output position of the token to be drawn (0: the first after the prompt)
    token_ids: Int64Array  # prompt and output before this position; may be a view
    num_prompt_tokens: int
    mask: UInt32Array | None = None  # bit v % 32 of word v // 32 allows id v; None: all
    rules: RowRules | None = None  # of `params`, where the caller keeps them; None: made here


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer per row."""

    token_ids_R: Int32Array
    is_finite_R: BoolArray  # False: the row's logits held NaN or Inf; its token id is 0
    is_stuck_R: BoolArray  # True: masks and bans left no id; its token id is 0
    logprobs: dict[int, TokenLogprobs]  # row -> for rows that asked and have a token


def sample(
    logits_RV: Float32Array, rows_R: Sequence[SampleRow], survivors: GumbelSurvivors | None = None
) -> Sampled:
    """Draw one token per row; `logits_RV` (rows contiguous) is not changed.

    Args:
        survivors: finds the ids that can win faster; the outcome is the same without.
    """
    num_rows = len(rows_R)
    assert logits_RV.shape[0] == num_rows
    is_finite_R: BoolArray = np.all(np.isfinite(logits_RV), axis=1)
    is_stuck_R: BoolArray = np.zeros(num_rows, np.bool_)
    best_R = logits_RV.argmax(axis=1)
    scores_R = list(logits_RV)
    for index, row in enumerate(rows_R):
        rules = RowRules.of(row.params) if row.rules is None else row.rules
        if (rules.is_neutral and row.mask is None) or not is_finite_R[index]:
            continue
        scores_V = edited(logits_RV[index], rules, row.token_ids, row.num_prompt_tokens, row.mask)
        best_R[index] = scores_V.argmax()
        is_stuck_R[index] = np.isneginf(scores_V[best_R[index]])
        scores_R[index] = scores_V
    has_token_R = is_finite_R & ~is_stuck_R
    token_ids_R = np.where(has_token_R, best_R, 0).astype(np.int32)
    drawn = [
        index
        for index, row in enumerate(rows_R)
        if row.params.temperature > 0 and row.params.top_k != 1 and has_token_R[index]
    ]
    if drawn:
        token_ids_R[drawn] = _draw(
            [scores_R[index] for index in drawn],
            best_R[drawn],
            [rows_R[index] for index in drawn],
            survivors,
        )
    logprobs = {
        index: token_logprobs(logits_RV[index], int(token_ids_R[index]), row.params.logprobs)
        for index, row in enumerate(rows_R)
        if row.params.logprobs is not None and has_token_R[index]
    }
    return Sampled(token_ids_R, is_finite_R, is_stuck_R, logprobs)


def token_logprobs(logits_V: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the unfiltered distribution at temperature 1; `num_top` most likely ids, best first."""
    log_total = float(logits_V.max()) + log_sum_exp(logits_V)
    top = most_likely(logits_V, min(num_top, logits_V.size))
    return TokenLogprobs(
        logprob=float(logits_V[token_id]) - log_total,
        top_ids=top.tolist(),
        top_logprobs=(logits_V[top].astype(np.float64) - log_total).tolist(),
    )


def _draw(
    scores_D: Sequence[Float32Array],
    best_D: Int64Array,
    rows_D: Sequence[SampleRow],
    survivors: GumbelSurvivors | None,
) -> Int64Array:
    """One id for each row, in groups of bounded size."""
    seed_D = np.asarray([row.params.seed for row in rows_D], np.uint64)
    position_D = np.asarray([row.position for row in rows_D], np.int64)
    temperature_D = np.asarray([temperature_of(row.params) for row in rows_D], np.float64)
    highest_D = np.asarray(
        [scores_V[best] for scores_V, best in zip(scores_D, best_D, strict=True)], np.float64
    )
    # The best id's own score is a floor for the winner's; relative to the highest it is its noise.
    floor_D = gumbel(random_bits(seed_D, position_D, np.arange(len(rows_D)), best_D))
    token_D = best_D.copy()
    candidates = _candidates(scores_D, rows_D, highest_D, floor_D, survivors)
    for place_N, id_N, logit_N in _grouped(candidates):
        noise = gumbel(random_bits(seed_D, position_D, place_N, id_N))
        # Relative to the highest, so that no temperature however small makes an infinity of it.
        score = (logit_N - highest_D[place_N]) / temperature_D[place_N] + noise
        starts = np.flatnonzero(np.diff(place_N, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], len(id_N)], strict=True):
            token_D[place_N[start]] = id_N[start + score[start:stop].argmax()]
    return token_D


def _candidates(
    scores_D: Sequence[Float32Array],
    rows_D: Sequence[SampleRow],
    highest_D: Float64Array,
    floor_D: Float64Array,
    survivors: GumbelSurvivors | None,
) -> Iterator[tuple[Int64Array, Float64Array]]:
    """Per row, ascending, the ids that filters leave and noise can lift to the top; their logits."""
    for scores_V, row, highest, floor in zip(scores_D, rows_D, highest_D, floor_D, strict=True):
        temperature = temperature_of(row.params)
        needed = highest + (floor - MAX_GUMBEL - _SLACK) * temperature
        kept = kept_ids(scores_V, row.params)
        if kept is None:
            ids = np.flatnonzero(scores_V >= needed)
        else:
            ids = np.sort(kept[scores_V[kept] >= needed])
        if survivors is not None and ids.size > _MANY_CANDIDATES:
            possible_V = scores_V
            if kept is not None:
                possible_V = np.full_like(scores_V, -np.inf)
                possible_V[ids] = scores_V[ids]
            found = survivors(
                possible_V,
                highest=float(highest),
                temperature=temperature,
                seed=row.params.seed,
                position=row.position,
                floor=float(floor),
            )
            ids = ids if found is None else found
        yield ids, scores_V[ids].astype(np.float64)


def _grouped(
    candidates: Iterator[tuple[Int64Array, Float64Array]],
) -> Iterator[tuple[Int64Array, Int64Array, Float64Array]]:
    """(place, id, logit) of whole rows, about `_CANDIDATES_AT_ONCE` at a time."""
    places: list[Int64Array] = []
    ids: list[Int64Array] = []
    logits: list[Float64Array] = []
    size = 0
    for place, (row_ids, row_logits) in enumerate(candidates):
        places.append(np.full(row_ids.size, place, np.int64))
        ids.append(row_ids)
        logits.append(row_logits)
        size += row_ids.size
        if size >= _CANDIDATES_AT_ONCE:
            yield np.concatenate(places), np.concatenate(ids), np.concatenate(logits)
            places, ids, logits, size = [], [], [], 0
    if ids:
        yield np.concatenate(places), np.concatenate(ids), np.concatenate(logits)
