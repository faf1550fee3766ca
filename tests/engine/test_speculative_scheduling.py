"""Drafts through scheduler and core on fakes: they change how many steps it takes, and nothing else.

The oracle proposer knows what each request will say and lies where it is told to, so that drafts are
accepted and rejected at will.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.protocol import Generate, Usage
from loraplex_engine.request import Request
from loraplex_engine.speculative import Drafter
from loraplex_engine.speculative.costs import StepCosts
from loraplex_engine.speculative.ngram import NgramProposer

from tests.support.engine_fakes import (
    VOCAB_SIZE,
    FakeEngine,
    collect_outcomes,
    make_engine,
    make_request,
    solo_output,
)
from tests.support.oracle_drafts import Oracle, choices_of


class Uncut(Drafter):
    """Leaves drafts behind stop tokens in, so that the core has to see to them."""

    def _usable(self, request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids


def oracle_engine(
    requests: list[Generate], *, lie_every: int = 0, max_drafts: int = 4, **sizes: Any
) -> FakeEngine:
    oracle = Oracle([choice for request in requests for choice in choices_of(request)], lie_every)
    engine = make_engine(drafter=Uncut(oracle, max_drafts), **sizes)
    for request in requests:
        engine.core.add(request)
    return engine


def drafts_of(engine: FakeEngine) -> list[int]:
    return [sum(map(len, step.drafts.values())) for step in engine.runner.steps]


def test_drafts_that_come_true_save_steps_and_leave_the_text() -> None:
    request = make_request(max_tokens=11)
    engine = oracle_engine([request])

    events = engine.run()

    # The prompt brings the first token; then 1 + 4 tokens a step.
    assert [len(event.token_ids) for event in events] == [1, 5, 5]
    outcome = collect_outcomes(events)["r0"]
    assert outcome.token_ids == solo_output(request)[0]
    assert outcome.terminal is not None
    assert outcome.terminal.usage == Usage(prompt_tokens=3, completion_tokens=11)
    stats = engine.core.stats()
    assert (stats.spec_drafts_total, stats.spec_draft_tokens_total) == (2, 8)
    assert stats.spec_accepted_tokens_total == 8
    assert stats.spec_accepted_per_position_total == [2, 2, 2, 2]
    assert stats.generation_tokens_total == 11
    engine.assert_idle()


def test_rejected_drafts_are_rolled_back_and_their_keys_overwritten() -> None:
    """Fault 43: the fake cache holds the rejected tokens, and reading one would change the text."""
    request = make_request(max_tokens=24)
    engine = oracle_engine([request], lie_every=3)
    lengths = []

    while engine.core.has_work():
        events = engine.core.step()
        engine.core.check()
        lengths += [len(event.token_ids) for event in events]

    computed = [(int(s.num_computed_B[0]), int(s.num_scheduled_B[0])) for s in engine.runner.steps]
    stats = engine.core.stats()
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total
    # Each step begins where the accepted tokens end, less the one that was only sampled.
    starts = np.cumsum([3, *lengths])[:-1] - 1
    assert [start for start, _ in computed[1:]] == starts[1:].tolist()
    assert 1 < max(lengths) < 5 or 5 in lengths
    engine.assert_idle()


def test_no_more_drafts_than_max_tokens_leaves_room_for() -> None:
    requests = [make_request(f"r{n}", max_tokens=n, seed=n) for n in range(1, 9)]
    engine = oracle_engine(requests, max_num_seqs=8, num_blocks=64)

    outcomes = collect_outcomes(engine.run())

    for request in requests:
        assert outcomes[request.request_id].token_ids == solo_output(request)[0]
    # What is computed is sampled and kept: no draft is true and in vain.
    stats = engine.core.stats()
    assert stats.spec_accepted_tokens_total == stats.spec_draft_tokens_total > 0


def test_the_context_is_never_exceeded() -> None:
    request = make_request(prompt=[5] * 50, max_tokens=14)
    engine = oracle_engine([request], max_num_batched_tokens=64, max_model_len=64)

    engine.run()

    ends = [int((s.num_computed_B + s.num_scheduled_B).max()) for s in engine.runner.steps]
    assert max(ends) == 63  # the last token is sampled, not computed


@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_inside_a_block_ends_there(place: int) -> None:
    tokens = solo_output(make_request(max_tokens=12))[0]
    stop = tokens[place]
    request = make_request(max_tokens=12, stop_token_ids=(stop,), logprobs=0)
    engine = oracle_engine([request])

    outcome = collect_outcomes(events := engine.run())["r0"]

    assert (outcome.token_ids, "stop") == solo_output(request)
    assert outcome.terminal is not None
    assert outcome.terminal.stop_token_id == stop
    assert outcome.terminal.usage is not None
    assert outcome.terminal.usage.completion_tokens == len(outcome.token_ids)
    told = [logprob for event in events for logprob in event.logprobs or ()]
    assert [logprob.logprob for logprob in told] == [-float(t) for t in outcome.token_ids]
    assert engine.core.stats().generation_tokens_total == len(outcome.token_ids)
    engine.assert_idle()


def test_drafts_take_only_what_is_left_of_the_budget() -> None:
    requests = [make_request(f"r{n}", seed=n, max_tokens=20) for n in range(4)]
    long = make_request("long", prompt=[9] * 60, max_tokens=2)
    engine = oracle_engine([*requests, long], max_num_batched_tokens=9, max_num_seqs=5)

    engine.run()

    assert max(step.num_tokens for step in engine.runner.steps) <= 9
    with_prefill = [s for s in engine.runner.steps if not s.samples_B.all()]
    assert len(with_prefill) > 5
    # The prompt takes all that rows leave, so drafts wait for it.
    assert all(not step.drafts for step in with_prefill)
    assert sum(drafts_of(engine)) > 0


def test_a_capped_prefill_leaves_budget_to_drafts() -> None:
    requests = [make_request(f"r{n}", seed=n, max_tokens=20) for n in range(2)]
    long = make_request("long", prompt=[9] * 60, max_tokens=2)
    engine = oracle_engine(
        [*requests, long], max_num_batched_tokens=32, long_prefill_token_threshold=6
    )

    outcomes = collect_outcomes(engine.run())

    assert any(step.drafts and not step.samples_B.all() for step in engine.runner.steps)
    for request in (*requests, long):
        assert outcomes[request.request_id].token_ids == solo_output(request)[0]


def test_nobody_is_preempted_for_drafts_and_the_watermark_stays() -> None:
    # Two rows of 3 + 13 tokens fill 8 blocks of 4 exactly; drafts ask for theirs early.
    requests = [make_request(f"r{n}", seed=n, max_tokens=13) for n in range(2)]
    engine = oracle_engine(requests, num_blocks=8, watermark_blocks=1, max_num_batched_tokens=32)
    least_free_with_drafts = 8

    while engine.core.has_work():
        engine.core.step()
        engine.core.check()
        step = engine.runner.steps[-1]
        if any(update.row in step.rows_B[list(step.drafts)] for update in step.block_updates):
            least_free_with_drafts = min(least_free_with_drafts, engine.pool.num_free)

    stats = engine.core.stats()
    assert stats.num_preemptions_total == 0
    assert stats.spec_accepted_tokens_total > 0
    assert least_free_with_drafts >= 1


def test_without_free_blocks_there_are_as_many_drafts_as_the_last_block_holds() -> None:
    request = make_request(prompt=[5, 6], max_tokens=6)
    engine = oracle_engine([request], num_blocks=2)

    events = engine.run()

    # Blocks of 4: tokens 0-3 in the first; the second is the last there is.
    assert [len(event.token_ids) for event in events] == [1, 5]
    assert drafts_of(engine) == [0, 4]
    assert collect_outcomes(events)["r0"].token_ids == solo_output(request)[0]


def test_abort_in_the_step_that_verifies_drafts_leaves_nothing() -> None:
    """Fault 53: the tokens that were computed meanwhile never existed."""
    request, other = make_request("r0", max_tokens=30), make_request("r1", max_tokens=30, seed=3)
    engine = oracle_engine([request, other], lie_every=4)
    events = engine.core.step() + engine.core.step()
    before = sum(len(e.token_ids) for e in events if e.request_id == "r0")
    engine.runner.in_flight_hook = lambda: engine.core.abort("r0", 0)

    events += engine.run()

    outcomes = collect_outcomes(events)
    terminal = outcomes["r0"].terminal
    assert terminal is not None
    assert (terminal.finish_reason, terminal.token_ids) == ("abort", [])
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=before)
    assert outcomes["r1"].token_ids == solo_output(other)[0]
    assert engine.core.stats().spec_draft_tokens_total > 0
    engine.assert_idle()


def test_a_poisoned_row_with_drafts_ends_alone() -> None:
    requests = [make_request(f"r{seed}", seed=seed, max_tokens=20) for seed in range(2)]
    engine = oracle_engine(requests)
    events = engine.core.step() + engine.core.step()
    engine.runner.poisoned_seeds.add(0)

    events += engine.run()

    outcomes = collect_outcomes(events)
    assert outcomes["r0"].terminal is not None
    assert outcomes["r0"].terminal.error_code == "non_finite_logits"
    assert outcomes["r1"].token_ids == solo_output(requests[1])[0]
    engine.assert_idle()


def test_numbers_that_only_drafts_spoilt_end_nobody() -> None:
    """The next step asks without drafts, and for a while so do the others; the text is as ever."""
    request = make_request(max_tokens=30)
    engine = oracle_engine([request])
    events = engine.core.step()
    engine.runner.poisoned_seeds.add(7)
    events += engine.core.step()
    engine.core.check()
    engine.runner.poisoned_seeds.clear()

    events += engine.run()

    outcome = collect_outcomes(events)["r0"]
    assert outcome.token_ids == solo_output(request)[0]
    assert drafts_of(engine)[:10] == [0, 4] + [0] * 8
    assert sum(drafts_of(engine)[10:]) > 0
    starts = [int(step.num_computed_B[0]) for step in engine.runner.steps[:4]]
    assert starts == [0, 3, 3, 4]
    engine.assert_idle()


def test_requests_are_forgotten_in_whatever_way_they_end() -> None:
    oracle = Oracle([make_request(f"r{n}", seed=n, max_tokens=4 + n) for n in range(6)])
    engine = make_engine(drafter=Drafter(oracle, 4), max_num_seqs=2)
    for request in oracle.requests:
        engine.core.add(request)
    engine.core.step()
    engine.core.abort("r0", 0)  # running
    engine.core.abort("r5", 0)  # waiting

    engine.run()

    assert sorted(oracle.forgotten) == list(range(6))


@pytest.mark.parametrize("seed", range(12))
def test_any_load_says_what_each_says_alone(seed: int) -> None:
    """Random requests, sizes, lies and aborts; too few blocks, so that rows are preempted in between."""
    draw = random.Random(seed)
    requests = [
        make_request(
            f"r{index}",
            draw.choices(range(1, VOCAB_SIZE), k=draw.randrange(1, 20)),
            max_tokens=draw.randrange(1, 25),
            adapter=draw.choice([None, "a", "b"]),
            seed=index,
            ignore_eos=draw.random() < 0.5,
            priority=draw.randrange(3),
        )
        for index in range(14)
    ]
    engine = oracle_engine(
        requests,
        lie_every=draw.randrange(2, 9),
        max_drafts=draw.randrange(1, 8),
        num_blocks=draw.randrange(12, 20),
        max_num_batched_tokens=draw.randrange(5, 40),
    )
    aborted = {f"r{index}" for index in draw.sample(range(14), 3)}

    def abort_one() -> None:
        if aborted and draw.random() < 0.1:
            engine.core.abort(aborted.pop(), 0)

    events = engine.run(after_step=abort_one)

    for request in requests:
        outcome = collect_outcomes(events)[request.request_id]
        tokens, reason = solo_output(request)
        assert outcome.terminal is not None
        if outcome.terminal.finish_reason == "abort":
            assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        else:
            assert (outcome.token_ids, outcome.terminal.finish_reason) == (tokens, reason)
    stats = engine.core.stats()
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total
    engine.assert_idle()


@pytest.mark.parametrize("seed", range(6))
def test_choices_and_found_prefixes_say_what_each_says_alone(seed: int) -> None:
    """Drafts behind blocks that several hold, and blocks of accepted drafts found by later requests."""
    draw = random.Random(seed)
    common = draw.choices(range(1, VOCAB_SIZE), k=9)
    requests = [
        make_request(
            f"r{index}",
            common[: draw.randrange(5, 10)]
            + draw.choices(range(1, VOCAB_SIZE), k=draw.randrange(4)),
            max_tokens=draw.randrange(4, 20),
            seed=100 * index,
            n=draw.randrange(1, 4),
        )
        for index in range(8)
    ]
    for index in range(8):
        first = choices_of(requests[index])[0]
        said = [*first.prompt_token_ids, *solo_output(first)[0]]
        requests.append(make_request(f"later-{index}", said, max_tokens=6, seed=index))
    engine = oracle_engine(
        requests,
        lie_every=draw.randrange(2, 9),
        num_blocks=draw.randrange(24, 40),
        max_num_batched_tokens=draw.randrange(8, 40),
        has_prefix_cache=True,
    )

    events = engine.run()

    for request in requests:
        for index, choice in enumerate(choices_of(request)):
            told = [e for e in events if (e.request_id, e.index) == (request.request_id, index)]
            assert [t for event in told for t in event.token_ids] == solo_output(choice)[0]
    stats = engine.core.stats()
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total
    assert stats.prefix_cache_hit_tokens_total > 0
    assert any(step.block_copies for step in engine.runner.steps)
    engine.assert_idle()


def test_the_loads_above_preempt() -> None:
    requests = [make_request(f"r{n}", seed=n, max_tokens=24) for n in range(4)]
    engine = oracle_engine(requests, lie_every=5, num_blocks=15)

    outcomes = collect_outcomes(engine.run())

    assert engine.core.stats().num_preemptions_total > 0
    for request in requests:
        assert outcomes[request.request_id].token_ids == solo_output(request)[0]


def test_drafts_that_never_come_true_are_given_up_for_a_while() -> None:
    request = make_request(max_tokens=40)
    engine = oracle_engine([request], lie_every=1)

    engine.run()

    with_drafts = [index for index, count in enumerate(drafts_of(engine)) if count]
    assert with_drafts == [1, 2, 3, 4, 5, 14, 15, 32, 33]


def test_auto_does_not_draft_before_it_has_measured() -> None:
    request = make_request(prompt=[4, 4, 4, 4], max_tokens=6)
    engine = make_engine(drafter=Drafter(NgramProposer(1, 3), 4, StepCosts()))
    engine.core.add(request)

    engine.run()

    assert not any(drafts_of(engine)[:4])


def test_metrics_show_what_drafts_did() -> None:
    engine = oracle_engine([make_request(max_tokens=11)])
    engine.run()
    stats = engine.core.stats()
    metrics = EngineMetrics("tiny")
    metrics.watch(lambda: stats, lambda: 0.0, lambda: 0)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"loraplex:spec_decode_num_{name}_total", {"model_name": "tiny", **labels}
        )

    assert value("drafts") == 2
    assert value("draft_tokens") == value("accepted_tokens") == 8
    places = [value("accepted_tokens_per_pos", position=str(place)) for place in range(5)]
    assert places == [2, 2, 2, 2, None]


def test_an_engine_told_to_stop_drafting_does() -> None:
    request = make_request(max_tokens=20)
    engine = oracle_engine([request])
    engine.core.stop_drafting()

    outcome = collect_outcomes(engine.run())["r0"]

    assert outcome.token_ids == solo_output(request)[0]
    assert sum(drafts_of(engine)) == 0
