"""The core with a prefix cache, on fakes: who finds what, who waits for whom, and what is never kept.

The fake runner reads each row's context back through its block table, so a hit on foreign, stale or
half-written contents is a wrong token or an assertion, not only a wrong count.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loraplex_engine.errors import NeverFitsError, QueueFullError
from loraplex_engine.protocol import Generate, TokenEvent, Usage
from loraplex_engine.request import BlockReason, Request
from loraplex_engine.speculative import Ask, Drafter

from tests.support.choice_outcomes import Choices, collect_choices, solo_choices
from tests.support.engine_fakes import (
    VOCAB_SIZE,
    FakeEngine,
    collect_outcomes,
    digest,
    make_engine,
    make_request,
    solo_output,
)

PROMPT = list(range(1, 18))  # four blocks of four, and one token


def cached_engine(**settings: object) -> FakeEngine:
    return make_engine(has_prefix_cache=True, **settings)  # type: ignore[arg-type] # by keyword


def serve(engine: FakeEngine, *requests: Generate) -> dict[str, Usage]:
    """Run requests together until all have ended with what they say alone; their usage."""
    for request in requests:
        engine.core.add(request)
    outcomes = collect_outcomes(engine.run())
    usages = {}
    for request in requests:
        terminal = outcomes[request.request_id].terminal
        assert terminal is not None
        assert terminal.usage is not None
        tokens, reason = solo_output(request)
        assert (outcomes[request.request_id].token_ids, terminal.finish_reason) == (tokens, reason)
        usages[request.request_id] = terminal.usage
    engine.assert_idle()
    return usages


def num_computed(engine: FakeEngine) -> int:
    return sum(step.num_tokens for step in engine.runner.steps)


def waiting(engine: FakeEngine) -> list[Request]:
    return list(engine.scheduler._waiting.requests())


# ------------------------------------------------------------------ hits


def test_a_second_request_finds_the_prompt_and_says_so() -> None:
    engine = cached_engine()
    cold = serve(engine, make_request("cold", PROMPT, seed=1))["cold"]
    before = num_computed(engine)

    warm = serve(engine, make_request("warm", PROMPT, seed=2))["warm"]

    assert cold == Usage(prompt_tokens=17, completion_tokens=4, cached_tokens=0)
    assert warm == Usage(prompt_tokens=17, completion_tokens=4, cached_tokens=16)
    assert num_computed(engine) - before == 1 + 3
    stats = engine.core.stats()
    assert stats.prefix_cache_query_tokens_total == 34
    assert stats.prefix_cache_hit_tokens_total == 16
    assert stats.prompt_tokens_total == 34


def test_positions_go_on_where_the_hit_ends() -> None:
    """Fault 29: rows start at the hit's end, not at 0."""
    engine = cached_engine()
    serve(engine, make_request("cold", PROMPT))
    engine.core.add(make_request("warm", PROMPT))

    engine.core.step()

    step = engine.runner.steps[-1]
    assert (step.num_computed_B.tolist(), step.num_scheduled_B.tolist()) == ([16], [1])


def test_an_answer_is_found_as_part_of_the_next_turn() -> None:
    engine = cached_engine()
    first = make_request("first", PROMPT, max_tokens=8)
    serve(engine, first)

    turn = [*PROMPT, *solo_output(first)[0], 9, 9]
    usage = serve(engine, make_request("second", turn))["second"]

    # 17 + 8 tokens were known, of which the last was never computed.
    assert usage.cached_tokens == 24


def test_without_a_cache_nothing_is_found() -> None:
    engine = make_engine()
    serve(engine, make_request("a", PROMPT))

    assert serve(engine, make_request("b", PROMPT))["b"].cached_tokens == 0
    assert engine.core.stats().prefix_cache_query_tokens_total == 0


def test_forgetting_makes_the_next_one_cold() -> None:
    engine = cached_engine()
    serve(engine, make_request("a", PROMPT))

    engine.core.forget_cached()

    assert serve(engine, make_request("b", PROMPT))["b"].cached_tokens == 0
    assert serve(engine, make_request("c", PROMPT))["c"].cached_tokens == 16


def test_usage_is_blocks_in_use_over_all_and_cached_ones_are_free() -> None:
    """Fault 31."""
    engine = cached_engine(num_blocks=10)
    engine.core.add(make_request("a", PROMPT, max_tokens=4))
    engine.core.step()
    assert engine.core.stats().kv_usage == 0.5
    assert engine.core.stats().kv_blocks_free == 5
    engine.core.add(make_request("b", PROMPT, max_tokens=4))
    engine.core.step()
    assert engine.core.stats().kv_usage == 0.6  # one block of its own; the other four are shared

    engine.run()

    assert engine.core.stats().kv_usage == 0.0
    assert engine.cache.num_named == 5


# ------------------------------------------------------------------ whose


@pytest.mark.parametrize(
    "other",
    [
        make_request("other", PROMPT, tenant="b"),
        make_request("other", PROMPT, adapter="x"),
        make_request("other", PROMPT, tenant="b", adapter="x"),
    ],
    ids=["tenant", "adapter", "both"],
)
def test_nobody_else_finds_it(other: Generate) -> None:
    """Fault 33, with the proof that the same tenant does find it."""
    engine = cached_engine()
    serve(engine, make_request("first", PROMPT))

    assert serve(engine, other)["other"].cached_tokens == 0
    assert serve(engine, make_request("again", PROMPT))["again"].cached_tokens == 16


def test_two_tenants_with_one_adapter_do_not_share() -> None:
    engine = cached_engine()
    usages = serve(engine, make_request("a", PROMPT, tenant="a", adapter="x"))
    usages |= serve(engine, make_request("b", PROMPT, tenant="b", adapter="x"))
    usages |= serve(engine, make_request("a2", PROMPT, tenant="a", adapter="x"))
    usages |= serve(engine, make_request("a3", PROMPT, tenant="a", adapter="y"))

    found = {name: usage.cached_tokens for name, usage in usages.items()}
    assert found == {"a": 0, "b": 0, "a2": 16, "a3": 0}


def test_a_public_prefix_is_found_by_all_tenants_and_what_follows_is_not() -> None:
    engine = cached_engine(public_prefixes=[PROMPT[:10]])
    usages = serve(engine, make_request("a", PROMPT, tenant="a"))
    usages |= serve(engine, make_request("b", PROMPT, tenant="b"))
    usages |= serve(engine, make_request("a2", PROMPT, tenant="a"))
    usages |= serve(engine, make_request("x", PROMPT, tenant="b", adapter="x"))
    usages |= serve(engine, make_request("x2", PROMPT, tenant="c", adapter="x"))

    found = {name: usage.cached_tokens for name, usage in usages.items()}
    assert found == {"a": 0, "b": 8, "a2": 16, "x": 0, "x2": 8}


def test_a_flooding_tenant_leaves_anothers_hot_prefix() -> None:
    engine = cached_engine(num_blocks=20)
    hot = make_request("hot", PROMPT, tenant="victim")
    serve(engine, hot)
    for index in range(60):
        prompt = [20 + index % 60, *range(30, 46)]
        serve(engine, make_request(f"f{index}", prompt, tenant="flooder"))

    assert (
        serve(engine, make_request("again", PROMPT, tenant="victim"))["again"].cached_tokens == 16
    )
    assert (
        serve(engine, make_request("f60", [79, *range(30, 46)], tenant="flooder"))[
            "f60"
        ].cached_tokens
        == 16
    )


# ------------------------------------------------------------------ waiting for a leader


def test_two_identical_prompts_at_once_are_computed_once() -> None:
    """Fault 29."""
    engine = cached_engine(max_num_batched_tokens=8)
    usages = serve(engine, make_request("a", PROMPT, seed=1), make_request("b", PROMPT, seed=2))

    assert [usages[name].cached_tokens for name in "ab"] == [0, 16]
    assert num_computed(engine) == 17 + 3 + 1 + 3


def test_a_follower_waits_only_for_what_it_shares() -> None:
    engine = cached_engine(long_prefill_token_threshold=4)
    engine.core.add(make_request("long", list(range(1, 40))))
    engine.core.add(make_request("short", [*range(1, 9), 50, 51], max_tokens=1))
    for _ in range(2):
        engine.core.step()
        assert [request.blocked_on for request in waiting(engine)] == [BlockReason.PREFIX]

    events = engine.core.step()  # both shared blocks are there, and most of the long prompt is not

    terminal = collect_outcomes(events)["short"].terminal
    assert terminal is not None
    assert terminal.usage == Usage(prompt_tokens=10, completion_tokens=1, cached_tokens=8)
    engine.run()
    engine.assert_idle()


def test_whoever_shares_nothing_overtakes() -> None:
    engine = cached_engine(long_prefill_token_threshold=8)
    engine.core.add(make_request("leader", list(range(1, 31))))
    engine.core.add(make_request("follower", list(range(1, 31))))
    engine.core.add(make_request("stranger", [60, 61], max_tokens=1))

    events = engine.core.step()

    assert [request.blocked_on for request in waiting(engine)] == [BlockReason.PREFIX]
    assert "stranger" in {event.request_id for event in events if event.finish_reason}
    engine.run()
    engine.assert_idle()


def leader_and_follower(engine: FakeEngine) -> tuple[Generate, Generate]:
    leader = make_request("leader", PROMPT, seed=1)
    follower = make_request("follower", PROMPT, seed=2)
    engine.core.add(leader)
    engine.core.add(follower)
    engine.core.step()
    assert [request.blocked_on for request in waiting(engine)] == [BlockReason.PREFIX]
    return leader, follower


@pytest.mark.parametrize("when", ["aborted", "aborted in flight", "not finite"])
def test_a_leader_that_ends_early_leaves_nobody_waiting(when: str) -> None:
    engine = cached_engine(long_prefill_token_threshold=6)
    _, follower = leader_and_follower(engine)
    if when == "aborted":
        engine.core.abort("leader", 0)
    elif when == "aborted in flight":
        engine.runner.in_flight_hook = lambda: engine.core.abort("leader", 0)
    else:
        engine.runner.poisoned_seeds.add(1)

    events = engine.run()

    assert collect_outcomes(events)["follower"].token_ids == solo_output(follower)[0]
    engine.assert_idle()


def test_a_leader_that_is_preempted_leaves_nobody_waiting() -> None:
    """The follower is the more urgent one: it takes over, and both end."""
    engine = cached_engine(num_blocks=8, max_num_batched_tokens=5, max_model_len=32)
    urgent = make_request("urgent", [40, 41, 42], max_tokens=16, priority=2)
    leader = make_request("leader", PROMPT, seed=1, max_tokens=9)
    follower = make_request("follower", PROMPT, seed=2, max_tokens=9, priority=1)
    engine.core.add(urgent)
    engine.core.add(leader)
    events = engine.core.step()
    engine.core.add(follower)

    events += engine.run()

    assert engine.core.stats().num_preemptions_total > 0
    outcomes = collect_outcomes(events)
    for request in (urgent, leader, follower):
        assert outcomes[request.request_id].token_ids == solo_output(request)[0]
    engine.assert_idle()


def test_a_leader_that_waits_itself_holds_nobody_up() -> None:
    """It has promised nothing while its adapter loads: only who runs is waited for."""
    engine = cached_engine()
    engine.adapters.hold("slow")
    engine.core.add(make_request("a", PROMPT, adapter="slow", seed=1))
    engine.core.add(make_request("b", PROMPT, adapter="slow", seed=2))
    engine.core.add(make_request("c", PROMPT, seed=3))

    events = engine.core.step()

    assert [event.request_id for event in events] == ["c"]
    engine.adapters.finish_loading("slow")
    outcomes = collect_outcomes(events + engine.run())
    assert {name: outcome.terminal is not None for name, outcome in outcomes.items()} == {
        "a": True,
        "b": True,
        "c": True,
    }
    cached = [outcomes[name].terminal.usage.cached_tokens for name in "ab"]  # type: ignore[union-attr] # both ended
    assert cached == [0, 16]


# ------------------------------------------------------------------ what is never kept


def test_a_step_without_finite_logits_is_not_kept() -> None:
    """Fault 41: a poisoned row is never found by the next request."""
    engine = cached_engine(max_num_batched_tokens=8)
    engine.core.add(make_request("bad", PROMPT, seed=1))
    engine.core.step()  # two blocks, finite
    engine.runner.poisoned_seeds.add(1)

    events = engine.run()

    terminal = collect_outcomes(events)["bad"].terminal
    assert terminal is not None
    assert terminal.error_code == "non_finite_logits"
    assert engine.cache.num_named == 2
    assert serve(engine, make_request("good", PROMPT, seed=2))["good"].cached_tokens == 8


def test_a_step_that_an_abort_overtakes_is_not_kept() -> None:
    engine = cached_engine(max_num_batched_tokens=8)
    engine.core.add(make_request("a", PROMPT))
    engine.runner.in_flight_hook = lambda: engine.core.abort("a", 0)

    engine.run()

    assert engine.cache.num_named == 0
    engine.assert_idle()


class HalfRight:
    """Two drafts that come true, then two that do not."""

    def __init__(self, request: Generate) -> None:
        self._answer = solo_output(request)[0]
        self._num_prompt = len(request.prompt_token_ids)

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        drafts = []
        for ask in asks:
            num_said = len(ask.token_ids) - self._num_prompt
            right = self._answer[num_said : num_said + 2]
            wrong = [(token + 1) % VOCAB_SIZE for token in self._answer[num_said + 2 :]]
            drafts.append([*right, *wrong][: min(4, ask.max_drafts)])
        return drafts

    def forget(self, key: int) -> None:
        """It remembers nothing."""


def test_drafts_that_were_rejected_are_never_kept() -> None:
    first = make_request("first", PROMPT, max_tokens=12)
    engine = cached_engine(drafter=Drafter(HalfRight(first), 4))
    serve(engine, first)
    stats = engine.core.stats()
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total

    turn = [*PROMPT, *solo_output(first)[0], 9, 9]
    usage = serve(engine, make_request("second", turn, max_tokens=3))["second"]

    assert usage.cached_tokens >= 24  # its last block may not have been looked at before the end


# ------------------------------------------------------------------ preemption


def test_a_preempted_request_finds_its_own_blocks_and_counts_its_look_up_once() -> None:
    """Fault 28: a preempted request resumes from the cache."""
    engine = cached_engine(num_blocks=9, max_num_seqs=2, max_model_len=36)
    first = make_request("first", [30, 31], max_tokens=14, seed=1)
    second = make_request("second", PROMPT, max_tokens=12, seed=2)
    usages = serve(engine, first, second)

    stats = engine.core.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_query_tokens_total == 2 + 17
    assert stats.prefix_cache_hit_tokens_total == 0
    assert usages["second"] == Usage(prompt_tokens=17, completion_tokens=12, cached_tokens=0)
    resumed = [
        int(step.num_computed_B[step.rows_B.tolist().index(new.row)])
        for step in engine.runner.steps
        for new in step.new_rows
        if len(new.token_ids) > new.num_prompt_tokens
    ]
    assert max(resumed) >= 16, "it was computed from the start again"


# ------------------------------------------------------------------ any sequence of calls

TENANTS = ["a", "b"]


class SharingMachine(RuleBasedStateMachine):
    """Prompts that overlap, two tenants, several choices, preemption, aborts of all kinds.

    Whatever happens: invariants hold, every choice says what it would say alone (a prefix of it, if it
    was stopped), every request ends once, usage adds up, and nothing is held when all have ended.
    """

    @initialize(
        num_blocks=st.integers(5, 20),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 20),
        rows=st.integers(1, 5),
        threshold=st.none() | st.integers(1, 6),
        watermark=st.integers(0, 2),
        share=st.sampled_from([None, 0.3]),
        is_public=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        rows: int,
        threshold: int | None,
        watermark: int,
        share: float | None,
        is_public: bool,
    ) -> None:
        self.engine = cached_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
            max_waiting=8,
            long_prefill_token_threshold=threshold,
            watermark_blocks=watermark,
            tenant_share=share,
            public_prefixes=[[1, 2, 1, 2]] if is_public else [],
        )
        self.requests: dict[str, Generate] = {}
        self.events: list[TokenEvent] = []
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        adapter=st.sampled_from([None, None, "x", "y"]),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-1, 1),
        seed=st.sampled_from([0, 1, 2, 2**64 - 1]),
        n=st.sampled_from([1, 1, 2, 3]),
        stop_token_ids=st.sampled_from([(), tuple(range(1, 20))]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        adapter: str | None,
        tenant: str,
        priority: int,
        seed: int,
        n: int,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens,
            adapter=adapter,
            tenant=tenant,
            priority=priority,
            seed=seed,
            n=n,
            stop_token_ids=stop_token_ids,
        )
        try:
            self.engine.core.add(request)
        except (NeverFitsError, QueueFullError):
            return
        self.requests[name] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            must_progress = bool(self.engine.core._live)
            events = self.engine.core.step()
            self.events += events
            if must_progress:
                has_ended = any(event.finish_reason for event in events)
                assert self.engine.core.last_step_num_tokens > 0 or has_ended, "a deadlock"

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))

        def act() -> None:
            if (name, 0) in self.engine.core._live:
                self.aborted.add(name)
            self.engine.core.abort(name, 0)

        self.now_or_in_flight(act, in_flight)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_flight=st.booleans(), index=st.integers(0, 3))
    def stop_choice(self, data: st.DataObject, in_flight: bool, index: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))

        def act() -> None:
            group = self.engine.core._live.get((name, 0))
            if group is not None and group.find(index) is not None:
                self.stopped.add((name, index))
            self.engine.core.abort(name, 0, as_stop=True, index=index)

        self.now_or_in_flight(act, in_flight)

    def now_or_in_flight(self, act: object, in_flight: bool) -> None:
        assert callable(act)
        if in_flight:
            self.engine.runner.in_flight_hook = act
        else:
            act()

    @rule()
    def forget(self) -> None:
        self.engine.core.forget_cached()

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "engine"):
            self.engine.core.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        self.events += engine.run()
        engine.assert_idle()
        collected = collect_choices(self.events)
        assert set(collected) == set(self.requests)
        for name, request in self.requests.items():
            self.check_request(request, collected[name])
        usages = [choices.usage for choices in collected.values()]
        stats = engine.core.stats()
        assert stats.prompt_tokens_total == sum(usage.prompt_tokens for usage in usages)
        assert stats.generation_tokens_total == sum(usage.completion_tokens for usage in usages)
        assert sum(stats.requests_finished_total.values()) == len(self.requests)
        assert stats.prefix_cache_hit_tokens_total >= sum(u.cached_tokens for u in usages)

    def check_request(self, request: Generate, choices: Choices) -> None:
        name, usage = request.request_id, choices.usage
        said = {index: choices.tokens.get(index, []) for index in range(request.sampling.n)}
        assert usage.completion_tokens == sum(len(tokens) for tokens in said.values())
        assert usage.cached_tokens <= usage.prompt_tokens <= len(request.prompt_token_ids)
        for index, (tokens, reason) in enumerate(solo_choices(request)):
            assert said[index] == tokens[: len(said[index])]
            if name in self.aborted or (name, index) in self.stopped:
                continue
            assert (said[index], choices.reasons[index]) == (tokens, reason)
        if name not in self.aborted and not any((name, i) in self.stopped for i in said):
            assert usage.prompt_tokens == len(request.prompt_token_ids)


SharingMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_sequence_of_calls_with_sharing = SharingMachine.TestCase


class LongSharingMachine(SharingMachine):
    """The same for longer."""


LongSharingMachine.TestCase.settings = settings(
    SharingMachine.TestCase.settings, max_examples=500, stateful_step_count=50
)
test_many_sequences_of_calls_with_sharing = pytest.mark.slow(
    pytest.mark.timeout(3_600)(LongSharingMachine.TestCase)
)


def test_digest_and_salt_of_the_same_text_do_not_meet() -> None:
    """Fault 34, end to end: a tenant whose salt is another's adapter digest finds nothing of it."""
    engine = cached_engine()
    hostile = msgspec.structs.replace(
        make_request("hostile", PROMPT), tenant_salt=digest("x").encode()
    )
    serve(engine, make_request("adapter", PROMPT, adapter="x"))

    assert serve(engine, hostile)["hostile"].cached_tokens == 0
    again = msgspec.structs.replace(hostile, request_id="again")
    assert serve(engine, again)["again"].cached_tokens == 16
