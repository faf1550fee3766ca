"""Drafts before any engine: what n-grams propose, what is learnt from failures, what is worth its cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from loraplex_engine.config import EngineConfig, Speculative
from loraplex_engine.errors import ConfigError
from loraplex_engine.protocol import Grammar, SamplingParams
from loraplex_engine.request import Request
from loraplex_engine.speculative import Ask, Drafter, DraftWant, make_drafter
from loraplex_engine.speculative.acceptance import Acceptance
from loraplex_engine.speculative.costs import StepCosts
from loraplex_engine.speculative.ngram import NgramProposer, continuation_start

from tests.support.engine_fakes import make_request


def propose(token_ids: Sequence[int], max_drafts: int, min_n: int = 2, max_n: int = 4) -> list[int]:
    (drafts,) = NgramProposer(min_n, max_n).propose([Ask(0, token_ids, max_drafts)])
    return list(drafts)


# ------------------------------------------------------------------ n-grams


def test_what_followed_the_repeated_suffix_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2, 3], max_drafts=2) == [4, 5]


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    #       the suffix 7 1 2 3 was followed by 8, the later 1 2 3 by 5
    tokens = [7, 1, 2, 3, 8, 0, 1, 2, 3, 5, 0, 7, 1, 2, 3]

    assert propose(tokens, 1) == [8]
    assert propose(tokens, 1, max_n=3) == [5]


def test_of_equally_long_ones_the_latest_wins() -> None:
    assert propose([1, 2, 5, 0, 1, 2, 6, 0, 1, 2], 1) == [6]


@pytest.mark.parametrize(
    ("token_ids", "min_n"),
    [([1], 1), ([1, 2], 2), ([1, 2, 3], 1), ([1, 2, 9, 2], 2), ([5, 5], 2), ([1, 2, 1], 2)],
)
def test_without_a_repetition_of_min_n_tokens_nothing_is_proposed(
    token_ids: list[int], min_n: int
) -> None:
    assert propose(token_ids, 4, min_n=min_n) == []


def test_a_cycle_goes_on_beyond_what_is_known() -> None:
    assert propose([1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert propose([4, 4, 4], 3) == [4, 4, 4]


def test_a_growing_row_is_answered_as_if_it_had_been_whole() -> None:
    draw = random.Random(3)
    tokens = draw.choices(range(4), k=700)
    proposer = NgramProposer(2, 5)
    known: list[int] = []
    while len(known) < len(tokens):
        known += tokens[len(known) : len(known) + draw.randrange(1, 9)]

        assert list(proposer.propose([Ask(7, known, 5)])[0]) == propose(known, 5, 2, 5)


def test_rows_do_not_see_each_other_and_a_key_can_be_used_again_once_forgotten() -> None:
    proposer = NgramProposer(2, 4)
    first, second = proposer.propose([Ask(0, [1, 2, 3, 1, 2], 1), Ask(1, [1, 2, 9, 1, 2], 1)])
    assert (list(first), list(second)) == ([3], [9])

    proposer.forget(0)
    proposer.forget(5)

    assert list(proposer.propose([Ask(0, [8, 8, 7, 8, 8], 1)])[0]) == [7]


def test_the_search_is_the_obvious_one() -> None:
    """Against the definition, spelled out."""
    draw = random.Random(1)
    for _ in range(300):
        known = draw.choices(range(draw.randrange(1, 5)), k=draw.randrange(1, 30))
        min_n = draw.randrange(1, 4)
        max_n = min_n + draw.randrange(4)
        expected = None
        for n in range(max_n, min_n - 1, -1):
            # Behind an occurrence that is not the suffix itself.
            starts = [i for i in range(n, len(known)) if known[i - n : i] == known[-n:]]
            if starts:
                expected = starts[-1]
                break

        assert continuation_start(np.asarray(known, np.int32), min_n, max_n) == expected


def test_sizes_that_mean_nothing_are_refused() -> None:
    for low, high in ((0, 3), (3, 2)):
        with pytest.raises(ValueError, match="min_n"):
            NgramProposer(low, high)


# ------------------------------------------------------------------ acceptance


def test_the_rate_goes_to_what_is_seen_and_back_when_nothing_is() -> None:
    good, bad = Acceptance(), Acceptance()
    for count in range(30):
        good.note(1, count, 4, 4)
        bad.note(1, count, 4, 0)

    assert good.rate(1, 30) > 0.9
    assert bad.rate(1, 30) < 0.1
    # Another request starts from what all have shown; this one returns there.
    assert bad.rate(2, 0) < 0.2
    assert bad.rate(1, 500) == pytest.approx(bad.rate(2, 0), rel=0.05)


def test_drafts_behind_the_first_failure_are_no_evidence() -> None:
    short, long = Acceptance(), Acceptance()
    for count in range(30):
        short.note(1, count, 2, 1)  # one met, one not
        long.note(1, count, 8, 1)  # one met, one not, six never tried

    assert short.rate(1, 30) == long.rate(1, 30) == pytest.approx(0.5, abs=0.01)


def test_drafts_that_keep_failing_pause_longer_each_time() -> None:
    acceptance = Acceptance()
    tried_at: list[int] = []
    for num_output in range(400):
        if not acceptance.is_paused(1, num_output):
            tried_at.append(num_output)
            acceptance.note(1, num_output, 3, 0)

    assert tried_at == [0, 1, 2, 3, 4, 12, 13, 29, 30, 62, 63, 127, 128, 256, 257]


def test_one_success_ends_the_pauses() -> None:
    acceptance = Acceptance()
    for num_output in range(5):
        acceptance.note(1, num_output, 3, 0)
    assert acceptance.is_paused(1, 11)
    assert not acceptance.is_paused(1, 12)

    acceptance.note(1, 12, 3, 1)
    for num_output in range(13, 17):
        acceptance.note(1, num_output, 3, 0)

    assert not acceptance.is_paused(1, 17)
    assert not acceptance.is_paused(2, 0)
    acceptance.forget(1)


# ------------------------------------------------------------------ costs


def measured(seconds: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for num_tokens, value in seconds.items():
        for _ in range(3):
            costs.note(num_tokens, value)
    return costs


def test_between_what_was_measured_is_a_line_that_goes_on_beyond() -> None:
    costs = measured({4: 0.1, 8: 0.1, 16: 0.3})

    assert costs.seconds_of(np.asarray([1, 4, 8, 12, 16, 24, 32])) == pytest.approx(
        [0.1, 0.1, 0.1, 0.2, 0.3, 0.5, 0.7]
    )


def test_from_one_size_alone_the_next_larger_look_free_and_much_larger_do_not() -> None:
    costs = measured({8: 0.1})

    assert costs.seconds_of(np.asarray([1, 8, 16, 32])) == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_more_tokens_never_look_cheaper() -> None:
    costs = measured({4: 0.2, 8: 0.1, 12: 0.3})

    assert costs.seconds_of(np.asarray([4, 8, 12])) == pytest.approx([0.1, 0.1, 0.3])


def test_one_slow_step_moves_nothing() -> None:
    costs = measured({4: 0.1})
    costs.note(4, 9.0)

    assert costs.seconds_of(np.asarray([1])) == pytest.approx([0.1])


def test_a_measurement_is_known_when_repeated_and_until_it_is_old() -> None:
    costs = StepCosts()
    costs.note(1, 0.1)
    assert not costs.is_known(1)
    costs.note(3, 0.1)
    assert costs.is_known(2)
    assert not costs.is_known(5)

    for _ in range(65):
        costs.note(16, 0.3)

    assert costs.is_known(14)
    assert not costs.is_known(1)


@pytest.mark.parametrize(("num_measured", "num_later"), [(1, 50), (2, 50), (3, 500)])
def test_what_was_measured_once_or_twice_is_soon_forgotten(
    num_measured: int, num_later: int
) -> None:
    costs = StepCosts()
    for _ in range(num_measured):
        costs.note(1, 0.1)
    for _ in range(num_later):
        costs.note(16, 0.3)
    assert costs.seconds_of(np.asarray([1])) == pytest.approx([0.1])

    costs.note(16, 0.3)

    assert costs.seconds_of(np.asarray([1])) == pytest.approx([0.3])


# ------------------------------------------------------------------ the choice


class Scripted:
    """A proposer that says the same always, as far as it was asked."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids
        self.num_asked = 0

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        self.num_asked += len(asks)
        return [self.ids[: ask.max_drafts] for ask in asks]

    def forget(self, key: int) -> None:
        pass


def make_wants(
    count: int, room: int = 100, stop_ids: frozenset[int] = frozenset()
) -> list[DraftWant]:
    return [DraftWant(Request(index, make_request(), stop_ids), room) for index in range(count)]


IDS = tuple(range(20, 28))


def test_drafts_are_cut_to_room_to_the_most_and_before_a_stop_token() -> None:
    drafter = Drafter(Scripted(*IDS), max_drafts=5)

    assert drafter.draft(make_wants(1), 1, 99) == [IDS[:5]]
    assert drafter.draft(make_wants(1, room=2), 1, 99) == [IDS[:2]]
    assert drafter.draft(make_wants(1, stop_ids=frozenset({23})), 1, 99) == [IDS[:3]]
    assert drafter.draft(make_wants(2), 2, 7) == [IDS[:4], IDS[:3]]


def test_a_request_with_a_grammar_needs_somebody_who_knows_it() -> None:
    sampling = SamplingParams(max_tokens=9, grammar=Grammar(kind="json_object"))
    generate = msgspec.structs.replace(make_request(), sampling=sampling)
    want = DraftWant(Request(0, generate, frozenset()), 9)
    drafter = Drafter(Scripted(*IDS), max_drafts=4)
    assert drafter.draft([want], 1, 99) == [()]

    drafter.constrain = lambda request, ids: ids[:2]

    assert drafter.draft([want], 1, 99) == [IDS[:2]]


@pytest.mark.parametrize(
    ("seconds", "batch", "expected"),
    [
        # Weights are read once for any of these sizes: drafts are free, all of them pay.
        ({4: 0.1, 8: 0.101}, 1, 7),
        # The second four tokens cost as much as the first: only what fits beside the row's own.
        ({4: 0.1, 8: 0.2}, 1, 3),
        # Computing is all: four tokens for the price of four gain nothing.
        ({16: 0.16, 20: 0.2, 144: 1.44}, 16, 0),
    ],
)
def test_auto_takes_as_many_drafts_as_pay(
    seconds: dict[int, float], batch: int, expected: int
) -> None:
    drafter = Drafter(Scripted(*IDS), 7, measured(seconds))

    drafts = drafter.draft(make_wants(batch), batch, 999)

    assert [len(ids) for ids in drafts] == [expected] * batch


def test_auto_measures_a_plain_step_before_it_drafts_and_an_unknown_size_by_trying_it() -> None:
    proposer = Scripted(*IDS)
    drafter = Drafter(proposer, 7, StepCosts())
    assert drafter.draft(make_wants(2), 2, 999) == [(), ()]
    assert proposer.num_asked == 0

    for _ in range(3):
        drafter.note_step(2, 0.1)

    assert drafter.draft(make_wants(2), 2, 999) == [IDS[:3], IDS[:3]]


def test_auto_asks_nobody_where_even_the_best_row_would_not_pay() -> None:
    proposer = Scripted(*IDS)
    drafter = Drafter(proposer, 7, measured({64: 0.64, 512: 5.12}))

    assert drafter.draft(make_wants(64), 64, 999) == [()] * 64
    assert proposer.num_asked == 0


def test_auto_gives_the_drafts_that_pay_to_the_rows_whose_drafts_come_true() -> None:
    drafter = Drafter(Scripted(*IDS), 7, measured({4: 0.1, 8: 0.15, 12: 0.2, 16: 0.25}))
    wants = make_wants(2)
    for _ in range(20):
        drafter.note(wants[0].request, 7, 7)
        drafter.note(wants[1].request, 7, 1)

    first, second = drafter.draft(wants, 2, 999)

    assert len(first) > len(second)


def simulated_speed(
    batch: int, acceptance: float, seconds_of: Callable[[int], float], mode: Speculative
) -> float:
    """Tokens per second of a machine on which a step takes `seconds_of` its tokens, give or take 10%."""
    draw = random.Random(batch)
    costs = StepCosts() if mode == "auto" else None
    drafter = Drafter(Scripted(*IDS), 7, costs)
    requests = [want.request for want in make_wants(batch)]
    tokens, seconds = 0, 0.0
    for _ in range(250):
        wants = [DraftWant(request, 100) for request in requests]
        drafts = [()] * batch if mode == "off" else drafter.draft(wants, batch, 512)
        num_tokens = batch + sum(map(len, drafts))
        seconds += seconds_of(num_tokens)
        drafter.note_step(num_tokens, seconds_of(num_tokens) * draw.uniform(0.9, 1.1))
        for request, ids in zip(requests, drafts, strict=True):
            accepted = 0
            while accepted < len(ids) and draw.random() < acceptance:
                accepted += 1
            if ids:
                drafter.note(request, len(ids), accepted)
            request.token_ids += [1] * (accepted + 1)
            tokens += accepted + 1
    return tokens / seconds


@pytest.mark.parametrize("acceptance", [0.9, 0.5, 0.05])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_auto_is_never_much_slower_than_plain_and_takes_the_gain_there_is(
    batch: int, acceptance: float
) -> None:
    """A machine that reads weights for 20 ms and computes a token in 3 ms meanwhile or beyond."""

    def seconds_of(num_tokens: int) -> float:
        return max(0.02, 0.003 * (-(-num_tokens // 4) * 4))

    plain, auto, forced = (
        simulated_speed(batch, acceptance, seconds_of, mode) for mode in ("off", "auto", "ngram")
    )

    assert auto > 0.97 * plain
    assert auto > 0.9 * forced
    if (batch, acceptance) == (1, 0.9):
        assert auto > 3 * plain
    if batch == 16:
        assert forced < 0.8 * plain


def test_counts_are_kept_by_place() -> None:
    drafter = Drafter(Scripted(*IDS), 3)
    (want,) = make_wants(1)

    for num_accepted in (3, 1, 0):
        drafter.note(want.request, 3, num_accepted)

    counts = drafter.counts
    assert (counts.blocks, counts.drafts, counts.accepted) == (3, 9, 4)
    assert counts.accepted_at == [2, 1, 1]


# ------------------------------------------------------------------ settings


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=Path(), base_model="tiny", **settings)


def test_settings_choose_the_drafter() -> None:
    assert make_drafter(config(speculative="off")) is None
    assert make_drafter(config()) is not None
    forced = make_drafter(config(speculative="ngram", num_speculative_tokens=2))
    assert forced is not None

    (want,) = make_wants(1)
    want.request.token_ids = [1, 2, 3, 4, 5, 1, 2]
    assert forced.draft([want], 1, 99) == [(3, 4)]


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": "on"},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 65},
        {"ngram_min": 0},
        {"ngram_min": 3, "ngram_max": 2},
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings)).split("_")[0]):
        config(**settings)
