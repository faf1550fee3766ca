"""What a request's parameters do to its logits before the draw: penalties, biases, bans.

Each function works on one row of V vocabulary ids and only for a row that asks: a row without rules is
never copied. Nothing is kept between steps: penalties are taken from the row's own history anew each time,
in time that grows with the history and not with the vocabulary, so drafts and preemption need no care.

Arithmetic comes first and bans last. A ban is minus infinity, which no penalty or bias moves, so this is
the order that `SamplingParams` documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.noise import Int64Array
from loraplex_engine.step import BoolArray, UInt32Array

Float32Array = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)
_NO_IDS: Int64Array = np.empty(0, np.int64)
_NO_BIASES: Float32Array = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class BannedEnds:
    """Bad words of one length L > 1: where the last L - 1 tokens are `begin_NL[i]`, `end_N[i]` is banned."""

    begin_NL: Int64Array
    end_N: Int64Array


@dataclass(frozen=True, slots=True)
class RowRules:
    """The parts of `SamplingParams` that edit logits, as arrays: made once per request."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: Int64Array = field(default_factory=lambda: _NO_IDS)
    biases: Float32Array = field(default_factory=lambda: _NO_BIASES)
    allowed_ids: Int64Array | None = None  # None: all
    banned_ids: Int64Array = field(default_factory=lambda: _NO_IDS)  # bad words of one token
    banned_ends: tuple[BannedEnds, ...] = ()
    stop_ids: Int64Array = field(default_factory=lambda: _NO_IDS)  # banned below min_tokens
    min_tokens: int = 0
    is_neutral: bool = True  # nothing here ever edits

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Iterable[int] = ()) -> RowRules:
        """Rules of a request; `eos_token_ids`: the model's, which end it unless it ignores them."""
        stop_ids = set(params.stop_token_ids) if params.min_tokens else set()
        if params.min_tokens and not params.ignore_eos:
            stop_ids.update(eos_token_ids)
        words = [np.asarray(word, np.int64) for word in params.bad_words_token_ids]
        rules = cls(
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_ids=np.asarray(list(params.logit_bias), np.int64),
            biases=np.asarray(list(params.logit_bias.values()), np.float32),
            allowed_ids=np.asarray(params.allowed_token_ids, np.int64)
            if params.allowed_token_ids
            else None,
            banned_ids=np.asarray([word[0] for word in words if word.size == 1], np.int64),
            banned_ends=_banned_ends(words),
            stop_ids=np.asarray(sorted(stop_ids), np.int64),
            min_tokens=params.min_tokens,
            is_neutral=False,
        )
        return rules if rules._edits() else cls()

    def _edits(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.bias_ids.size > 0
            or self.allowed_ids is not None
            or self.banned_ids.size > 0
            or bool(self.banned_ends)
            or self.stop_ids.size > 0
        )


NEUTRAL = RowRules()


def edited(
    logits_V: Float32Array,
    rules: RowRules,
    token_ids: Int64Array,
    num_prompt_tokens: int,
    mask: UInt32Array | None,
) -> Float32Array:
    """A copy of finite `logits_V` with every rule applied; banned ids are minus infinity.

    Args:
        token_ids: the row's history: its prompt, then its output so far.
        mask: bit v % 32 of word v // 32 allows id v; None: all are allowed.
    """
    scores_V = logits_V.copy()
    output_ids = token_ids[num_prompt_tokens:]
    if rules.repetition_penalty != 1.0:
        _penalise_repetition(scores_V, token_ids, rules.repetition_penalty)
    if (rules.presence_penalty or rules.frequency_penalty) and output_ids.size:
        _penalise_output(scores_V, output_ids, rules.presence_penalty, rules.frequency_penalty)
    if rules.bias_ids.size:
        _add_biases(scores_V, rules.bias_ids, rules.biases)
    if rules.allowed_ids is not None:
        _keep_only(scores_V, rules.allowed_ids)
    if rules.banned_ids.size:
        scores_V[rules.banned_ids] = -np.inf
    for ends in rules.banned_ends:
        _ban_ends(scores_V, ends, token_ids)
    if rules.stop_ids.size and output_ids.size < rules.min_tokens:
        scores_V[rules.stop_ids] = -np.inf
    if mask is not None:
        _keep_masked(scores_V, mask)
    return scores_V


# In the three below an id that occurs twice is computed twice to the same value, which is cheaper than
# finding it out.


def _penalise_repetition(scores_V: Float32Array, ids: Int64Array, penalty: float) -> None:
    values = scores_V[ids]
    with np.errstate(over="ignore"):
        values = np.where(values < 0, values * penalty, values / penalty)
    scores_V[ids] = _bounded(values)


def _penalise_output(
    scores_V: Float32Array, ids: Int64Array, presence: float, frequency: float
) -> None:
    """mu[v] - count[v] * frequency - (count[v] > 0) * presence, as OpenAI documents it."""
    if frequency:
        ids, counts = np.unique(ids, return_counts=True)
        values = scores_V[ids] - counts.astype(np.float32) * np.float32(frequency)
    else:
        values = scores_V[ids]
    scores_V[ids] = _bounded(values - np.float32(presence))


def _add_biases(scores_V: Float32Array, ids: Int64Array, biases: Float32Array) -> None:
    scores_V[ids] = _bounded(scores_V[ids] + biases)


def _bounded(values: Float32Array) -> Float32Array:
    """Finite logits stay finite whatever was done to them: only a ban is infinite."""
    return np.clip(values, -_LARGEST, _LARGEST)


def _keep_only(scores_V: Float32Array, ids: Int64Array) -> None:
    kept = scores_V[ids]
    scores_V.fill(-np.inf)
    scores_V[ids] = kept


def _ban_ends(scores_V: Float32Array, ends: BannedEnds, token_ids: Int64Array) -> None:
    length = ends.begin_NL.shape[1]
    if token_ids.size >= length:
        is_begun_N = np.all(ends.begin_NL == token_ids[-length:], axis=1)
        scores_V[ends.end_N[is_begun_N]] = -np.inf


def _keep_masked(scores_V: Float32Array, mask: UInt32Array) -> None:
    assert mask.size * 32 >= scores_V.size, "the mask is shorter than the vocabulary"
    scores_V[~unpacked(mask, scores_V.size)] = -np.inf


def unpacked(mask: UInt32Array, size: int) -> BoolArray:
    """The first `size` bits of a mask, lowest bit of each word first."""
    octets = np.ascontiguousarray(mask, dtype="<u4").view(np.uint8)
    return np.unpackbits(octets, count=size, bitorder="little").view(np.bool_)


def _banned_ends(words: list[Int64Array]) -> tuple[BannedEnds, ...]:
    by_length: dict[int, list[Int64Array]] = {}
    for word in words:
        if word.size > 1:
            by_length.setdefault(word.size, []).append(word)
    return tuple(
        BannedEnds(begin_NL=np.stack(same)[:, :-1], end_N=np.stack(same)[:, -1])
        for _, same in sorted(by_length.items())
    )
