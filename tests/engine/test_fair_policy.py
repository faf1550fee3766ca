"""FairPolicy: shares by weight, who comes back, classes and turns, the queue's share, and its memory.

The policy alone, with requests that are admitted and charged by hand.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.policies import FairPolicy, max_charge
from loraplex_engine.policies import fair as fair_module
from loraplex_engine.policies.fair import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    QUEUE_SHARE,
    TENANT_PATIENCE,
)
from loraplex_engine.request import Request

from tests.support.engine_fakes import make_request

AGING_S = 10.0


class Stand:
    """A policy, and requests numbered as they come."""

    def __init__(self) -> None:
        self.policy = FairPolicy(AGING_S)
        self.num_made = 0
        self.now_s = 1_000.0
        self.policy.begin_step(self.now_s)

    def push(
        self,
        tenant: str,
        *,
        num_prompt: int = 10,
        max_tokens: int = 10,
        weight: float = 1.0,
        priority: int = 0,
    ) -> Request:
        generate = make_request(
            f"r{self.num_made}",
            [1] * num_prompt,
            max_tokens=max_tokens,
            tenant=tenant,
            weight=weight,
            priority=priority,
        )
        request = Request(
            seq=self.num_made,
            generate=generate,
            stop_ids=frozenset(),
            arrived_at_unix_s=self.now_s,
        )
        self.num_made += 1
        self.policy.push(request)
        return request

    def serve(self, request: Request, num_output: int = 0) -> None:
        """Admit it, have it put out tokens, and end it."""
        self.policy.admit(request)
        request.token_ids += [1] * num_output
        self.policy.charge(request)
        self.policy.leave(request)

    def serve_next(self, num_output: int = 0) -> Request:
        order = self.policy.in_order()  # kept: what it yielded is being admitted
        request = next(order)
        self.serve(request, num_output)
        return request

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.policy.begin_step(self.now_s)


def tenants(requests: list[Request]) -> list[str]:
    return [request.generate.tenant_id for request in requests]


def test_tenants_with_equal_weights_take_turns_whoever_came_first() -> None:
    stand = Stand()
    for _ in range(4):
        stand.push("noisy")
    for _ in range(4):
        stand.push("quiet")

    served = [stand.serve_next(num_output=5) for _ in range(8)]

    assert tenants(served) == ["noisy", "quiet"] * 4
    assert [r.seq for r in served if r.generate.tenant_id == "noisy"] == [0, 1, 2, 3]


def test_service_follows_weights_and_counts_tokens_not_requests() -> None:
    """x: weight 3, small requests; y: weight 1, large ones."""
    stand = Stand()
    service: Counter[str] = Counter()
    for _ in range(2_000):
        stand.push("x", num_prompt=10, weight=3.0)
        stand.push("y", num_prompt=40, weight=1.0)
    for _ in range(1_500):
        request = stand.serve_next(num_output=4)
        service[request.generate.tenant_id] += request.num_prompt_tokens + 2 * 4

    assert service["x"] / service["y"] == pytest.approx(3.0, rel=0.02)


def test_output_is_charged_as_it_comes_and_input_once() -> None:
    stand = Stand()
    request = stand.push("x", num_prompt=10, weight=2.0)
    account = stand.policy._classes[0].accounts["x"]

    stand.policy.admit(request)
    assert account.counter == 10 * INPUT_WEIGHT / 2
    for count in (1, 2):  # several at once, where drafts were accepted
        request.token_ids += [1] * count
        stand.policy.charge(request)
        stand.policy.charge(request)
    assert account.counter == (10 * INPUT_WEIGHT + 3 * OUTPUT_WEIGHT) / 2

    stand.policy.leave(request)  # preempted
    request.num_computed_tokens = 0
    stand.policy.push(request)
    stand.policy.admit(request)
    assert account.counter == (10 * INPUT_WEIGHT + 3 * OUTPUT_WEIGHT) / 2
    stand.policy.check([request])


def test_what_a_cache_hit_spares_is_not_charged() -> None:
    stand = Stand()
    request = stand.push("x", num_prompt=10)
    request.num_computed_tokens = 8

    stand.policy.admit(request)

    assert stand.policy._classes[0].accounts["x"].counter == 2 * INPUT_WEIGHT


def test_idling_saves_nothing_up_and_costs_nothing() -> None:
    stand = Stand()
    stand.push("sleeper")
    stand.serve_next()
    for _ in range(100):
        stand.push("busy")
    for _ in range(50):
        stand.serve_next()
    for _ in range(10):
        stand.push("sleeper")

    served = tenants([stand.serve_next() for _ in range(10)])

    assert served[0] == "sleeper"  # it is next, for it had nothing waiting
    assert served.count("sleeper") in (5, 6)  # but has no claim to what it did not ask for


def test_a_tenant_who_comes_back_passes_the_prefill_that_is_under_way() -> None:
    stand = Stand()
    for _ in range(3):
        stand.push("noisy", num_prompt=100)
    running = next(stand.policy.in_order())
    stand.policy.admit(running)

    quiet = stand.push("quiet")

    first = next(stand.policy.in_order())
    assert first is quiet
    assert stand.policy.prefill_rank(quiet) < stand.policy.prefill_rank(running)
    stand.policy.admit(quiet)
    behind = next(stand.policy.in_order())  # the noisy tenant's next
    assert stand.policy.prefill_rank(quiet) < stand.policy.prefill_rank(running)
    assert stand.policy.prefill_rank(running) < stand.policy.prefill_rank(behind)


def test_blocks_are_taken_from_who_had_most_and_there_from_the_latest() -> None:
    stand = Stand()
    old = [stand.push("heavy", num_prompt=50) for _ in range(3)]
    light = stand.push("light")
    urgent = stand.push("urgent", num_prompt=500, priority=1)
    for request in (*old, light, urgent):
        stand.policy.admit(request)

    ranked = sorted([*old, light, urgent], key=stand.policy.rank)

    assert ranked == [urgent, light, *old]


def test_a_skipped_request_lets_others_pass_and_its_tenant_gets_no_credit_for_it() -> None:
    stand = Stand()
    blocked = [stand.push("blocked") for _ in range(20)]
    for _ in range(50):
        stand.push("busy")

    for _ in range(20):
        for request in stand.policy.in_order():
            if request.generate.tenant_id == "busy":
                stand.serve(request)
                break
    served = tenants([stand.serve_next() for _ in range(10)])

    assert served.count("blocked") in (5, 6)
    assert blocked[0] not in list(stand.policy.requests())
    gap = stand.policy.service_gap()
    assert gap.widest <= gap.promised


def test_the_order_goes_on_after_an_admission_with_the_new_accounts() -> None:
    stand = Stand()
    for _ in range(3):
        stand.push("a")
    stand.push("b")

    served = []
    for request in stand.policy.in_order():
        stand.policy.admit(request)
        served.append(request)

    assert tenants(served) == ["a", "b", "a", "a"]
    assert len(stand.policy) == 0


# ------------------------------------------------------------------ classes and turns


def test_a_higher_class_goes_first_whatever_it_had() -> None:
    stand = Stand()
    stand.push("low")
    for _ in range(3):
        stand.push("high", priority=2, num_prompt=1000)

    assert tenants([stand.serve_next() for _ in range(4)]) == ["high"] * 3 + ["low"]


def test_a_class_that_is_passed_over_gets_a_turn_each_time_it_has_aged() -> None:
    """Bound: its k-th request is next in line after k * aging_s at the latest."""
    stand = Stand()
    low = [stand.push("low", priority=-1) for _ in range(3)]
    served: list[tuple[float, Request]] = []
    for _ in range(40):
        stand.push("high")
        order = stand.policy.in_order()
        request = next(order)
        if request in low:
            assert request.served_priority == 0
            assert stand.policy.rank(request) < stand.policy.rank(stand.push("other"))
        served.append((stand.now_s, request))
        stand.serve(request)
        stand.pass_time(1.0)

    times = [now_s - 1_000 for now_s, request in served if request in low]
    assert times == [AGING_S, 2 * AGING_S, 3 * AGING_S]


def test_a_turn_that_is_not_taken_leaves_no_mark() -> None:
    stand = Stand()
    low = stand.push("low", priority=-1)
    stand.push("high")
    stand.pass_time(AGING_S)

    order = list(stand.policy.in_order())  # nobody is admitted

    assert tenants(order) == ["low", "high", "high", "low"]  # a turn each, then as ever
    assert low.served_priority is None


def test_after_an_idle_hour_nobody_is_overdue() -> None:
    stand = Stand()
    stand.now_s += 3_600  # no step was decided meanwhile
    stand.push("low", priority=-1)
    high = stand.push("high")
    stand.policy.begin_step(stand.now_s)

    assert next(stand.policy.in_order()) is high


def test_a_tenant_is_not_starved_by_ever_new_ones() -> None:
    """Each new tenant is level with the least account, so one who had more would never be it."""
    stand = Stand()
    stand.push("heavy", num_prompt=10_000)
    stand.serve_next()
    waiting = stand.push("heavy")

    for count in range(1_000):
        stand.push(f"new-{count}")
        if stand.serve_next() is waiting:
            break
        stand.pass_time(1.0)

    assert waiting not in list(stand.policy.requests())
    assert stand.now_s - 1_000 <= TENANT_PATIENCE * AGING_S


# ------------------------------------------------------------------ the queue and memory


@pytest.mark.parametrize("num_noisy", [1, 2, 5])
def test_noisy_tenants_leave_places_in_the_queue_for_who_comes_new(num_noisy: int) -> None:
    stand, size = Stand(), 100
    queued: Counter[str] = Counter()
    for count in range(1_000):
        tenant = f"noisy-{count % num_noisy}"
        if stand.policy.has_place_for(tenant, size - len(stand.policy)):
            stand.push(tenant)
            queued[tenant] += 1

    assert len(stand.policy) < size
    assert min(queued.values()) >= max(queued.values()) - 1
    assert sum(queued.values()) >= 0.9 * size - 1
    assert stand.policy.has_place_for("new", size - len(stand.policy))
    assert not stand.policy.has_place_for("new", 0)


def test_many_at_once_are_queued_as_they_would_be_one_by_one() -> None:
    stand = Stand()
    assert stand.policy.has_place_for("x", 10, 10)  # all of an empty queue
    assert not stand.policy.has_place_for("x", 10, 11)
    for _ in range(5):
        stand.push("x")

    allowed = [count for count in range(1, 11) if stand.policy.has_place_for("x", 10, count)]

    num_queued = 0  # one by one: 5 + num_queued < 9 * (10 - num_queued)
    while 5 + num_queued < QUEUE_SHARE * (10 - num_queued):
        num_queued += 1
    assert allowed == list(range(1, num_queued + 1))


def test_a_push_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tenant that is new, one that came back, and one that waits: no queue, weight or time of theirs."""
    stand = Stand()
    stand.serve(stand.push("back"), num_output=5)
    stand.push("waits")
    stand.serve(stand.push("busy"), num_output=50)
    before = {t: vars_of(stand, t) for t in ("back", "waits")}
    stand.pass_time(5.0)

    def fail(*args: object, **named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(fair_module, "insort", fail)
    for tenant in ("new", "back", "waits"):
        with pytest.raises(MemoryError):
            stand.push(tenant, weight=0.5)
    monkeypatch.undo()

    stand.policy.check([])
    assert len(stand.policy) == 1
    assert tenants(list(stand.policy.requests())) == ["waits"]
    assert tenants(list(stand.policy.in_order())) == ["waits"]
    assert {t: vars_of(stand, t) for t in before} == before
    stand.push("new")
    stand.push("back")
    stand.policy.check([])
    assert len(stand.policy) == 3


def vars_of(stand: Stand, tenant: str) -> tuple[float, ...]:
    account = stand.policy._classes[0].accounts[tenant]
    return account.weight, account.counter, account.waits_since_unix_s, len(account.waiting)


def test_the_bound_is_of_the_weights_of_who_is_there() -> None:
    stand = Stand()
    stand.policy = FairPolicy(AGING_S, most_charged=100.0)
    assert stand.policy.service_gap().bound == 100.0
    light = stand.push("light", weight=0.01)
    heavy = stand.push("heavy", weight=4.0)
    assert stand.policy.service_gap().bound == pytest.approx(10_000.0)

    stand.policy.admit(light)
    assert stand.policy.service_gap().bound == pytest.approx(10_000.0)  # it runs
    stand.policy.leave(light)

    assert stand.policy.service_gap().bound == 25.0
    stand.serve(heavy)


def test_idle_tenants_and_classes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 57: nothing grows with the number of tenants served."""
    monkeypatch.setattr(fair_module, "MAX_IDLE_ACCOUNTS", 8)
    stand = Stand()
    stand.policy._classes[0] = fair_module._Class(0, forget_beyond=8)
    running = stand.push("runs")
    stand.policy.admit(running)
    for count in range(500):
        stand.push(f"t{count}", priority=count % 2)
        stand.serve_next()
        stand.push("p", priority=count + 10)
        stand.serve_next()

    assert sum(len(group.accounts) for group in stand.policy._classes.values()) < 200
    assert len(stand.policy._classes) <= fair_module.MAX_IDLE_CLASSES + 1
    stand.policy.check([running])


def test_the_bound_is_the_papers_where_admission_reserves() -> None:
    sizes = {"max_model_len": 100, "max_num_seqs": 8, "num_kv_tokens": 500}

    assert max_charge(**sizes, is_reserving=False) == OUTPUT_WEIGHT * 800
    # max(w_p * L_input, w_q * M), and an output token is not cheaper than an input token.
    assert max_charge(**sizes, is_reserving=True) == max(INPUT_WEIGHT * 100, OUTPUT_WEIGHT * 500)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_accounts_of_waiting_tenants_stay_within_what_was_promised(seed: int) -> None:
    """Random arrivals, rows that run at once, and weights; the service measured from outside as well."""
    draw = random.Random(seed)
    stand = Stand()
    weights = {"x": 1.0, "y": 0.5, "z": 4.0}
    running: list[tuple[Request, int]] = []
    service = dict.fromkeys(weights, 0.0)
    ranges: dict[tuple[str, str], tuple[float, float]] = {}
    widest = 0.0
    for _ in range(150):
        for tenant, weight in weights.items():
            if draw.random() < 0.4:
                stand.push(
                    tenant,
                    num_prompt=draw.randrange(1, 40),
                    max_tokens=draw.randrange(1, 30),
                    weight=weight,
                )
        stand.policy.begin_step(stand.now_s)
        for request in stand.policy.in_order():
            if len(running) == 4:
                break
            running.append((request, draw.randrange(1, request.sampling.max_tokens + 1)))
            service[request.generate.tenant_id] += INPUT_WEIGHT * request.num_prompt_tokens
            stand.policy.admit(request)
        for entry in list(running):
            request, num_output = entry
            request.token_ids.append(1)
            service[request.generate.tenant_id] += OUTPUT_WEIGHT
            stand.policy.charge(request)
            if request.num_output_tokens == num_output:
                stand.policy.leave(request)
                running.remove(entry)
        stand.policy.check([request for request, _ in running])
        waiting = sorted(set(tenants(list(stand.policy.requests()))))
        seen = {}
        for index, one in enumerate(waiting):
            for other in waiting[index + 1 :]:
                now = service[one] / weights[one] - service[other] / weights[other]
                least, most = ranges.get((one, other), (now, now))
                seen[one, other] = (min(least, now), max(most, now))
                widest = max(widest, seen[one, other][1] - seen[one, other][0])
        ranges = seen

    gap = stand.policy.service_gap()
    assert 0 < gap.widest <= gap.promised + 1e-6
    assert widest <= 2 * gap.promised + 1e-6
    assert gap.promised <= max_charge(
        max_model_len=69, max_num_seqs=4, num_kv_tokens=10**9, is_reserving=False
    ) / min(weights.values())
