"""Scheduling under any sequence of calls: each policy, both admissions, drafts, pools of a few blocks.

Whatever happens: the invariants hold after every call, a step computes something if anything can run,
every request ends exactly once with the tokens it would get alone, `reserve` never preempts, and tenants'
accounts stay within the published bound.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loraplex_engine.config import Admission, PolicyName
from loraplex_engine.errors import (
    AdapterUnavailableError,
    NeverFitsError,
    QueueFullError,
    RequestRejectedError,
)
from loraplex_engine.policies import make_policy, max_charge
from loraplex_engine.protocol import Generate, TokenEvent
from loraplex_engine.speculative import Drafter

from tests.support.choice_outcomes import collect_choices, solo_choices
from tests.support.engine_fakes import digest, make_engine, make_request
from tests.support.oracle_drafts import Oracle, choices_of

ADAPTERS = ("a", "b", "broken")
WEIGHTS = {"x": 1.0, "y": 0.5, "z": 4.0}
NEVER_S = 1e9  # aging that does not happen
MAX_MODEL_LEN = 24


class SchedulingMachine(RuleBasedStateMachine):
    """See the module's header."""

    @initialize(
        policy=st.sampled_from(["fair", "priority", "fcfs"]),
        aging_s=st.sampled_from([1.0, NEVER_S]),
        admission=st.sampled_from(["optimistic", "reserve"]),
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        threshold=st.none() | st.integers(1, 6),
        cap=st.none() | st.integers(1, 2),
        ratio=st.sampled_from([0.0, 0.0, 1.0, 3.0]),
        watermark=st.integers(0, 2),
        num_slots=st.integers(1, 2),
        has_prefix_cache=st.booleans(),
        lie_every=st.sampled_from([None, None, 0, 2, 5]),
    )
    def start(
        self,
        policy: PolicyName,
        aging_s: float,
        admission: Admission,
        num_blocks: int,
        block_size: int,
        rows: int,
        extra_budget: int,
        threshold: int | None,
        cap: int | None,
        ratio: float,
        watermark: int,
        num_slots: int,
        has_prefix_cache: bool,
        lie_every: int | None,
    ) -> None:
        self.oracle = Oracle(lie_every=lie_every or 0)
        most_charged = max_charge(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=rows,
            num_kv_tokens=num_blocks * block_size,
            # What tenants share of a prompt they hold once and are charged for once.
            is_reserving=admission == "reserve",
        )
        self.engine = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=rows + extra_budget,
            max_num_seqs=rows,
            max_waiting=12,
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=threshold,
            max_partial_prefills=cap,
            waiting_served_ratio=ratio,
            max_steps_closed=3,
            watermark_blocks=watermark,
            admission=admission,
            num_slots=num_slots,
            has_prefix_cache=has_prefix_cache,
            drafter=None if lie_every is None else Drafter(self.oracle, 3),
            policy=make_policy(policy, aging_s=aging_s, most_charged=most_charged),
        )
        self.widest_bound = most_charged / min(WEIGHTS.values())
        self.admission = admission
        self.is_fair = policy == "fair"  # a tenant alone gets nine tenths of the queue
        self.has_turns = aging_s < NEVER_S
        self.engine.adapters.fail("broken", AdapterUnavailableError("gone"))
        self.requests: dict[str, Generate] = {}
        self.events: list[TokenEvent] = []
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        adapter=st.none() | st.sampled_from(ADAPTERS),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        priority=st.integers(-1, 1),
        patience_s=st.none() | st.floats(0.0, 3.0),
        seed=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        adapter: str | None,
        tenant: str,
        priority: int,
        patience_s: float | None,
        seed: int,
        n: int,
    ) -> None:
        name = f"r{len(self.requests)}"
        now_s = self.engine.clock.now_s
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens,
            adapter=adapter,
            tenant=tenant,
            weight=WEIGHTS[tenant],
            priority=priority,
            deadline_unix_s=None if patience_s is None else now_s + patience_s,
            seed=seed,
            n=n,
        )
        refusal: RequestRejectedError | None = None
        try:
            self.engine.core.add(request)
        except RequestRejectedError as error:
            refusal = error
        if refusal is None:
            self.requests[name] = request
            self.oracle.requests += choices_of(request)
        elif isinstance(refusal, NeverFitsError):
            bound = min(MAX_MODEL_LEN, self.engine.scheduler.num_kv_slots)
            assert len(prompt) + max_tokens > bound
        else:
            assert isinstance(refusal, QueueFullError)
            assert refusal.num_waiting == self.engine.scheduler.num_waiting
            assert refusal.num_waiting + n >= (11 if self.is_fair else 13)
            assert refusal.retry_after_s

    @rule(count=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.1, 1.0]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.engine.clock.now_s += seconds
            must_progress = self.can_run()
            events = self.engine.core.step()
            self.events += events
            if must_progress:
                has_ended = any(event.finish_reason for event in events)
                assert self.engine.core.last_step_num_tokens > 0 or has_ended
            self.engine.core.check()

    def can_run(self) -> bool:
        if self.engine.scheduler.num_running:
            return True
        held_back = self.engine.adapters.held_back
        groups = self.engine.core._live.values()
        return any(group.generate.adapter_digest not in held_back for group in groups)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_in_flight=st.booleans())
    def abort(self, data: st.DataObject, is_in_flight: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if is_in_flight:
            self.engine.runner.in_flight_hook = lambda: self.abort_now(name)
        else:
            self.abort_now(name)

    def abort_now(self, name: str) -> None:
        if (name, 0) in self.engine.core._live:
            self.aborted.add(name)
        self.engine.core.abort(name, 0)

    @rule(name=st.sampled_from(ADAPTERS), holds=st.booleans())
    def load_adapter(self, name: str, holds: bool) -> None:
        if holds:
            self.engine.adapters.hold(name)
        else:
            self.engine.adapters.finish_loading(name)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "engine"):
            self.engine.core.check()

    @invariant()
    def accounts_are_within_the_bound(self) -> None:
        gap = self.engine.scheduler.service_gap if hasattr(self, "engine") else None
        if gap is not None:
            assert gap.widest <= gap.promised + 1e-9
            # Since the start, whoever has left since; `gap.bound` is of those who are there.
            assert self.has_turns or gap.promised <= self.widest_bound + 1e-9
            assert gap.bound <= self.widest_bound + 1e-9

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for name in ADAPTERS:
            engine.adapters.finish_loading(name)
        self.events += engine.run()
        engine.assert_idle()
        outcomes = collect_choices(self.events)
        assert set(outcomes) == set(self.requests)
        for name, request in self.requests.items():
            outcome, expected = outcomes[name], dict(enumerate(solo_choices(request)))
            terminal = outcome.terminal
            assert terminal is not None
            for index, token_ids in outcome.tokens.items():
                assert token_ids == expected[index][0][: len(token_ids)]
            if name in self.aborted:
                assert terminal.finish_reason == "abort"
            elif terminal.error_code == "deadline_exceeded":
                assert request.deadline_unix_s is not None
                assert not any(outcome.tokens.values())
            elif request.adapter_digest == digest("broken"):
                assert terminal.error_code == "adapter_unavailable"
            else:
                said = {i: (outcome.tokens[i], outcome.reasons[i]) for i in outcome.tokens}
                assert said == expected
        if self.admission == "reserve":
            assert engine.core.stats().num_preemptions_total == 0


SchedulingMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_sequence_of_calls = SchedulingMachine.TestCase


class LongSchedulingMachine(SchedulingMachine):
    """The same for longer."""


LongSchedulingMachine.TestCase.settings = settings(
    SchedulingMachine.TestCase.settings, max_examples=1_500, stateful_step_count=50
)
test_many_sequences_of_calls = pytest.mark.slow(
    pytest.mark.timeout(3_600)(LongSchedulingMachine.TestCase)
)
