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
from loraplex_kernels.cpu.scan import Best

from loraplex_engine.protocol import TokenLogprobs
from loraplex_engine.sampling.edits import Float32Array, RowRules, edited
from loraplex_engine.sampling.filters import kept_ids, log_sum_exp, most_likely, temperature_of
from loraplex_engine.sampling.noise import (
    MAX_GUMBEL,
    Float64Array,
    Int64Array,
    gumbel,
    random_bits,
)
from loraplex_engine.sampling.rows import SampleBatch, SampleRow
from loraplex_engine.step import BoolArray, Int32Array

__all__ = ["SampleRow", "Sampled", "sample", "take_best", "token_logprobs"]

# Candidates drawn at once: bounds scratch memory (about 100 bytes each) and keeps it in cache.
_CANDIDATES_AT_ONCE = 1 << 17
# With fewer of them numpy is as fast as the native filter.
_MANY_CANDIDATES = 512
# Far more than the rounding of the bound below, far less than would let many more ids through.
_SLACK = 1e-3


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer per row."""

    token_ids_R: Int32Array
    is_finite_R: BoolArray  # False: the row's logits held NaN or Inf; its token id is 0
    is_stuck_R: BoolArray  # True: masks and bans left no id; its token id is 0
    logprobs: dict[int, TokenLogprobs]  # row -> for rows that asked and have a token


def sample(
    logits_RV: Float32Array,
    rows_R: Sequence[SampleRow],
    survivors: GumbelSurvivors | None = None,
    best: Best | None = None,
) -> Sampled:
    """Draw one token per row; `logits_RV` (rows contiguous) is not changed.

    Args:
        survivors: finds the ids that can win faster; the outcome is the same without.
        best: of these logits, where somebody has looked already.
    """
    batch = SampleBatch.of(rows_R)
    num_rows = len(batch)
    assert logits_RV.shape[0] == num_rows
    if best is None:
        best = Best(logits_RV.argmax(axis=1), np.all(np.isfinite(logits_RV), axis=1))
    sampled = take_best(best)
    # All that is left to do is for rows that ask for more than their best id.
    asking = np.flatnonzero(best.is_finite_R & ~batch.is_easy_R)
    if asking.size:
        _sample_asking(logits_RV, batch, asking, best.id_R, sampled, survivors)
    return sampled


def take_best(best: Best) -> Sampled:
    """The answer where every row takes the best id of its logits as they are."""
    return Sampled(
        np.where(best.is_finite_R, best.id_R, 0).astype(np.int32),
        best.is_finite_R.copy(),
        np.zeros(len(best.id_R), np.bool_),
        {},
    )


def _sample_asking(
    logits_RV: Float32Array,
    batch: SampleBatch,
    asking: Int64Array,
    best_R: Int64Array,
    sampled: Sampled,
    survivors: GumbelSurvivors | None,
) -> None:
    """Sample the rows `asking`, whose logits are finite, into `sampled`."""
    drawn: list[SampleRow] = []
    drawn_index: list[int] = []
    drawn_scores: list[Float32Array] = []
    drawn_best: list[int] = []
    reported: list[tuple[int, int]] = []  # with log-probabilities: row, how many
    for index in asking.tolist():
        row = batch[index]
        if row.params.forced_token_ids:
            sampled.token_ids_R[index] = row.params.forced_token_ids[row.position]
            if row.params.logprobs is not None:
                reported.append((index, row.params.logprobs))
            continue
        scores_V, best = logits_RV[index], int(best_R[index])
        rules = RowRules.of(row.params) if row.rules is None else row.rules
        if not rules.is_neutral or row.mask is not None:
            scores_V = edited(scores_V, rules, row.token_ids, row.num_prompt_tokens, row.mask)
            best = int(scores_V.argmax())
            if np.isneginf(scores_V[best]):
                sampled.is_stuck_R[index] = True
                sampled.token_ids_R[index] = 0
                continue
            sampled.token_ids_R[index] = best
        if not batch.is_greedy_R[index]:
            drawn.append(row)
            drawn_index.append(index)
            drawn_scores.append(scores_V)
            drawn_best.append(best)
        if row.params.logprobs is not None:
            reported.append((index, row.params.logprobs))
    if drawn:
        sampled.token_ids_R[drawn_index] = _draw(
            drawn_scores, np.asarray(drawn_best, np.int64), drawn, survivors
        )
    for index, num_top in reported:
        sampled.logprobs[index] = token_logprobs(
            logits_RV[index], int(sampled.token_ids_R[index]), num_top
        )


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
        cut = None if survivors is None else survivors.cut
        kept = kept_ids(scores_V, row.params, cut)
        ids = None
        if survivors is not None and (kept is None or kept.size > _MANY_CANDIDATES):
            possible_V = scores_V
            if kept is not None:
                possible_V = np.full_like(scores_V, -np.inf)
                possible_V[kept] = scores_V[kept]
            ids = survivors(
                possible_V,
                highest=float(highest),
                temperature=temperature,
                seed=row.params.seed,
                position=row.position,
                floor=float(floor),
            )
        if ids is None:
            needed = highest + (floor - MAX_GUMBEL - _SLACK) * temperature
            if kept is None:
                ids = np.flatnonzero(scores_V >= needed)
            else:
                ids = np.sort(kept[scores_V[kept] >= needed])
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
