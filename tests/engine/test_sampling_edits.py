"""Penalties, biases and bans: equal to transformers and to OpenAI's formula, and free when not asked for."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling import edits, filters, sampler
from loraplex_engine.sampling.edits import RowRules, edited, unpacked
from loraplex_engine.sampling.filters import kept_ids
from loraplex_engine.sampling.sampler import SampleRow, sample
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCAB = 503
EOS = 7
_INF = float("inf")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "temperature": 0.0} | fields)


def logits_of(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(vocab) * scale).astype(np.float32)


def history_of(seed: int, length: int, vocab: int = VOCAB) -> np.ndarray:
    """Tokens of a small set, so that many occur several times."""
    generator = np.random.default_rng(seed + 1_000)
    return generator.choice(generator.integers(0, vocab, 40), length).astype(np.int64)


def edit(
    logits: np.ndarray,
    row_params: SamplingParams,
    history: np.ndarray,
    num_prompt: int,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    return edited(logits, RowRules.of(row_params, (EOS,)), history, num_prompt, mask)


def theirs(processor: Any, logits: np.ndarray, history: np.ndarray) -> np.ndarray:
    """What one of transformers' processors makes of a row."""
    ids = torch.from_numpy(history)[None]
    return np.asarray(processor(ids, torch.from_numpy(logits.copy())[None])[0])


def mask_of(allowed: set[int], vocab: int = VOCAB) -> np.ndarray:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for id_ in allowed:
        words[id_ // 32] |= np.uint32(1 << (id_ % 32))
    return words


# ---------------------------------------------------------------------------- transformers as the oracle


@pytest.mark.parametrize("penalty", [0.7, 1.0001, 1.3, 5.0])
@pytest.mark.parametrize("length", [1, 60, 2_000])
def test_repetition_penalty_equals_transformers(penalty: float, length: int) -> None:
    logits, history = logits_of(length), history_of(length, length)

    ours = edit(logits, params(repetition_penalty=penalty), history, num_prompt=1)

    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits, history)
    assert ours.tobytes() == expected.tobytes()


def test_bad_words_equal_transformers() -> None:
    history = history_of(3, 40)
    words = [
        [5],
        [int(history[-1]), 11],  # begun by the last token
        [int(history[-3]), int(history[-2]), int(history[-1]), 12],
        [(int(history[-1]) + 1) % VOCAB, 13],  # not begun
        [int(history[-2]), 14],  # begun one token ago
        [*(int(t) for t in history[-31:]), 15],
    ]
    logits = logits_of(3)

    ours = edit(logits, params(bad_words_token_ids=tuple(map(tuple, words))), history, 20)

    expected = theirs(NoBadWordsLogitsProcessor(words, eos_token_id=None), logits, history)
    assert np.flatnonzero(np.isneginf(ours)).tolist() == [5, 11, 12, 15]
    assert ours.tobytes() == expected.tobytes()


def test_a_bad_word_longer_than_the_history_is_no_error() -> None:
    logits = logits_of(0)

    ours = edit(
        logits, params(bad_words_token_ids=((1, 2, 3, 4), (9, 2))), np.asarray([9]), num_prompt=1
    )

    assert np.flatnonzero(np.isneginf(ours)).tolist() == [2]


@pytest.mark.parametrize(("num_output", "is_banned"), [(0, True), (4, True), (5, False)])
def test_min_tokens_equals_transformers(num_output: int, is_banned: bool) -> None:
    logits, history = logits_of(1), history_of(1, 8 + num_output)
    stops = [EOS, 30]

    ours = edit(logits, params(min_tokens=5, stop_token_ids=(30,)), history, num_prompt=8)

    expected = theirs(MinNewTokensLengthLogitsProcessor(8, 5, stops), logits, history)
    assert bool(np.isneginf(ours[stops]).all()) is is_banned
    assert ours.tobytes() == expected.tobytes()


def test_min_tokens_does_not_ban_an_end_token_that_ends_nothing() -> None:
    ours = edit(logits_of(1), params(min_tokens=5, ignore_eos=True), np.asarray([1]), num_prompt=1)

    assert np.isfinite(ours).all()


def test_logit_bias_equals_transformers() -> None:
    logits = logits_of(2)
    biases = {3: -100.0, 4: 100.0, 5: 0.25, VOCAB - 1: 1e-3}

    ours = edit(logits, params(logit_bias=biases), np.asarray([1]), num_prompt=1)

    processor = SequenceBiasLogitsProcessor({(id_,): bias for id_, bias in biases.items()})
    assert ours.tobytes() == theirs(processor, logits, np.asarray([1])).tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 60, "top_p": 0.8},
        {"top_k": 60, "min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.02},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.03},
    ],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.8])
def test_the_kept_set_equals_transformers(fields: dict[str, Any], temperature: float) -> None:
    for seed in range(20):
        logits = logits_of(seed)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if "top_k" in fields:
            warpers.append(TopKLogitsWarper(fields["top_k"]))
        if "top_p" in fields:
            warpers.append(TopPLogitsWarper(fields["top_p"]))
        if "min_p" in fields:
            warpers.append(MinPLogitsWarper(fields["min_p"]))

        ours = kept_ids(logits, params(temperature=temperature, **fields))

        assert ours is not None
        # In fp64: theirs is a chain of softmaxes and sums whose rounding could move the border.
        expected = warpers(
            torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None].double()
        )
        assert sorted(ours.tolist()) == torch.isfinite(expected[0]).nonzero()[:, 0].tolist()


# ---------------------------------------------------------------------------- OpenAI's formula


@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
)
@settings(max_examples=60, deadline=None)
def test_presence_and_frequency_follow_the_documented_formula(
    output: list[int], presence: float, frequency: float
) -> None:
    logits = logits_of(5, vocab=40)
    prompt = [1, 1, 2, 39]  # what is in the prompt alone is not penalised

    ours = edit(
        logits,
        params(presence_penalty=presence, frequency_penalty=frequency),
        np.asarray(prompt + output, np.int64),
        len(prompt),
    )

    for id_ in range(40):
        count = output.count(id_)
        expected = float(logits[id_]) - count * frequency - (count > 0) * presence
        assert ours[id_] == pytest.approx(expected, abs=2e-5)
        if not count:
            assert ours[id_] == logits[id_]


# ---------------------------------------------------------------------------- bans


def test_allowed_ids_and_mask_both_hold() -> None:
    logits = logits_of(4)
    everything = params(allowed_token_ids=(5, 6, 7, 8), bad_words_token_ids=((6,),))

    ours = edit(logits, everything, np.asarray([1]), 1, mask_of({1, 2, 6, 7, 8}))

    assert np.flatnonzero(np.isfinite(ours)).tolist() == [7, 8]
    assert ours[[7, 8]].tolist() == logits[[7, 8]].tolist()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 503])
def test_mask_bits_are_where_the_step_says(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    allowed = {int(i) for i in np.flatnonzero(generator.random(vocab) < 0.5)}

    bits = unpacked(mask_of(allowed, vocab), vocab)

    assert set(np.flatnonzero(bits).tolist()) == allowed


def test_a_row_without_any_id_left_is_stuck_and_harms_no_other() -> None:
    logits = np.stack([logits_of(i) for i in range(4)])
    nothing = mask_of(set())
    rows = [
        SampleRow(params(), 0, np.asarray([1]), 1),
        SampleRow(params(logprobs=3), 0, np.asarray([1]), 1, nothing),
        SampleRow(
            params(temperature=1.0, allowed_token_ids=(3,), bad_words_token_ids=((3,),)),
            0,
            np.asarray([1]),
            1,
        ),
        SampleRow(params(temperature=1.0, seed=4), 0, np.asarray([1]), 1),
    ]
    before = logits.copy()

    together = sample(logits, rows)

    assert together.is_stuck_R.tolist() == [False, True, True, False]
    assert together.is_finite_R.all()
    assert together.token_ids_R[[1, 2]].tolist() == [0, 0]
    assert together.logprobs == {}
    for index in (0, 3):
        alone = sample(logits[index : index + 1], [rows[index]])
        assert alone.token_ids_R[0] == together.token_ids_R[index]
    assert logits.tobytes() == before.tobytes()


def test_a_row_that_is_not_a_number_is_not_called_stuck() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)

    result = sample(logits, [SampleRow(params(), 0, np.asarray([1]), 1, mask_of({1}))])

    assert (result.is_finite_R[0], result.is_stuck_R[0]) == (False, False)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 5e-324])
@pytest.mark.parametrize("filters_", [{}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 1e-6}])
def test_a_banned_id_is_never_drawn(temperature: float, filters_: dict[str, float]) -> None:
    logits = logits_of(9, scale=0.1)
    allowed = {4, 9, 200}
    rows = [
        SampleRow(
            params(temperature=temperature, seed=seed, **filters_),
            0,
            np.asarray([1]),
            1,
            mask_of(allowed),
        )
        for seed in range(200)
    ]

    tokens = sample(np.broadcast_to(logits, (200, VOCAB)), rows).token_ids_R.tolist()

    assert set(tokens) <= allowed
    if temperature == 0.7:
        assert set(tokens) == allowed


def test_logprobs_are_of_the_raw_distribution_whatever_is_edited() -> None:
    logits = logits_of(11)[None]
    best = int(logits[0].argmax())
    plain = sample(logits, [SampleRow(params(logprobs=4), 0, np.asarray([1]), 1)]).logprobs[0]

    shaped = sample(
        logits,
        [
            SampleRow(
                params(
                    temperature=0.5,
                    top_k=1,
                    logprobs=4,
                    logit_bias={best: -100.0},
                    repetition_penalty=1.7,
                    bad_words_token_ids=((3,),),
                ),
                0,
                np.asarray([1]),
                1,
            )
        ],
    )

    token = int(shaped.token_ids_R[0])
    assert token != best
    assert shaped.logprobs[0].top_ids == plain.top_ids
    assert shaped.logprobs[0].top_logprobs == plain.top_logprobs
    expected = torch.log_softmax(torch.from_numpy(logits[0]).double(), -1)[token]
    assert shaped.logprobs[0].logprob == pytest.approx(float(expected), abs=1e-6)


# ---------------------------------------------------------------------------- extremes


def test_edits_of_the_largest_logits_stay_finite() -> None:
    largest = np.finfo(np.float32).max
    logits = np.asarray([largest, -largest, largest, -largest, 0.0, 1.0], np.float32)
    history = np.arange(6)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fields in (
            {"repetition_penalty": 0.01},
            {"repetition_penalty": 100.0},
            {"frequency_penalty": -2.0, "presence_penalty": -2.0},
            {"logit_bias": {0: 100.0, 1: -100.0}},
        ):
            ours = edit(logits, params(**fields), history, num_prompt=0)
            assert np.isfinite(ours).all()
            row = SampleRow(
                params(temperature=1e-9, top_p=0.5, logprobs=2, **fields), 6, history, 0
            )
            result = sample(logits[None], [row])
            assert np.isfinite(result.logprobs[0].logprob)


# ---------------------------------------------------------------------------- the row rule

_EVERYTHING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"repetition_penalty": 1.2, "temperature": 0.8, "seed": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3, "temperature": 0.9, "seed": 3},
    {"logit_bias": {1: 5.0, 2: -5.0}, "min_p": 0.1, "temperature": 1.1, "seed": 4},
    {"min_tokens": 9, "stop_token_ids": (3,), "temperature": 1.0, "seed": 5, "logprobs": 5},
    {"bad_words_token_ids": ((4,), (5, 6)), "top_k": 20, "temperature": 1.0, "seed": 6},
    {"allowed_token_ids": tuple(range(0, VOCAB, 3)), "top_p": 0.8, "temperature": 1.0, "seed": 7},
    {"repetition_penalty": 1.3, "logprobs": 20},
]


def test_a_row_with_rules_is_the_same_whatever_its_neighbours() -> None:
    count = len(_EVERYTHING)
    logits = np.stack([logits_of(i) for i in range(count)])
    rows = [
        SampleRow(
            params(**fields),
            4 + index,
            history_of(index, 14 + index),
            10,
            mask_of(set(range(VOCAB // 2))) if index % 3 == 0 else None,
        )
        for index, fields in enumerate(_EVERYTHING)
    ]
    together = sample(logits, rows)

    for order in (list(reversed(range(count))), [5, 0, 8, 2]):
        part = sample(logits[order], [rows[index] for index in order])
        assert part.token_ids_R.tolist() == together.token_ids_R[order].tolist()
    for index in range(count):
        alone = sample(logits[index : index + 1], [rows[index]])
        assert alone.token_ids_R[0] == together.token_ids_R[index]
        assert alone.logprobs.get(0) == together.logprobs.get(index)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_row_draws_the_same_beside_any_other(data: st.DataObject) -> None:
    fields = st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.4, 1.0, 1.9]), "seed": st.integers(0, 2**64 - 1)},
        optional={
            "top_k": st.integers(0, 600),
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.0, 1.0),
            "repetition_penalty": st.floats(0.01, 100.0),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "min_tokens": st.integers(0, 9),
            "logit_bias": st.dictionaries(
                st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=9
            ),
            "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=9).map(tuple),
            "logprobs": st.integers(0, 20),
        },
    )
    mine, other = (params(**data.draw(fields)) for _ in range(2))
    rows = [SampleRow(p, 6, history_of(i, 12), 6) for i, p in enumerate((mine, other))]
    logits = np.stack([logits_of(1), logits_of(2, scale=50.0)])

    together = sample(logits[:2], rows[:2])
    alone = sample(logits[:1], rows[:1])

    assert together.token_ids_R[0] == alone.token_ids_R[0]
    assert together.is_stuck_R[0] == alone.is_stuck_R[0]
    assert together.logprobs.get(0) == alone.logprobs.get(0)


# ---------------------------------------------------------------------------- what nobody asked for


def test_rows_that_ask_for_nothing_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass is entered and no row copied for rows without rules, beside one that has them all."""
    entered: list[str] = []

    def spy(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            entered.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    passes = [
        "_penalise_repetition",
        "_penalise_output",
        "_add_biases",
        "_keep_only",
        "_ban_ends",
        "_keep_masked",
    ]
    for name in passes:
        spy(edits, name)
    for name in ("edited", "token_logprobs"):
        spy(sampler, name)
    for name in ("most_likely", "log_sum_exp"):
        spy(filters, name)
    history = history_of(0, 12)
    plain = [
        SampleRow(params(temperature=t, seed=1), 2, history, 10, rules=RowRules.of(params()))
        for t in (0.0, 1.0)
    ] * 8
    logits = np.stack([logits_of(i) for i in range(17)])

    sample(logits[:16], plain)
    assert entered == []

    asking = params(
        temperature=1.0,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        logit_bias={1: 1.0},
        allowed_token_ids=(1, 2, 3),
        bad_words_token_ids=((8, 9),),
        logprobs=1,
    )
    row = SampleRow(asking, 2, history, 10, mask_of({1, 2}))
    sample(logits, [*plain, row])
    assert sorted(set(entered)) == sorted({*passes, "edited", "token_logprobs"})
    assert all(entered.count(name) == 1 for name in (*passes, "edited"))


def test_neutral_parameters_make_neutral_rules() -> None:
    assert RowRules.of(params(min_tokens=3, ignore_eos=True)).is_neutral
    assert RowRules.of(params(stop_token_ids=(1, 2))).is_neutral
    assert not RowRules.of(params(min_tokens=3), (EOS,)).is_neutral
