"""Several choices of one request, on fakes: one prompt, one usage, an end for each and one for all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from loraplex_engine.config import Admission
from loraplex_engine.errors import AdapterUnavailableError
from loraplex_engine.protocol import Generate, TokenEvent, Usage

from tests.support.choice_outcomes import Choices, collect_choices, single, solo_choices
from tests.support.engine_fakes import FakeEngine, make_engine, make_request

PROMPT = list(range(1, 11))  # two blocks of four, and two tokens


def run(engine: FakeEngine, *requests: Generate) -> dict[str, Choices]:
    for request in requests:
        engine.core.add(request)
    collected = collect_choices(engine.run())
    engine.assert_idle()
    return collected


def said(choices: Choices) -> list[tuple[list[int], str]]:
    return [(choices.tokens[index], choices.reasons[index]) for index in sorted(choices.tokens)]


@pytest.mark.parametrize("has_prefix_cache", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 10])
def test_choices_differ_and_each_is_the_request_with_its_seed(
    length: int, has_prefix_cache: bool
) -> None:
    """Fault 38: seed + i, and no two choices alike; whatever part of a block the prompt fills."""
    engine = make_engine(has_prefix_cache=has_prefix_cache)
    request = make_request(prompt=PROMPT[:length], n=4, seed=3, max_tokens=6)

    choices = run(engine, request)["r0"]

    assert said(choices) == solo_choices(request)
    assert len({tuple(tokens) for tokens, _ in said(choices)}) == 4
    alone = [run(engine, single(request, i, f"s{i}"))[f"s{i}"].tokens[0] for i in range(4)]
    assert [tokens for tokens, _ in said(choices)] == alone


def test_the_prompt_is_computed_and_counted_once() -> None:
    engine = make_engine()

    choices = run(engine, make_request(prompt=PROMPT, n=3, max_tokens=5))["r0"]

    assert choices.usage == Usage(prompt_tokens=10, completion_tokens=15)
    # Ten for the first, its last token anew for the other two; then four each.
    assert sum(step.num_tokens for step in engine.runner.steps) == 10 + 2 + 3 * 4
    stats = engine.core.stats()
    assert stats.prompt_tokens_total == 10
    assert stats.generation_tokens_total == 15
    assert stats.requests_finished_total["length"] == 1


def test_prompt_blocks_are_used_once_and_the_partial_one_is_copied() -> None:
    engine = make_engine(num_blocks=10)
    engine.core.add(make_request(prompt=PROMPT, n=4, max_tokens=3))
    engine.core.step()
    engine.core.step()

    assert engine.core.stats().num_running == 4
    assert engine.pool.num_free == 10 - (2 + 4)
    copies = engine.runner.steps[-1].block_copies
    assert len(copies) == 3
    assert len({source for source, _ in copies}) == 1
    assert len({target for _, target in copies}) == 3
    engine.run()
    engine.assert_idle()


def test_a_seed_beyond_64_bits_wraps() -> None:
    engine = make_engine()
    request = make_request(seed=2**64 - 1, n=2)

    assert said(run(engine, request)["r0"]) == solo_choices(request)


def test_the_stream_goes_on_until_the_last_choice_ends() -> None:
    """Fault 38: it does not end with the first child."""
    engine = make_engine()
    base = make_request(n=3, max_tokens=9)
    stop = solo_choices(base)[1][0][2]
    request = make_request(n=3, max_tokens=9, stop_token_ids=(stop,))
    engine.core.add(request)

    events = engine.run()

    choices = collect_choices(events)["r0"]
    assert said(choices) == solo_choices(request)
    assert "stop" in choices.reasons.values()
    ends = [event for event in events if event.finish_reason]
    assert [event.usage is not None for event in ends] == [False, False, True]
    assert choices.usage.completion_tokens == sum(len(t) for t in choices.tokens.values())


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_more_choices_than_rows_take_turns(has_prefix_cache: bool) -> None:
    engine = make_engine(max_num_seqs=2, has_prefix_cache=has_prefix_cache)
    request = make_request(prompt=PROMPT, n=7, max_tokens=5)

    choices = run(engine, request)["r0"]

    assert said(choices) == solo_choices(request)
    assert choices.usage == Usage(prompt_tokens=10, completion_tokens=35)
    assert engine.core.stats().prompt_tokens_total == 10


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_choices_outlive_preemption(has_prefix_cache: bool) -> None:
    engine = make_engine(
        num_blocks=9, max_num_seqs=3, max_model_len=36, has_prefix_cache=has_prefix_cache
    )
    request = make_request(prompt=PROMPT, n=3, max_tokens=16)

    choices = run(engine, request)["r0"]

    assert engine.core.stats().num_preemptions_total > 0
    assert said(choices) == solo_choices(request)
    assert choices.usage == Usage(prompt_tokens=10, completion_tokens=48)


def test_choices_with_priorities_and_equal_ranks() -> None:
    """Fault 38: a tie in the priority queue is no error."""
    engine = make_engine(max_num_seqs=2)
    requests = [make_request(f"r{i}", n=3, priority=i % 2, max_tokens=3) for i in range(4)]

    collected = run(engine, *requests)

    assert [said(collected[r.request_id]) for r in requests] == [solo_choices(r) for r in requests]


def test_cached_tokens_count_once_for_all_choices() -> None:
    engine = make_engine(has_prefix_cache=True)
    run(engine, make_request("cold", PROMPT))

    usage = run(engine, make_request("warm", PROMPT, n=3))["warm"].usage

    assert usage == Usage(prompt_tokens=10, completion_tokens=12, cached_tokens=8)
    assert engine.core.stats().prefix_cache_query_tokens_total == 20
    assert engine.core.stats().prefix_cache_hit_tokens_total == 8


def test_each_choice_holds_a_lease_and_gives_it_back() -> None:
    engine = make_engine()
    engine.core.add(make_request(prompt=PROMPT, n=3, adapter="a"))
    engine.core.step()
    engine.core.step()
    assert engine.adapters.num_leases == 3

    engine.run()

    engine.assert_idle()
    assert engine.adapters.num_leased == engine.adapters.num_released == 3


# ------------------------------------------------------------------ a prompt that is left behind


def computed(engine: FakeEngine) -> list[int]:
    """Tokens computed, by step."""
    return [step.num_tokens for step in engine.runner.steps]


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_choices_that_end_with_their_first_token_share_the_prompt(has_prefix_cache: bool) -> None:
    """The first one is gone before the others could have begun: they still compute nothing anew."""
    engine = make_engine(has_prefix_cache=has_prefix_cache, max_num_seqs=8)
    request = make_request(prompt=PROMPT, n=5, max_tokens=1)

    choices = run(engine, request)["r0"]

    assert said(choices) == solo_choices(request)
    assert computed(engine) == [10, 4], "all others in one step, a token each"
    assert choices.usage == Usage(prompt_tokens=10, completion_tokens=5)


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_choices_that_run_one_after_the_other_share_the_prompt(has_prefix_cache: bool) -> None:
    engine = make_engine(has_prefix_cache=has_prefix_cache, max_num_seqs=1)
    request = make_request(prompt=PROMPT, n=4, max_tokens=12)

    num_held: list[int] = []
    engine.core.add(request)
    events = engine.run(
        after_step=lambda: num_held.append(engine.pool.num_blocks - engine.pool.num_free)
    )

    assert said(collect_choices(events)["r0"]) == solo_choices(request)
    assert sum(computed(engine)) == 10 + 3 + 4 * 11
    # After a step that ends nobody: 20 tokens of one choice, and the block of the prompt that each copies;
    # not what the first one said.
    assert max(num_held) == 5 + 1
    engine.assert_idle()


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_a_prompt_is_left_for_as_long_as_choices_wait_for_it(has_prefix_cache: bool) -> None:
    engine = make_engine(has_prefix_cache=has_prefix_cache, max_num_seqs=2)
    engine.core.add(make_request("other", [50] * 3, max_tokens=60))
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=1))
    left = []
    while engine.core.stats().requests_finished_total["length"] == 0:
        engine.core.step()
        engine.core.check()
        left.append(engine.kv.num_left)

    assert left == [1, 1, 0]
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_whoever_needs_the_room_takes_what_was_left(
    has_prefix_cache: bool, admission: Admission
) -> None:
    """Three blocks hold one choice's tokens and nothing else, so each computes the prompt itself."""
    engine = make_engine(
        num_blocks=3, max_model_len=12, has_prefix_cache=has_prefix_cache, admission=admission
    )
    request = make_request(prompt=PROMPT, n=3, max_tokens=2)

    choices = run(engine, request)["r0"]

    assert said(choices) == solo_choices(request)
    assert engine.core.stats().num_preemptions_total == 0


def test_a_running_request_takes_what_was_left_before_anybody_is_preempted() -> None:
    engine = make_engine(num_blocks=10, max_num_seqs=2, max_model_len=40)
    engine.core.add(make_request("grows", [50] * 4, max_tokens=36))
    engine.adapters.hold("a")
    engine.core.add(make_request(prompt=PROMPT, n=2, max_tokens=1, adapter="a"))
    engine.core.step()
    engine.adapters.finish_loading("a")
    engine.core.step()
    assert engine.kv.num_left == 1
    engine.adapters.hold("a")  # the other choice cannot follow

    events = [event for _ in range(33) for event in engine.core.step()]

    assert engine.kv.num_left == 0
    assert engine.core.stats().num_preemptions_total == 0
    engine.adapters.finish_loading("a")
    choices = collect_choices(events + engine.run())["r0"]
    assert choices.usage.prompt_tokens == 10
    engine.assert_idle()


def test_no_choice_throws_its_own_prompt_away_while_somebody_will_make_room() -> None:
    """It lacks the block that it would copy; without the prompt it would need that one and two more."""
    engine = make_engine(num_blocks=7, max_num_seqs=2, max_model_len=28)
    engine.core.add(make_request(prompt=PROMPT, n=2, max_tokens=1))
    engine.core.add(make_request("runs", [50] * 13, max_tokens=4))
    engine.core.step()
    assert (engine.kv.num_left, engine.kv.num_free) == (1, 0)

    engine.run()

    assert computed(engine) == [10 + 13, 1, 1, 1, 1], "the other choice's last token alone"
    engine.assert_idle()


def leave_prompt(engine: FakeEngine, name: str, tenant: str, token: int) -> None:
    """Leave three blocks of a prompt that a second choice waits for, until its adapter is loaded."""
    request = make_request(name, [token] * 10, n=2, max_tokens=1, adapter=name, tenant=tenant)
    engine.core.add(request)
    engine.core.step()
    engine.adapters.hold(name)


def let_them_follow(engine: FakeEngine) -> None:
    engine.adapters.held_back.clear()
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize(("length", "must_wait"), [(21, False), (25, True)])
def test_what_others_left_goes_only_if_that_makes_the_room(length: int, must_wait: bool) -> None:
    engine = make_engine(num_blocks=10, max_num_seqs=3, max_num_batched_tokens=40)
    leave_prompt(engine, "left", "u", 60)
    engine.core.add(make_request("runs", [50] * 13, max_tokens=4, tenant="v"))
    engine.core.step()
    assert (engine.kv.num_left, engine.kv.num_free) == (1, 3)

    engine.core.add(make_request("big", [51] * length, max_tokens=1, tenant="v"))
    engine.core.step()

    assert engine.kv.num_left == (1 if must_wait else 0)
    assert engine.runner.steps[-1].num_tokens == (1 if must_wait else 1 + length)
    engine.core.check()
    for _ in range(4):
        engine.core.step()
    let_them_follow(engine)
    assert sum(computed(engine)) == 10 + (13 + 3) + length + (1 if must_wait else 10)


@pytest.mark.parametrize("tenants", ["uv", "vu"])
def test_what_the_same_tenant_left_goes_first(tenants: str) -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=1, max_num_batched_tokens=40)
    for index, tenant in enumerate(tenants):
        leave_prompt(engine, f"left {tenant}", tenant, 60 + index)
    assert (engine.kv.num_left, engine.kv.num_free) == (2, 2)
    engine.core.add(make_request("big", [51] * 20, max_tokens=1, tenant="u"))

    engine.core.step()
    assert engine.kv.num_left == 1

    let_them_follow(engine)

    last = {"u": 10, "v": 1}
    assert computed(engine) == [10, 10, 20, *(last[tenant] for tenant in tenants)]


def test_what_was_left_goes_when_nobody_runs_who_would_make_room() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=40)
    leave_prompt(engine, "left", "u", 60)
    engine.core.add(make_request("big", [51] * 29, max_tokens=1, tenant="v"))

    engine.core.step()

    assert engine.core.last_step_num_tokens == 29
    let_them_follow(engine)


def test_a_choice_takes_what_others_left_before_its_own() -> None:
    """Its own is the older one, and of the same tenant."""
    engine = make_engine(num_blocks=6, max_num_seqs=1, max_num_batched_tokens=40)
    leave_prompt(engine, "own", "u", 60)
    leave_prompt(engine, "other", "v", 61)
    assert (engine.kv.num_left, engine.kv.num_free) == (2, 0)

    let_them_follow(engine)

    assert computed(engine) == [10, 10, 1, 10]


def test_nothing_that_was_left_goes_for_who_gets_no_adapter() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=40)
    leave_prompt(engine, "left", "u", 60)
    engine.adapters.beyond_share.add("v")
    engine.core.add(make_request("big", [51] * 29, max_tokens=1, tenant="v", adapter="b"))

    engine.core.step()

    assert engine.kv.num_left == 1
    engine.adapters.beyond_share.clear()
    let_them_follow(engine)


def test_nothing_that_was_left_goes_for_who_cannot_grow_even_then() -> None:
    engine = make_engine(num_blocks=5, max_num_seqs=1, max_model_len=20)
    engine.core.add(make_request(prompt=PROMPT[:9], n=3, max_tokens=4))
    engine.core.step()
    engine.core.abort("r0", 0, as_stop=True, index=0)
    engine.core.step()
    assert engine.kv.num_left == 1, "which the choice that runs shares"
    running = engine.core._live["r0", 0].find(1)
    assert running is not None

    assert engine.kv.grow(running.seq, 24) is None

    assert engine.kv.num_left == 1
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("how", [{}, {"as_stop": True}, {"is_platform_fault": True}])
def test_an_abort_takes_what_was_left_along(how: dict[str, bool]) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=1))
    engine.core.step()
    assert engine.kv.num_left == 1

    engine.core.abort("r0", 0, **how)

    assert engine.kv.num_left == 0
    engine.core.drain_events()
    engine.assert_idle()


def test_the_last_that_waits_is_stopped_and_nothing_is_left() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.core.add(make_request(prompt=PROMPT, n=2, max_tokens=1))
    engine.core.step()
    assert engine.kv.num_left == 1

    engine.core.abort("r0", 0, as_stop=True, index=1)

    assert engine.kv.num_left == 0
    engine.core.drain_events()
    engine.assert_idle()


def test_a_prompt_whose_logits_are_not_finite_is_left_to_nobody() -> None:
    engine = make_engine()
    engine.runner.poisoned_seeds.add(7)
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=1))

    engine.core.step()

    assert engine.kv.num_left == 0
    engine.assert_idle()


# ------------------------------------------------------------------ aborts, errors, deadlines


def queued(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request("other", [50] * 3, max_tokens=40))
    engine.core.add(make_request("other2", [51] * 3, max_tokens=40))
    engine.core.add(make_request("other3", [52] * 3, max_tokens=40))
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=8))
    return engine.core.step()


def partial_prefill(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=8))
    return engine.core.step()


def first_alone(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=8))
    return engine.core.step() + engine.core.step()


def all_running(engine: FakeEngine) -> list[TokenEvent]:
    return first_alone(engine) + engine.core.step() + engine.core.step()


def with_adapter(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=8, adapter="a"))
    return [event for _ in range(4) for event in engine.core.step()]


def adapter_loading(engine: FakeEngine) -> list[TokenEvent]:
    engine.adapters.hold("a")
    engine.core.add(make_request(prompt=PROMPT, n=3, max_tokens=8, adapter="a"))
    return engine.core.step()


STATES = [queued, partial_prefill, first_alone, all_running, with_adapter, adapter_loading]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({}, "abort"),
        ({"as_stop": True}, "stop"),
        ({"is_platform_fault": True}, "error"),
    ],
    ids=["abort", "stop", "fault"],
)
@pytest.mark.parametrize("arrange", STATES)
def test_a_whole_abort_ends_all_choices_with_one_event(
    arrange: Callable[[FakeEngine], list[TokenEvent]],
    how: dict[str, bool],
    reason: str,
    in_flight: bool,
) -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=8, num_slots=1)
    events = arrange(engine)
    if in_flight:
        engine.runner.in_flight_hook = lambda: engine.core.abort("r0", 0, **how)
        if arrange is adapter_loading:
            engine.core.add(make_request("other", [1], max_tokens=1))  # so that a step is launched
    else:
        engine.core.abort("r0", 0, **how)
    engine.core.check()

    events += engine.run()

    choices = collect_choices(events)["r0"]
    assert choices.terminal is not None
    assert choices.terminal.finish_reason == reason
    assert choices.usage.completion_tokens == sum(len(t) for t in choices.tokens.values())
    assert engine.core.stats().requests_finished_total[reason] == 1
    engine.assert_idle()


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("arrange", STATES)
def test_stopping_one_choice_leaves_the_others(
    arrange: Callable[[FakeEngine], list[TokenEvent]], index: int, in_flight: bool
) -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=8, num_slots=1)
    events = arrange(engine)

    def stop() -> None:
        engine.core.abort("r0", 0, as_stop=True, index=index)
        engine.core.abort("r0", 0, as_stop=True, index=index)

    if in_flight and arrange is not adapter_loading:
        engine.runner.in_flight_hook = stop
    else:
        stop()
    engine.core.check()
    engine.adapters.finish_loading("a")
    events += engine.run()

    choices = collect_choices(events)["r0"]
    adapter = "a" if arrange in (with_adapter, adapter_loading) else None
    expected = solo_choices(make_request(prompt=PROMPT, n=3, max_tokens=8, adapter=adapter))
    for other in {0, 1, 2} - {index}:
        assert (choices.tokens[other], choices.reasons[other]) == expected[other]
    assert choices.reasons[index] == "stop"
    stopped = choices.tokens.get(index, [])
    assert stopped == expected[index][0][: len(stopped)]
    assert choices.usage == Usage(prompt_tokens=10, completion_tokens=16 + len(stopped))
    engine.assert_idle()


def test_stopping_the_choices_one_by_one_ends_the_request() -> None:
    engine = make_engine()
    events = all_running(engine)

    for index in (1, 0, 2):
        engine.core.abort("r0", 0, as_stop=True, index=index)
        engine.core.check()
    events += engine.core.drain_events()

    choices = collect_choices(events)["r0"]
    assert choices.reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert choices.terminal is not None
    assert choices.terminal.index == 2
    engine.assert_idle()


def test_stopping_what_has_ended_or_never_was_is_a_no_op() -> None:
    engine = make_engine()
    events = all_running(engine)
    engine.core.abort("r0", 0, as_stop=True, index=1)

    for index in (1, 3, -1):
        engine.core.abort("r0", 0, as_stop=True, index=index)

    events += engine.run()
    assert collect_choices(events)["r0"].reasons == {0: "length", 1: "stop", 2: "length"}


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_choice_without_finite_logits_ends_them_all(seed: int) -> None:
    engine = make_engine()
    events = all_running(engine)
    engine.runner.poisoned_seeds.add(seed)

    events += engine.run()

    choices = collect_choices(events)["r0"]
    assert choices.terminal is not None
    assert choices.terminal.error_code == "non_finite_logits"
    assert choices.usage.completion_tokens == sum(len(t) for t in choices.tokens.values())
    engine.assert_idle()


def test_an_adapter_that_cannot_be_had_ends_all_choices() -> None:
    engine = make_engine()
    engine.adapters.fail("a", AdapterUnavailableError("gone"))

    choices = run(engine, make_request(n=3, adapter="a"))["r0"]

    assert choices.terminal is not None
    assert choices.terminal.error_code == "adapter_unavailable"
    assert choices.usage == Usage(prompt_tokens=0, completion_tokens=0)


def test_a_deadline_ends_all_choices_that_still_wait() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.core.add(make_request("other", max_tokens=20))
    engine.core.add(make_request(prompt=PROMPT, n=3, deadline_unix_s=1_001.0))
    events = engine.core.step()
    engine.clock.now_s = 1_002.0

    events += engine.run()

    terminal = collect_choices(events)["r0"].terminal
    assert terminal is not None
    assert terminal.error_code == "deadline_exceeded"
    assert sum(event.request_id == "r0" for event in events) == 1


def test_a_deadline_is_no_matter_once_one_choice_runs() -> None:
    """The others wait for a row, but the client has its answer under way."""
    engine = make_engine(max_num_seqs=1)
    request = make_request(prompt=PROMPT, n=3, deadline_unix_s=1_001.0)
    engine.core.add(request)
    events = engine.core.step()
    engine.clock.now_s = 1_002.0

    events += engine.run()

    assert said(collect_choices(events)["r0"]) == solo_choices(request)


def test_live_usage_is_per_request() -> None:
    engine = make_engine()
    all_running(engine)

    (usage,) = engine.core.live_usage().values()

    assert usage.prompt_tokens == 10
    assert usage.completion_tokens > 3
