"""Scheduler, through the core on fakes: budget, chunks, order, rows, preemption, adapters, deadlines."""

from __future__ import annotations

import pytest
from loraplex_engine.errors import (
    AdapterInvalidError,
    AdapterUnavailableError,
    RequestRejectedError,
)
from loraplex_engine.protocol import Generate, TokenEvent, Usage

from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import (
    FakeEngine,
    collect_outcomes,
    make_engine,
    make_request,
    solo_output,
)


def scheduled(engine: FakeEngine) -> dict[int, int]:
    """Tokens per row in the last step."""
    step = engine.runner.steps[-1]
    return dict(zip(step.rows_B.tolist(), step.num_scheduled_B.tolist(), strict=True))


def running_names(engine: FakeEngine) -> set[str]:
    return {request.generate.request_id for request in engine.scheduler._running}


def assert_all_solo(engine: FakeEngine, requests: list[Generate], events: list[TokenEvent]) -> None:
    outcomes = collect_outcomes(events)
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.terminal is not None
        assert (outcome.token_ids, outcome.terminal.finish_reason) == solo_output(request)
    engine.assert_idle()


# ------------------------------------------------------------------ budget and chunks


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = make_engine(max_num_batched_tokens=10)
    request = make_request(prompt=list(range(1, 26)), max_tokens=3)
    engine.core.add(request)

    events = engine.run()

    counts = [step.num_scheduled_B.tolist() for step in engine.runner.steps]
    assert counts == [[10], [10], [5], [1], [1]]
    samples = [step.samples_B.tolist() for step in engine.runner.steps]
    assert samples == [[False], [False], [True], [True], [True]]
    assert_all_solo(engine, [request], events)


def test_the_threshold_bounds_one_row_and_leaves_budget_to_others() -> None:
    engine = make_engine(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    engine.core.add(make_request("long", list(range(1, 21))))
    engine.core.add(make_request("short", [3, 4]))

    engine.core.step()

    assert scheduled(engine) == {0: 8, 1: 2}


def test_running_rows_go_first_and_a_prefill_takes_what_is_left() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    engine.core.add(make_request("a", [1, 2], max_tokens=9))
    engine.core.add(make_request("b", [3, 4], max_tokens=9))
    engine.core.step()
    engine.core.add(make_request("long", list(range(1, 21))))

    engine.core.step()

    assert scheduled(engine) == {0: 1, 1: 1, 2: 4}


def test_an_urgent_long_prefill_does_not_stall_the_streams_behind_it() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.core.add(make_request("a", [1, 2], max_tokens=20))
    engine.core.add(make_request("b", [3, 4], max_tokens=20))
    engine.core.step()
    engine.core.add(make_request("urgent", list(range(1, 31)), priority=9))
    engine.core.step()

    for _ in range(3):
        events = engine.core.step()
        assert {"a", "b"} <= {event.request_id for event in events}
        assert scheduled(engine) == {0: 1, 1: 1, 2: 6}


def test_a_freed_row_is_reused_in_the_next_step_lowest_first() -> None:
    """Continuous batching: nobody waits for the batch to end."""
    engine = make_engine(max_num_seqs=2)
    for index in range(4):
        engine.core.add(make_request(f"r{index}", max_tokens=1 + index))

    engine.core.step()  # r0 ends
    engine.core.step()  # r2 takes its row; r1 ends
    engine.core.step()  # r3 takes r1's row

    second, third = engine.runner.steps[1:3]
    assert (second.freed_rows, [new.row for new in second.new_rows]) == ((0,), [0])
    assert (third.freed_rows, [new.row for new in third.new_rows]) == ((1,), [1])


def test_the_queue_is_served_by_priority_then_arrival() -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("late", 0), ("low", -1), ("high", 5)):
        engine.core.add(make_request(name, priority=priority, max_tokens=1))

    order = [event.request_id for event in engine.run()]

    assert order == ["high", "late", "low"]


def test_positions_continue_over_chunks_for_two_equal_prompts() -> None:
    engine = make_engine(max_num_batched_tokens=7)
    requests = [make_request(name, list(range(1, 12))) for name in ("a", "b")]
    for request in requests:
        engine.core.add(request)

    assert_all_solo(engine, requests, engine.run())


# ------------------------------------------------------------------ memory and preemption


def test_the_last_in_line_is_preempted_and_resumes_with_the_same_tokens() -> None:
    engine = make_engine(num_blocks=5, max_num_seqs=3)
    requests = [
        make_request("first", max_tokens=14, seed=1),
        make_request("second", max_tokens=14, seed=2),
        make_request("urgent", max_tokens=14, seed=3, priority=1),
    ]
    for request in requests:
        engine.core.add(request)

    events = engine.run()

    assert engine.core.stats().num_preemptions_total > 0
    ended = [event.request_id for event in events if event.finish_reason]
    assert ended == ["urgent", "first", "second"]
    assert_all_solo(engine, requests, events)


def test_a_preemptions_blocks_serve_the_row_that_asked_in_the_same_step() -> None:
    """Fault 24: a loop that does not see what it freed preempts everyone and computes nothing."""
    engine = make_engine(num_blocks=3, max_num_seqs=3)
    requests = [make_request(f"r{index}", max_tokens=6, seed=index) for index in range(3)]
    for request in requests:
        engine.core.add(request)

    def assert_progress() -> None:
        assert engine.core.last_step_num_tokens > 0

    assert_all_solo(engine, requests, engine.run(after_step=assert_progress))


def test_a_preempted_partial_prefill_resumes() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=4)
    requests = [
        make_request("a", [1, 2, 3], max_tokens=9, seed=1),
        make_request("b", list(range(1, 18)), max_tokens=4, seed=2),
    ]
    for request in requests:
        engine.core.add(request)

    events = engine.run()

    assert engine.core.stats().num_preemptions_total == 1
    assert_all_solo(engine, requests, events)


def test_a_row_alone_may_use_the_whole_pool() -> None:
    """Fault 22's other side: what was admitted can finish once it is alone."""
    engine = make_engine(num_blocks=4, watermark_blocks=2)
    request = make_request(prompt=list(range(1, 14)), max_tokens=3)
    engine.core.add(request)

    assert_all_solo(engine, [request], engine.run())


def test_a_lone_row_that_exhausts_the_pool_ends_with_length() -> None:
    """Fault 23. Only blocks that no request holds can bring it about."""
    engine = make_engine(num_blocks=4)
    pinned = engine.pool.take(2)
    request = make_request(prompt=[1, 2, 3], max_tokens=12)
    engine.core.add(request)

    events = run_to_end(engine.core, checks_end=False)  # not with blocks that nobody owns

    outcome = collect_outcomes(events)["r0"]
    assert outcome.terminal is not None
    assert outcome.terminal.finish_reason == "length"
    assert outcome.token_ids == solo_output(request)[0][:6]
    engine.pool.release(pinned)
    engine.assert_idle()


def test_what_the_watermark_keeps_free_is_for_running_rows() -> None:
    engine = make_engine(num_blocks=8, watermark_blocks=3)
    requests = [make_request(f"r{n}", list(range(1, 9)), max_tokens=8) for n in range(3)]
    for request in requests:
        engine.core.add(request)

    events = engine.core.step()

    assert engine.core.stats().num_running == 2
    assert_all_solo(engine, requests, events + engine.run())
    assert engine.core.stats().num_preemptions_total == 0


def test_a_large_request_at_the_head_is_not_starved_by_small_ones() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=4)
    engine.core.add(make_request("running", list(range(1, 9)), max_tokens=8))
    engine.core.step()
    engine.core.add(make_request("large", list(range(1, 26)), max_tokens=1))
    engine.core.add(make_request("small", [1], max_tokens=1))

    ended = [event.request_id for event in engine.run() if event.finish_reason]

    assert ended == ["running", "large", "small"]


def test_kv_usage_is_exact() -> None:
    """Fault 31."""
    engine = make_engine(num_blocks=8)
    assert engine.core.stats().kv_usage == 0.0
    engine.core.add(make_request(prompt=[1, 2, 3, 4, 5], max_tokens=9))

    engine.core.step()

    assert engine.core.stats().kv_usage == 2 / 8
    assert engine.core.stats().kv_blocks_free == 6
    engine.run()
    assert engine.core.stats().kv_usage == 0.0


# ------------------------------------------------------------------ adapters


def test_a_request_whose_adapter_loads_is_skipped_not_waited_for() -> None:
    engine = make_engine()
    engine.adapters.hold("slow")
    slow = make_request("slow", adapter="slow")
    behind = [make_request("base"), make_request("other", adapter="quick")]
    for request in (slow, *behind):
        engine.core.add(request)

    events = []
    for _ in range(5):
        events += engine.core.step()
    assert {e.request_id for e in events if e.finish_reason} == {"base", "other"}
    assert engine.core.last_step_num_tokens == 0
    assert engine.core.has_work()

    engine.adapters.finish_loading("slow")
    events += engine.run()
    assert_all_solo(engine, [slow, *behind], events)


def test_a_request_without_a_free_slot_waits_for_one() -> None:
    engine = make_engine(num_slots=2)
    requests = [make_request(f"r{n}", adapter=f"a{n}", max_tokens=3) for n in range(3)]
    requests.append(make_request("base", max_tokens=3))
    for request in requests:
        engine.core.add(request)

    events = engine.core.step()
    assert {event.request_id for event in events} == {"r0", "r1", "base"}

    events += engine.run()
    assert_all_solo(engine, requests, events)


def test_a_request_without_a_slot_is_not_starved_by_later_ones_for_adapters_that_have_one() -> None:
    """However many keep coming: those that ran when it was refused end, and it is its turn."""
    engine = make_engine(num_slots=2, max_num_seqs=8)
    requests = [make_request("a", adapter="a", max_tokens=6)]
    requests += [make_request("b", adapter="b", max_tokens=30), make_request("x", adapter="x")]
    for request in requests:
        engine.core.add(request)
    events = []
    for index in range(30):
        for name in ("a", "b"):
            requests.append(make_request(f"{name}{index}", adapter=name, max_tokens=4))
            engine.core.add(requests[-1])
        events += engine.core.step()
        engine.core.check()
        if index == 2:  # a drains; b, which has more to do, is served as ever
            assert {request.request_id for request in requests[:2]} <= running_names(engine)
            assert "b0" in running_names(engine)
            assert "a0" not in running_names(engine)

    num_steps = next(n for n, event in enumerate(events) if event.request_id == "x")
    assert num_steps <= 6 * 8
    assert_all_solo(engine, requests, events + engine.run())


def test_nobody_gives_up_a_slot_for_an_adapter_that_only_loads() -> None:
    engine = make_engine(num_slots=1)
    engine.adapters.hold("slow")
    requests = [make_request("a0", adapter="a"), make_request("slow", adapter="slow")]
    requests.append(make_request("a1", adapter="a"))
    for request in requests:
        engine.core.add(request)

    events = engine.core.step()

    assert {event.request_id for event in events} == {"a0", "a1"}
    engine.adapters.finish_loading("slow")
    assert_all_solo(engine, requests, events + engine.run())


def test_an_adapter_is_asked_for_once_per_step_however_many_wait_for_it() -> None:
    engine = make_engine()
    engine.adapters.hold("slow")
    for index in range(5):
        engine.core.add(make_request(f"r{index}", adapter="slow"))

    engine.core.step()

    assert engine.adapters.num_lease_calls == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AdapterUnavailableError("the store has no such adapter"), "adapter_unavailable"),
        (AdapterInvalidError("digest mismatch"), "adapter_invalid"),
    ],
)
def test_a_failed_adapter_ends_only_its_requests(error: RequestRejectedError, code: str) -> None:
    engine = make_engine()
    engine.adapters.fail("bad", error)
    victims = [make_request("base"), make_request("good", adapter="good")]
    for request in (
        make_request("bad0", adapter="bad"),
        *victims,
        make_request("bad1", adapter="bad"),
    ):
        engine.core.add(request)

    events = engine.run()

    outcomes = collect_outcomes(events)
    for name in ("bad0", "bad1"):
        terminal = outcomes[name].terminal
        assert terminal is not None
        assert (terminal.finish_reason, terminal.error_code) == ("error", code)
        assert terminal.error_message == str(error)
        assert terminal.usage == Usage(prompt_tokens=0, completion_tokens=0)
    assert_all_solo(engine, victims, events)


def test_a_preempted_request_gives_its_lease_back_and_takes_a_new_one() -> None:
    engine = make_engine(num_blocks=5, max_num_seqs=2)
    requests = [
        make_request("a", adapter="a", max_tokens=14, seed=1),
        make_request("b", adapter="b", max_tokens=14, seed=2),
    ]
    for request in requests:
        engine.core.add(request)

    events = engine.run()

    assert engine.core.stats().num_preemptions_total > 0
    assert engine.adapters.num_leased == 2 + engine.core.stats().num_preemptions_total
    assert_all_solo(engine, requests, events)


def test_a_lease_that_nobody_gave_back_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine.adapters, "release", lambda digest, tenant_id: None)
    engine.core.add(make_request("r0", adapter="a"))
    run_to_end(engine.core, checks_end=False)

    assert engine.core.stats().adapter_leases == 1
    with pytest.raises(AssertionError, match="lease"):
        engine.core.check()


# ------------------------------------------------------------------ deadlines


def test_a_request_still_waiting_at_its_deadline_is_dropped_before_prefill() -> None:
    """Fault 54: work that nobody waits for any more must not push the queue further behind."""
    engine = make_engine(max_num_seqs=1)
    engine.core.add(make_request("running", max_tokens=5, deadline_unix_s=1_001))
    engine.core.step()
    engine.core.add(make_request("stale", deadline_unix_s=1_001))
    engine.core.add(make_request("patient", deadline_unix_s=2_000))
    engine.clock.now_s = 1_001

    events = engine.core.step()
    outcomes = collect_outcomes(events)

    terminal = outcomes["stale"].terminal
    assert terminal is not None
    assert (terminal.finish_reason, terminal.error_code) == ("error", "deadline_exceeded")
    assert terminal.usage == Usage(prompt_tokens=0, completion_tokens=0)
    rest = collect_outcomes(engine.run())
    assert {name for name, outcome in rest.items() if outcome.terminal} == {"running", "patient"}


def test_a_preempted_request_is_not_dropped_at_its_deadline() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=2)
    requests = [
        make_request("a", max_tokens=12, seed=1),
        make_request("b", max_tokens=12, seed=2, deadline_unix_s=1_001),
    ]
    for request in requests:
        engine.core.add(request)
    events = []
    while engine.core.stats().num_preemptions_total == 0:
        events += engine.core.step()
    engine.clock.now_s = 5_000

    assert_all_solo(engine, requests, events + engine.run())
