"""Who gets in and who gives way: reserve and optimistic admission, caps on prefills, the served ratio,
deadlines, the queue's state in a refusal, victims, and that nobody waits for ever.
"""

from __future__ import annotations

from typing import Any

import pytest
from loraplex_engine.config import PolicyName
from loraplex_engine.errors import InvalidRequestError, QueueFullError
from loraplex_engine.policies import FairPolicy, FcfsPolicy, Policy, PriorityPolicy, make_policy
from loraplex_engine.protocol import Generate, TokenEvent, Usage
from loraplex_engine.request import BlockReason, Request, RequestStatus

from tests.support.engine_fakes import (
    FakeEngine,
    collect_outcomes,
    make_engine,
    make_request,
    solo_output,
)


def running(engine: FakeEngine) -> list[str]:
    return [request.generate.request_id for request in engine.scheduler._running]


def first_seen(events: list[TokenEvent]) -> list[str]:
    return list(dict.fromkeys(event.request_id for event in events))


def live(engine: FakeEngine, request_id: str) -> Request:
    return engine.core._live[request_id, 0].choices[0]


def assert_all_solo(engine: FakeEngine, requests: list[Generate], events: list[TokenEvent]) -> None:
    outcomes = collect_outcomes(events)
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.terminal is not None
        assert (outcome.token_ids, outcome.terminal.finish_reason) == solo_output(request)
    engine.assert_idle()


# ------------------------------------------------------------------ reserve and optimistic


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_reserve_never_preempts_where_optimistic_must(admission: Any) -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=4, admission=admission)
    requests = [make_request(f"r{n}", [1, 2], max_tokens=13, seed=n) for n in range(6)]
    for request in requests:
        engine.core.add(request)

    events = engine.core.step()
    num_running = len(running(engine))
    events += engine.run()

    assert num_running == (
        2 if admission == "reserve" else 4
    )  # 4 blocks each in the end, 1 at first
    assert (engine.core.stats().num_preemptions_total > 0) == (admission == "optimistic")
    assert_all_solo(engine, requests, events)


def test_reserve_counts_what_is_promised_not_what_is_held() -> None:
    engine = make_engine(num_blocks=10, admission="reserve")
    engine.core.add(make_request("long", [1], max_tokens=30))  # 8 blocks, 1 held
    engine.core.step()
    assert engine.pool.num_free == 9

    engine.core.add(make_request("too much", [1, 2, 3, 4, 5], max_tokens=5))  # 3
    engine.core.step()
    assert running(engine) == ["long"]
    engine.core.abort("too much", 0)
    engine.core.add(make_request("fits", [1, 2, 3, 4, 5], max_tokens=3))  # 2
    engine.core.step()
    assert running(engine) == ["long", "fits"]


def test_reserve_knows_of_blocks_that_no_request_holds() -> None:
    engine = make_engine(num_blocks=8, admission="reserve")
    pinned = engine.pool.take(5)
    request = make_request("r", [1, 2, 3], max_tokens=12)  # 4 blocks
    engine.core.add(request)
    for _ in range(3):
        engine.core.step()
    assert running(engine) == []

    engine.pool.release(pinned)

    assert_all_solo(engine, [request], engine.run())
    assert engine.core.stats().num_preemptions_total == 0


def test_a_step_that_preempts_admits_nobody() -> None:
    """What it freed would go to whoever is preempted next, and back: thrash."""
    engine = make_engine(num_blocks=7, max_num_seqs=4)
    requests = [
        make_request("grows", [1, 2, 3], max_tokens=12, seed=1),
        make_request("large", [1] * 23, max_tokens=3, seed=2),
    ]
    for request in requests:
        engine.core.add(request)
    events = engine.core.step()
    requests.append(make_request("fits at once", [1], max_tokens=1, priority=1))
    engine.core.add(requests[-1])

    while engine.core.has_work():
        num_before = engine.core.stats().num_preemptions_total
        events += engine.core.step()
        if engine.core.stats().num_preemptions_total > num_before:
            assert not engine.runner.steps[-1].new_rows
        engine.core.check()

    assert engine.core.stats().num_preemptions_total > 0
    assert_all_solo(engine, requests, events)


def test_the_tenant_who_had_most_gives_way_latest_request_first() -> None:
    engine = make_engine(num_blocks=9, max_num_seqs=5, policy=FairPolicy(30.0))
    requests = [make_request(f"heavy{n}", max_tokens=13, tenant="heavy", seed=n) for n in range(3)]
    for request in requests:
        engine.core.add(request)
    events = engine.core.step()
    late = make_request("late", max_tokens=13, tenant="light", seed=9)
    engine.core.add(late)

    order: list[str] = []
    while engine.core.has_work():
        before = set(running(engine))
        events += engine.core.step()
        ended = {event.request_id for event in events if event.finish_reason}
        order += sorted(before - set(running(engine)) - ended)
        engine.core.check()

    assert order[0] == "heavy2"
    assert "late" not in order  # though it came last
    assert_all_solo(engine, [*requests, late], events)


def test_a_preempted_request_is_not_overtaken_for_ever() -> None:
    """Under a stream of requests of others that would always fit."""
    engine = make_engine(num_blocks=8, max_num_seqs=4, policy=FairPolicy(30.0))
    requests = [
        make_request("first", [1] * 8, max_tokens=14, tenant="a", seed=1),
        make_request("victim", [1] * 8, max_tokens=14, tenant="b", seed=2),
    ]
    for request in requests:
        engine.core.add(request)
    events: list[TokenEvent] = []
    for count in range(60):
        requests.append(make_request(f"c{count}", [1], max_tokens=2, tenant="c", seed=count))
        engine.core.add(requests[-1])
        events += engine.core.step()
        engine.core.check()

    assert engine.core.stats().num_preemptions_total > 0
    ended = {event.request_id for event in events if event.finish_reason}
    assert {"first", "victim"} <= ended
    assert_all_solo(engine, requests, events + engine.run())


# ------------------------------------------------------------------ caps on prefills


def test_short_prompts_pass_long_ones_beyond_the_cap() -> None:
    engine = make_engine(
        max_num_batched_tokens=16, long_prefill_token_threshold=8, max_partial_prefills=1
    )
    requests = [make_request(f"long{n}", [1 + n] * 30, max_tokens=1) for n in range(2)]
    requests.append(make_request("short", [1, 2, 3], max_tokens=1))
    for request in requests:
        engine.core.add(request)

    events = engine.core.step()

    assert running(engine) == ["long0"]
    assert first_seen(events) == ["short"]
    waiting = live(engine, "long1")
    assert (waiting.blocked_on, waiting.num_skips) == (BlockReason.PARTIAL_PREFILLS, 1)
    assert engine.core.stats().skips_total == {"partial_prefills": 1}
    events += engine.run()
    assert first_seen(events) == ["short", "long0", "long1"]
    assert_all_solo(engine, requests, events)


def test_the_cap_counts_prefills_that_go_on_after_the_step() -> None:
    engine = make_engine(max_num_batched_tokens=16, max_partial_prefills=1)
    engine.core.add(make_request("a", [1] * 20, max_tokens=4))
    engine.core.step()
    engine.core.add(make_request("b", [2] * 20, max_tokens=4))

    engine.core.step()  # a's prefill ends in it, so b's may begin

    assert running(engine) == ["a", "b"]


def test_a_prefill_under_way_is_not_starved_by_those_who_pass_it() -> None:
    engine = make_engine(
        max_num_batched_tokens=32, max_num_seqs=8, num_blocks=400, policy=FairPolicy(30.0)
    )
    engine.core.add(make_request("long", [1] * 50, max_tokens=2, tenant="long"))
    engine.core.step()
    events: list[TokenEvent] = []
    for count in range(40):  # each of a new tenant, each enough for a whole step
        engine.core.add(make_request(f"n{count}", [2] * 32, max_tokens=1, tenant=f"t{count}"))
        events += engine.core.step()

    order = first_seen(events)
    assert order.index("n0") < order.index("long") < len(order) - 1  # passed, but not by all


# ------------------------------------------------------------------ waiting_served_ratio


def test_admission_waits_until_enough_wait_for_each_that_runs() -> None:
    engine = make_engine(max_num_seqs=8, waiting_served_ratio=1.0)
    for n in range(2):
        engine.core.add(make_request(f"r{n}", max_tokens=30))
    engine.core.step()
    engine.core.add(make_request("third", max_tokens=30))
    for _ in range(3):
        engine.core.step()
        assert running(engine) == ["r0", "r1"]  # 1 waits, 2 run

    engine.core.add(make_request("fourth", max_tokens=30))
    engine.core.step()

    assert running(engine) == ["r0", "r1", "third", "fourth"]


def test_admission_never_stays_closed_for_long() -> None:
    engine = make_engine(max_num_seqs=8, waiting_served_ratio=100.0, max_steps_closed=5)
    engine.core.add(make_request("runs", max_tokens=40))
    engine.core.step()
    engine.core.add(make_request("waits", max_tokens=1))

    num_steps = 0
    while len(engine.core._live) == 2:
        engine.core.step()
        num_steps += 1

    assert num_steps == 6


def test_the_ratio_trades_time_to_first_token_for_steady_streams() -> None:
    """TGI's trade: fewer steps hold a prefill, and a request waits longer for its first token."""
    steps: dict[float, int] = {}
    first: dict[float, int] = {}
    for ratio in (0.0, 2.0):
        engine = make_engine(max_num_seqs=8, max_model_len=200, waiting_served_ratio=ratio)
        engine.core.add(make_request("stream", max_tokens=40))
        waits = []
        for count in range(20):
            engine.core.add(make_request(f"r{count}", max_tokens=1))
            events = engine.core.step() + engine.core.step()
            waits.append(any(event.request_id == f"r{count}" for event in events))
        steps[ratio] = sum(bool(step.new_rows) for step in engine.runner.steps[1:])
        first[ratio] = sum(waits)

    assert steps[2.0] < steps[0.0] / 1.5
    assert first[2.0] < first[0.0]


# ------------------------------------------------------------------ deadlines and refusals


def test_expiry_of_a_long_queue_looks_at_nobody_else() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=5_000)
    engine.core.add(make_request("runs", max_tokens=30, deadline_unix_s=1_001))
    engine.core.step()
    for n in range(2_000):
        engine.core.add(make_request(f"r{n}", deadline_unix_s=1_010 + n))
    scheduler = engine.scheduler
    heap = scheduler._deadlines
    engine.core.step()
    assert scheduler._deadlines is heap
    assert len(heap) == 2_001  # nothing was due, nothing was touched

    engine.clock.now_s = 1_012

    events = engine.core.step()
    expired = {event.request_id for event in events if event.error_code == "deadline_exceeded"}
    assert expired == {"r0", "r1", "r2"}
    assert len(heap) == 2_001 - 4


def test_deadlines_of_served_requests_do_not_pile_up() -> None:
    """Fault 57."""
    engine = make_engine()
    for n in range(500):
        engine.core.add(make_request(f"r{n}", max_tokens=1, deadline_unix_s=1e9))
        engine.run()

    assert len(engine.scheduler._deadlines) <= 66


def test_a_disconnected_request_is_dropped_before_its_prefill() -> None:
    """Fault 54."""
    engine = make_engine(max_num_seqs=1)
    for name in ("runs", "gone", "next"):
        engine.core.add(make_request(name, max_tokens=3))
    events = engine.core.step()

    engine.core.abort("gone", 0)
    events += engine.run()

    terminal = collect_outcomes(events)["gone"].terminal
    assert terminal is not None
    assert terminal.usage == Usage(prompt_tokens=0, completion_tokens=0)
    assert sum(len(step.new_rows) for step in engine.runner.steps) == 2


def test_goodput_recovers_at_once_after_a_flood_of_stale_requests() -> None:
    """Fault 54: a queue of work that nobody waits for must not be worked off first."""
    engine = make_engine(max_num_seqs=2, max_waiting=1_000)
    for n in range(900):
        engine.core.add(make_request(f"flood{n}", max_tokens=8, deadline_unix_s=1_005))
    engine.core.step()
    engine.clock.now_s = 1_006
    fresh = make_request("fresh", max_tokens=2, deadline_unix_s=1_020)
    engine.core.add(fresh)

    num_steps = 0
    while ("fresh", 0) in engine.core._live:
        engine.core.step()
        num_steps += 1

    assert num_steps <= 9  # those that run, then it


def test_a_refusal_says_how_long_the_queue_is_and_when_to_come_again() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=40)
    for n in range(40):
        engine.core.add(make_request(f"r{n}", max_tokens=1))
    with pytest.raises(QueueFullError) as unmeasured:
        engine.core.add(make_request("refused", max_tokens=1))
    assert (unmeasured.value.num_waiting, unmeasured.value.retry_after_s) == (40, 1.0)

    for n in range(20):  # one request leaves the queue every 2 s
        engine.clock.now_s += 2
        engine.core.step()
        engine.core.add(make_request(f"more{n}", max_tokens=1))
    with pytest.raises(QueueFullError) as refusal:
        engine.core.add(make_request("refused", max_tokens=1))

    assert refusal.value.num_waiting == 40
    assert refusal.value.retry_after_s == pytest.approx(40 / 10 * 2, rel=0.1)


def test_a_noisy_tenant_cannot_close_the_queue_to_others() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=20, policy=FairPolicy(30.0))
    for n in range(18):
        engine.core.add(make_request(f"noisy{n}", max_tokens=1, tenant="noisy"))
    with pytest.raises(QueueFullError) as refusal:
        engine.core.add(make_request("refused", max_tokens=1, tenant="noisy"))
    assert refusal.value.num_waiting == 18

    engine.core.add(make_request("quiet", max_tokens=1, tenant="quiet"))

    assert first_seen(engine.run())[:2] == ["noisy0", "quiet"]


@pytest.mark.parametrize("policy", [FcfsPolicy(), FairPolicy(30.0)], ids=["fcfs", "fair"])
def test_each_choice_takes_a_place_in_the_queue(policy: Policy) -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=8, policy=policy)
    engine.core.add(make_request("one", max_tokens=1, tenant="a"))
    with pytest.raises(QueueFullError):
        engine.core.add(make_request("eight", n=8, max_tokens=1, tenant="a"))
    with pytest.raises(InvalidRequestError, match="n is 9"):
        engine.core.add(make_request("nine", n=9, max_tokens=1, tenant="a"))
    assert engine.scheduler.num_waiting == 1

    engine.core.add(make_request("six", n=6, max_tokens=1, tenant="a"))
    engine.core.add(make_request("other", max_tokens=1, tenant="b"))

    assert engine.scheduler.num_waiting == 8
    engine.run()
    engine.core.add(make_request("eight", n=8, max_tokens=1, tenant="a"))  # the queue is empty
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("num_low", [1, 3])
@pytest.mark.parametrize("name", ["fair", "fcfs"])
def test_higher_classes_do_not_stop_prefills_under_way(name: PolicyName, num_low: int) -> None:
    """There is always more of the higher class than a step can take, and nothing ages in here."""
    engine = make_engine(
        num_blocks=2_048,
        max_num_seqs=16,
        max_model_len=256,
        policy=make_policy(name, aging_s=30.0, most_charged=1e9),
    )
    for count in range(num_low):
        engine.core.add(
            make_request(f"low{count}", [5 + count] * 200, max_tokens=2, tenant=f"low{count}")
        )
    for _ in range(num_low):
        engine.core.step()
    under_way = running(engine)
    events: list[TokenEvent] = []
    num_high = 0
    for _ in range(400):
        while engine.scheduler.num_waiting < 5:
            prompt = [1 + num_high % 90] * 32
            high = make_request(f"high{num_high}", prompt, max_tokens=1, priority=5, tenant="high")
            engine.core.add(high)
            num_high += 1
        events += engine.core.step()

    assert len(under_way) == (num_low if name == "fair" else 1)  # the others' turn never comes
    assert [name for name in first_seen(events) if name.startswith("low")] == under_way


# ------------------------------------------------------------------ nobody waits for ever


def test_a_low_priority_is_served_within_the_aging_window() -> None:
    aging_s = 5.0
    policy = PriorityPolicy(aging_s)
    engine = make_engine(max_num_seqs=1, policy=policy)
    engine.core.add(make_request("low", max_tokens=1, priority=-1))
    arrived: dict[str, float] = {}
    order: list[str] = []
    for n in range(40):
        name = f"high{n}"
        arrived[name] = engine.clock.now_s
        engine.core.add(make_request(name, max_tokens=1, priority=1))
        order += first_seen(engine.core.step())
        engine.clock.now_s += 1.0

    window_s = policy.overtaking_window_s(-1, 1)
    before = order[: order.index("low")]
    assert window_s == 2 * aging_s
    assert before  # it was passed
    assert all(arrived[name] <= 1_000 + window_s for name in before)
    assert policy.overtaking_window_s(1, -1) == 0


def test_a_priority_needs_a_time_to_age() -> None:
    with pytest.raises(ValueError, match="aging_s"):
        PriorityPolicy(0.0)
    with pytest.raises(ValueError, match="aging_s"):
        FairPolicy(-1.0)


def test_a_large_request_at_the_head_is_neither_starved_nor_in_the_way_for_ever() -> None:
    """Fair policy: the head lacks room, so nobody passes; what runs ends, and it is its turn."""
    engine = make_engine(num_blocks=12, max_num_seqs=4, policy=FairPolicy(30.0))
    requests = [make_request("runs", [1] * 20, max_tokens=8, tenant="a")]
    engine.core.add(requests[0])
    events = engine.core.step()
    requests.append(make_request("large", [1] * 40, max_tokens=4, tenant="b"))
    requests += [make_request(f"small{n}", [1], max_tokens=1, tenant=f"s{n}") for n in range(9)]
    for request in requests[1:]:
        engine.core.add(request)

    events += engine.run()

    admitted = [len(new.token_ids) for step in engine.runner.steps for new in step.new_rows]
    assert admitted == [20, 40, *[1] * 9]
    assert_all_solo(engine, requests, events)


def test_a_hot_adapter_of_one_tenant_does_not_starve_the_others() -> None:
    """lora.md 41: per-tenant turns, and a slot that is drained for who lacks one."""
    engine = make_engine(num_slots=1, max_num_seqs=4, policy=FairPolicy(30.0))
    requests = [make_request("hot", adapter="hot", max_tokens=4, tenant="hot")]
    engine.core.add(requests[0])
    engine.core.step()
    requests.append(make_request("cold", adapter="cold", max_tokens=4, tenant="cold"))
    requests.append(make_request("base", max_tokens=4, tenant="plain"))
    for request in requests[1:]:
        engine.core.add(request)
    seen: list[str] = []
    for n in range(20):
        engine.core.add(make_request(f"hot{n}", adapter="hot", max_tokens=4, tenant="hot"))
        seen += first_seen(engine.core.step())
        if n == 0:
            assert live(engine, "cold").blocked_on is BlockReason.ADAPTER_SLOT

    assert {"cold", "base"} <= set(seen)
    assert seen.index("cold") < 16


def test_a_large_request_whose_adapter_loads_does_not_hold_the_queue_for_want_of_room() -> None:
    """It would be skipped if there were room, so it is skipped without."""
    engine = make_engine(num_blocks=10, max_num_seqs=4)
    engine.adapters.hold("slow")
    engine.core.add(make_request("runs", [1] * 8, max_tokens=20))
    engine.core.step()
    engine.core.add(make_request("large", [1] * 36, max_tokens=2, adapter="slow"))
    engine.core.add(make_request("small", [1], max_tokens=1))

    events = engine.core.step()
    assert "small" in first_seen(events)

    engine.adapters.finish_loading("slow")
    engine.core.add(make_request("later", [1], max_tokens=1))
    events = engine.core.step()
    assert first_seen(events) == ["runs"]  # now it is the head that lacks room
    assert engine.adapters.num_leases == 0
    assert first_seen(events + engine.run()) == ["runs", "large", "later"]
    engine.assert_idle()


def test_a_blocked_request_says_why_and_how_often_it_was_skipped() -> None:
    engine = make_engine()
    engine.adapters.hold("slow")
    engine.core.add(make_request("slow", adapter="slow"))
    engine.core.add(make_request("base", max_tokens=9))

    for _ in range(3):
        engine.core.step()

    request = live(engine, "slow")
    assert (request.blocked_on, request.num_skips) == (BlockReason.ADAPTER_LOADING, 3)
    assert engine.core.stats().skips_total == {"adapter_loading": 3}
    engine.adapters.finish_loading("slow")
    engine.core.step()
    assert request.blocked_on is None


def test_a_slot_refused_for_its_tenants_share_is_not_taken_for_a_load() -> None:
    engine = make_engine(num_slots=2)
    engine.adapters.beyond_share.add("noisy")
    engine.core.add(make_request("noisy", adapter="a", tenant="noisy"))
    engine.core.add(make_request("quiet", adapter="b", tenant="quiet", max_tokens=9))

    for _ in range(3):
        engine.core.step()

    assert live(engine, "noisy").blocked_on is BlockReason.ADAPTER_SHARE
    assert live(engine, "quiet").status is RequestStatus.RUNNING
    assert engine.core.stats().skips_total == {"adapter_share": 3}
    engine.adapters.beyond_share.clear()
    engine.run()
    engine.assert_idle()


# ------------------------------------------------------------------ what is counted


def test_stats_tell_waits_and_classes() -> None:
    engine = make_engine(max_num_seqs=1, num_blocks=5)
    for n, priority in enumerate((3, 0, 0)):
        engine.core.add(make_request(f"r{n}", max_tokens=2, priority=priority))
    assert engine.core.stats().waiting_by_priority == {0: 2, 3: 1}
    engine.core.step()
    assert engine.core.stats().waiting_by_priority == {0: 2}

    engine.clock.now_s += 3.0
    engine.run()

    stats = engine.core.stats()
    assert stats.waiting_by_priority == {}
    assert sum(stats.queue_time_counts) == 3
    assert stats.queue_time_counts[0] == 1
    assert stats.queue_time_seconds_total == pytest.approx(6.0)
    assert (stats.service_gap, stats.service_gap_promised, stats.service_gap_bound) == (0, 0, 0)


def test_a_resumed_request_has_waited_only_once() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=2)
    for n in range(2):
        engine.core.add(make_request(f"r{n}", max_tokens=12, seed=n))

    engine.run()

    stats = engine.core.stats()
    assert stats.num_preemptions_total > 0
    assert sum(stats.queue_time_counts) == 2
