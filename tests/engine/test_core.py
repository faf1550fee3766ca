"""EngineCore on fakes: how requests end, the abort matrix, counters, and any sequence of calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loraplex_engine import core as core_module
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import build_core
from loraplex_engine.errors import (
    AdapterUnavailableError,
    DrainingError,
    InvalidRequestError,
    NeverFitsError,
    QueueFullError,
)
from loraplex_engine.protocol import Generate, TokenEvent, Usage

from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import (
    EOS,
    VOCAB_SIZE,
    FakeAdapterPool,
    FakeEngine,
    FakeRunner,
    collect_outcomes,
    digest,
    make_engine,
    make_request,
    next_token,
    solo_output,
)


def terminal_of(events: list[TokenEvent], request_id: str = "r0") -> TokenEvent:
    terminal = collect_outcomes(events)[request_id].terminal
    assert terminal is not None
    assert terminal.usage is not None
    return terminal


# ------------------------------------------------------------------ endings


def test_max_tokens_ends_with_length_and_exact_usage() -> None:
    engine = make_engine()
    request = make_request(max_tokens=4)
    engine.core.add(request)

    events = engine.run()

    assert [event.token_ids for event in events] == [[t] for t in solo_output(request)[0]]
    terminal = terminal_of(events)
    assert terminal.finish_reason == "length"
    assert terminal.stop_token_id is None
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=4)
    engine.assert_idle()


def test_a_stop_token_ends_with_stop_and_is_part_of_the_output() -> None:
    engine = make_engine()
    third = solo_output(make_request(max_tokens=3))[0][2]
    engine.core.add(make_request(max_tokens=10, stop_token_ids=(third,)))

    terminal = terminal_of(engine.run())

    assert (terminal.finish_reason, terminal.stop_token_id) == ("stop", third)
    assert terminal.token_ids == [third]
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=3)


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    engine = make_engine()
    third = solo_output(make_request(max_tokens=3))[0][2]
    engine.core.add(make_request(max_tokens=3, stop_token_ids=(third,)))

    assert terminal_of(engine.run()).finish_reason == "stop"


def seed_with_eos_at(position: int) -> int:
    """A seed under which the default prompt's token at `position` is the first EOS."""
    for seed in range(100_000):
        output = [5, 6, 7]
        for index in range(position + 1):
            output.append(next_token(tuple(output), None, seed))
            if (output[-1] == EOS) != (index == position):
                break
        else:
            return seed
    raise AssertionError("no such seed")


@pytest.mark.parametrize(("ignore_eos", "reason"), [(False, "stop"), (True, "length")])
def test_eos_ends_a_request_unless_it_ignores_it(ignore_eos: bool, reason: str) -> None:
    engine = make_engine()
    seed = seed_with_eos_at(2)
    engine.core.add(make_request(seed=seed, max_tokens=6, ignore_eos=ignore_eos))

    terminal = terminal_of(engine.run())

    assert terminal.finish_reason == reason
    assert terminal.stop_token_id == (EOS if reason == "stop" else None)


def test_logprobs_come_with_their_tokens() -> None:
    engine = make_engine()
    engine.core.add(make_request("with", logprobs=0, max_tokens=2))
    engine.core.add(make_request("without", max_tokens=2))

    for event in engine.run():
        if event.request_id == "without":
            assert event.logprobs is None
        else:
            assert event.logprobs is not None
            assert [lp.logprob for lp in event.logprobs] == [-float(t) for t in event.token_ids]


def test_a_row_without_finite_logits_ends_alone() -> None:
    """Fault 41: no token 0 forever, and the neighbours do not notice."""
    engine = make_engine()
    requests = [make_request(f"r{seed}", seed=seed, max_tokens=5) for seed in range(3)]
    for request in requests:
        engine.core.add(request)
    events = engine.core.step() + engine.core.step()
    engine.runner.poisoned_seeds.add(1)

    events += engine.run()

    terminal = terminal_of(events, "r1")
    assert (terminal.finish_reason, terminal.error_code) == ("error", "non_finite_logits")
    assert terminal.token_ids == []
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=2)
    outcomes = collect_outcomes(events)
    for name in ("r0", "r2"):
        assert outcomes[name].token_ids == solo_output(requests[int(name[1])])[0]
    engine.assert_idle()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request(prompt=[]), InvalidRequestError),
        (make_request(prompt=[VOCAB_SIZE]), InvalidRequestError),
        (make_request(max_tokens=0), InvalidRequestError),
        (make_request(max_tokens=62), NeverFitsError),
    ],
)
def test_a_refused_request_leaves_nothing_behind(
    request_: Generate, error: type[Exception]
) -> None:
    engine = make_engine()

    with pytest.raises(error):
        engine.core.add(request_)

    engine.assert_idle()
    assert engine.core.step() == []


def test_what_can_never_fit_the_pool_is_refused_not_queued_forever() -> None:
    """Fault 22."""
    engine = make_engine(num_blocks=4)

    with pytest.raises(NeverFitsError, match=r"17 in all, .* holds 16 tokens"):
        engine.core.add(make_request(max_tokens=14))


def test_a_full_queue_refuses_with_a_time_to_retry_and_recovers() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=2)
    for index in range(2):
        engine.core.add(make_request(f"r{index}", max_tokens=1))

    with pytest.raises(QueueFullError, match="2 requests are waiting") as refusal:
        engine.core.add(make_request("r2", adapter="a"))
    assert refusal.value.retry_after_s
    assert not engine.adapters.wanted

    engine.core.step()
    engine.core.add(make_request("r2"))
    assert set(collect_outcomes(engine.run())) == {"r1", "r2"}


def test_draining_finishes_what_was_accepted_and_takes_nothing_new() -> None:
    engine = make_engine(max_num_seqs=1)
    requests = [make_request("running"), make_request("waiting")]
    for request in requests:
        engine.core.add(request)
    events = engine.core.step()

    engine.core.begin_drain()

    with pytest.raises(DrainingError):
        engine.core.add(make_request("late"))
    engine.core.add(requests[0])  # a second copy of what is accepted is still no error
    outcomes = collect_outcomes(events + engine.run())
    assert {name: outcome.token_ids for name, outcome in outcomes.items()} == {
        request.request_id: solo_output(request)[0] for request in requests
    }


# ------------------------------------------------------------------ identity


def test_a_second_copy_is_a_no_op_while_live_and_after_the_end() -> None:
    engine = make_engine()
    request = make_request(max_tokens=2)
    engine.core.add(request)
    engine.core.add(request)
    events = engine.core.step()
    engine.core.add(request)
    events += engine.run()

    engine.core.add(request)

    assert not engine.core.has_work()
    assert collect_outcomes(events)["r0"].token_ids == solo_output(request)[0]
    assert engine.core.stats().requests_finished_total["length"] == 1


def test_another_attempt_is_another_request() -> None:
    engine = make_engine()
    engine.core.add(make_request(max_tokens=2))
    engine.core.add(make_request(attempt=1, max_tokens=2))

    events = engine.run()

    assert sorted(event.attempt for event in events if event.finish_reason) == [0, 1]


def test_the_memory_of_ended_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 57: nothing grows with the number of requests served."""
    monkeypatch.setattr(core_module, "NUM_ENDED_REMEMBERED", 3)
    engine = make_engine()
    for index in range(10):
        engine.core.add(make_request(f"r{index}", max_tokens=1))
        engine.run()

    assert list(engine.core._ended) == [("r7", 0), ("r8", 0), ("r9", 0)]
    assert not engine.core._live


# ------------------------------------------------------------------ abort matrix (fault 53)


def queued(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request("other", max_tokens=40))
    events = engine.core.step()
    engine.core.add(make_request(max_tokens=8))
    return events


def partial_prefill(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request(prompt=list(range(1, 13)), max_tokens=8))
    return engine.core.step()


def decoding(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request(max_tokens=8))
    return engine.core.step() + engine.core.step()


def waiting_for_adapter(engine: FakeEngine) -> list[TokenEvent]:
    engine.adapters.hold("slow")
    engine.core.add(make_request(max_tokens=8, adapter="slow"))
    return engine.core.step()


def waiting_for_slot(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request("other", max_tokens=8, adapter="a"))
    engine.core.add(make_request(max_tokens=8, adapter="b"))
    return engine.core.step()


def decoding_with_adapter(engine: FakeEngine) -> list[TokenEvent]:
    engine.core.add(make_request(max_tokens=8, adapter="a"))
    return engine.core.step()


@pytest.mark.parametrize("as_stop", [False, True])
@pytest.mark.parametrize(
    ("arrange", "rows", "usage"),
    [
        (queued, 1, Usage(prompt_tokens=0, completion_tokens=0)),
        (partial_prefill, 2, Usage(prompt_tokens=5, completion_tokens=0)),
        (decoding, 2, Usage(prompt_tokens=3, completion_tokens=2)),
        (waiting_for_adapter, 2, Usage(prompt_tokens=0, completion_tokens=0)),
        (waiting_for_slot, 2, Usage(prompt_tokens=0, completion_tokens=0)),
        (decoding_with_adapter, 2, Usage(prompt_tokens=3, completion_tokens=1)),
    ],
)
def test_abort_in_any_state(
    arrange: Callable[[FakeEngine], list[TokenEvent]], rows: int, usage: Usage, as_stop: bool
) -> None:
    engine = make_engine(max_num_seqs=rows, max_num_batched_tokens=5, num_slots=1)
    events = arrange(engine)

    engine.core.abort("r0", 0, as_stop)
    engine.core.check()
    engine.core.abort("r0", 0)  # twice

    assert engine.core.has_work()
    events += engine.core.drain_events()
    terminal = terminal_of(events)
    assert terminal.finish_reason == ("stop" if as_stop else "abort")
    assert terminal.usage == usage
    events += engine.run()
    assert terminal_of(events).finish_reason == ("stop" if as_stop else "abort")
    engine.assert_idle()


@pytest.mark.parametrize(
    ("as_stop", "expected"), [(False, ("error", "given_up")), (True, ("stop", None))]
)
def test_abort_for_the_platforms_sake_is_an_error_unless_the_text_was_complete(
    as_stop: bool, expected: tuple[str, str | None]
) -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=5, num_slots=1)
    events = decoding(engine)

    engine.core.abort("r0", 0, as_stop, is_platform_fault=True)
    engine.core.abort("r0", 0)  # the first reason stands
    events += engine.run()

    terminal = terminal_of(events)
    assert (terminal.finish_reason, terminal.error_code) == expected
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert engine.core.stats().requests_finished_total[expected[0]] == 1
    engine.assert_idle()


def test_abort_of_a_preempted_request_keeps_its_usage() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=2)
    engine.core.add(make_request("first", max_tokens=12, seed=1))
    engine.core.add(make_request(max_tokens=12, seed=2))
    events: list[TokenEvent] = []
    while engine.core.stats().num_preemptions_total == 0:
        events += engine.core.step()

    engine.core.abort("r0", 0)

    events += engine.run()
    usage = terminal_of(events).usage
    assert usage is not None
    assert usage.prompt_tokens == 3
    assert usage.completion_tokens == len(collect_outcomes(events)["r0"].token_ids) > 0
    engine.assert_idle()


def test_abort_amid_recomputation_keeps_the_whole_prompt_in_usage() -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=4)
    engine.core.add(make_request("first", [1, 2, 3], max_tokens=9, seed=1))
    engine.core.add(make_request(prompt=list(range(1, 14)), max_tokens=8, seed=2))
    events: list[TokenEvent] = []
    while engine.core.stats().num_preemptions_total == 0 or engine.core.stats().num_waiting:
        events += engine.core.step()
    assert engine.runner.steps[-1].num_computed_B.tolist() == [0]
    assert engine.core.stats().prompt_tokens_total == 3 + 13

    engine.core.abort("r0", 0)

    usage = terminal_of(events + engine.run()).usage
    assert usage is not None
    assert usage.prompt_tokens == 13
    assert engine.core.stats().prompt_tokens_total == 3 + 13


@pytest.mark.parametrize("max_tokens", [3, 8])
def test_abort_while_a_step_is_in_flight_discards_its_token(max_tokens: int) -> None:
    """With max_tokens 3 the step in flight is the final one: it is an abort all the same."""
    engine = make_engine()
    engine.core.add(make_request(max_tokens=max_tokens))
    engine.core.add(make_request("other", max_tokens=5))
    events = engine.core.step() + engine.core.step()
    engine.runner.in_flight_hook = lambda: engine.core.abort("r0", 0)

    events += engine.core.step()

    terminal = terminal_of(events)
    assert terminal.finish_reason == "abort"
    assert terminal.usage == Usage(prompt_tokens=3, completion_tokens=2)
    outcomes = collect_outcomes(events + engine.run())
    assert outcomes["other"].token_ids == solo_output(make_request(max_tokens=5))[0]
    engine.assert_idle()
    assert engine.core.stats().generation_tokens_total == 2 + 5


def test_abort_of_unknown_and_finished_requests_is_a_no_op() -> None:
    engine = make_engine()
    engine.core.add(make_request(max_tokens=1))
    engine.run()

    engine.core.abort("r0", 0)
    engine.core.abort("r0", 1)
    engine.core.abort("unknown", 0)

    assert not engine.core.has_work()
    assert engine.core.drain_events() == []


def test_an_aborted_rows_place_is_reused_in_the_next_step() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.core.add(make_request("a", adapter="a", max_tokens=30))
    engine.core.step()
    engine.core.abort("a", 0)
    request = make_request("b", adapter="b")
    engine.core.add(request)

    events = engine.run()

    step = engine.runner.steps[1]
    assert (step.freed_rows, [new.row for new in step.new_rows]) == ((0,), [0])
    assert collect_outcomes(events)["b"].token_ids == solo_output(request)[0]


# ------------------------------------------------------------------ counters


def test_stats_count_mixed_steps_adapters_and_tokens() -> None:
    engine = make_engine(num_slots=3, max_num_seqs=6)
    for name, adapter in (("x", "a"), ("y", "b"), ("z", "b"), ("base", None)):
        engine.core.add(make_request(name, adapter=adapter, max_tokens=2))
    engine.core.step()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.adapter_leases) == (4, 0, 3)
    engine.run()
    engine.core.add(make_request("alone", adapter="a", max_tokens=1))
    engine.run()
    engine.core.add(make_request("no base, a", adapter="a", max_tokens=1))
    engine.core.add(make_request("no base, b", adapter="b", max_tokens=1))
    engine.clock.now_s += 5
    engine.run()

    stats = engine.core.stats()

    assert stats.max_adapters_in_step == 2
    assert (stats.steps_total, stats.mixed_steps_total) == (4, 2)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (21, 11)
    assert stats.requests_finished_total == {"stop": 0, "length": 7, "abort": 0, "error": 0}
    assert stats.uptime_s == 5


def test_recomputed_prompt_tokens_are_counted_once() -> None:
    engine = make_engine(num_blocks=4, max_num_seqs=2)
    for index in range(2):
        engine.core.add(make_request(f"r{index}", max_tokens=12, seed=index))

    engine.run()

    stats = engine.core.stats()
    assert stats.num_preemptions_total > 0
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (6, 24)


def test_build_core_runs_as_configured(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = EngineConfig(
        model_dir=tmp_path_factory.mktemp("model"),
        base_model="tiny",
        num_blocks=100,
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    sizes = config.sizes(block_bytes=2048, max_position_embeddings=64)
    adapters = FakeAdapterPool()
    runner = FakeRunner(adapters, sizes.num_blocks, config.block_size, 2, 8)
    core = build_core(
        config,
        sizes,
        runner,
        adapters,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )
    request = make_request(prompt=list(range(1, 20)))
    core.add(request)

    events = run_to_end(core)

    assert collect_outcomes(events)["r0"].token_ids == solo_output(request)[0]
    assert [step.num_tokens for step in runner.steps] == [8, 8, 3, 1, 1, 1]


def test_every_request_that_was_taken_is_counted_once_under_one_reason() -> None:
    """Fault 58: whatever its choices and however it ended; one that was refused never."""
    engine = make_engine(num_blocks=12, max_num_seqs=3, max_waiting=8)
    engine.adapters.fail("gone", AdapterUnavailableError("gone"))
    engine.runner.poisoned_seeds.add(99)
    requests = [
        make_request("length", max_tokens=9, n=3),
        make_request("stop", ignore_eos=False, stop_token_ids=tuple(range(1, 60)), max_tokens=30),
        make_request("aborted", max_tokens=30),
        make_request("unavailable", adapter="gone"),
        make_request("poisoned", seed=99),
        make_request("late", deadline_unix_s=1_000.5),
    ]
    for request in requests:
        engine.core.add(request)
    with pytest.raises(QueueFullError):
        engine.core.add(make_request("refused"))
    engine.core.step()
    engine.clock.now_s += 1.0
    engine.core.abort("aborted", 0)
    engine.run()

    stats = engine.core.stats()
    assert stats.requests_finished_total == {"length": 1, "stop": 1, "abort": 1, "error": 3}
    assert sum(stats.queue_time_counts) == 4, "those that ran, each once"


# ------------------------------------------------------------------ a crowd


def test_a_crowd_with_random_aborts_leaves_nothing_behind() -> None:
    """64 rows, more adapters than slots, too little memory: all outputs as alone, all given back."""
    draw = random.Random(20)
    engine = make_engine(
        num_blocks=200,
        max_num_batched_tokens=128,
        max_num_seqs=64,
        max_waiting=400,
        watermark_blocks=4,
        num_slots=16,
    )
    requests = {
        f"r{index}": make_request(
            f"r{index}",
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 33))],
            max_tokens=draw.randrange(1, 32),
            adapter=draw.choice([None, *(f"a{n}" for n in range(20))]),
            priority=draw.choice([0, 0, 0, 1]),
            seed=index,
            ignore_eos=False,
        )
        for index in range(300)
    }
    for request in requests.values():
        engine.core.add(request)

    def abort_one() -> None:
        if draw.random() < 0.3:
            engine.core.abort(f"r{draw.randrange(300)}", 0)

    events = engine.run(after_step=abort_one)

    engine.assert_idle()
    outcomes = collect_outcomes(events)
    assert set(outcomes) == set(requests)
    reasons = Counter[str]()
    for name, outcome in outcomes.items():
        assert outcome.terminal is not None
        reasons[str(outcome.terminal.finish_reason)] += 1
        tokens, reason = solo_output(requests[name])
        if outcome.terminal.finish_reason == "abort":
            assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        else:
            assert (outcome.token_ids, outcome.terminal.finish_reason) == (tokens, reason)
    stats = engine.core.stats()
    assert reasons["abort"] > 5
    assert reasons["length"] + reasons["stop"] > 200
    assert stats.num_preemptions_total > 5
    assert stats.max_adapters_in_step > 8
    assert stats.mixed_steps_total > 10


# ------------------------------------------------------------------ any sequence of calls

ADAPTERS = ("a", "b", "c", "broken")


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, late and broken adapters, in any order, on engines of any size.

    Whatever happens: invariants hold after every call, a step computes something if anything can run,
    every request ends exactly once, its output is the start of what it would get alone (all of it unless
    it was aborted), usage adds up to the counters, and nothing is held when all have ended.
    """

    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 20),
        rows=st.integers(1, 5),
        threshold=st.none() | st.integers(1, 6),
        watermark=st.integers(0, 2),
        num_slots=st.integers(1, 3),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        rows: int,
        threshold: int | None,
        watermark: int,
        num_slots: int,
    ) -> None:
        self.engine = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
            max_waiting=8,
            long_prefill_token_threshold=threshold,
            watermark_blocks=watermark,
            num_slots=num_slots,
        )
        self.engine.adapters.fail("broken", AdapterUnavailableError("gone"))
        self.requests: dict[str, Generate] = {}
        self.events: list[TokenEvent] = []
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 10),
        adapter=st.none() | st.sampled_from(ADAPTERS),
        priority=st.integers(-1, 1),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), tuple(range(1, 20))]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        adapter: str | None,
        priority: int,
        seed: int,
        ignore_eos: bool,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        name = f"r{len(self.requests)}"
        request = make_request(
            name,
            prompt,
            max_tokens=max_tokens,
            adapter=adapter,
            priority=priority,
            seed=seed,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
        )
        try:
            self.engine.core.add(request)
        except NeverFitsError:
            assert len(prompt) + max_tokens > min(64, self.engine.scheduler.num_kv_slots)
        except QueueFullError:
            assert self.engine.scheduler.num_waiting >= 8
        else:
            self.requests[name] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            must_progress = self.can_run()
            events = self.engine.core.step()
            self.events += events
            if must_progress:
                has_ended = any(event.finish_reason for event in events)
                assert self.engine.core.last_step_num_tokens > 0 or has_ended

    def can_run(self) -> bool:
        stats = self.engine.core.stats()
        if stats.num_running:
            return True
        waiting = self.engine.core._live.values()
        return any(
            group.generate.adapter_digest not in self.engine.adapters.held_back for group in waiting
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), as_stop=st.booleans())
    def abort(self, data: st.DataObject, as_stop: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.note_abort(name, as_stop)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.runner.in_flight_hook = lambda: self.note_abort(name, as_stop=False)

    def note_abort(self, name: str, as_stop: bool) -> None:
        if (name, 0) in self.engine.core._live:
            self.aborted.add(name)
        self.engine.core.abort(name, 0, as_stop)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.core.add(self.requests[name])

    @rule(name=st.sampled_from(ADAPTERS))
    def hold_adapter(self, name: str) -> None:
        self.engine.adapters.hold(name)

    @rule(name=st.sampled_from(ADAPTERS))
    def finish_loading(self, name: str) -> None:
        self.engine.adapters.finish_loading(name)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.core.check()
        assert self.engine.adapters.num_leases == self.engine.scheduler.num_leases

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for name in ADAPTERS:
            engine.adapters.finish_loading(name)
        self.events += engine.run()
        engine.assert_idle()
        outcomes = collect_outcomes(self.events)
        assert set(outcomes) == set(self.requests)
        for name, request in self.requests.items():
            outcome, (tokens, reason) = outcomes[name], solo_output(request)
            assert outcome.terminal is not None
            assert outcome.terminal.usage is not None
            assert outcome.terminal.usage.completion_tokens == len(outcome.token_ids)
            assert outcome.token_ids == tokens[: len(outcome.token_ids)]
            if name in self.aborted:
                assert outcome.terminal.finish_reason in ("abort", "stop")
            elif request.adapter_digest == digest("broken"):
                assert outcome.terminal.error_code == "adapter_unavailable"
            else:
                assert (outcome.token_ids, outcome.terminal.finish_reason) == (tokens, reason)
                assert outcome.terminal.usage.prompt_tokens == len(request.prompt_token_ids)
        usages = [outcome.terminal.usage for outcome in outcomes.values() if outcome.terminal]
        stats = engine.core.stats()
        assert stats.prompt_tokens_total == sum(u.prompt_tokens for u in usages if u)
        assert stats.generation_tokens_total == sum(u.completion_tokens for u in usages if u)
        assert sum(stats.requests_finished_total.values()) == len(self.requests)


EngineMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
test_any_sequence_of_calls = EngineMachine.TestCase


class LongEngineMachine(EngineMachine):
    """The same for longer."""


LongEngineMachine.TestCase.settings = settings(
    EngineMachine.TestCase.settings, max_examples=1_000, stateful_step_count=50
)
test_many_sequences_of_calls = pytest.mark.slow(
    pytest.mark.timeout(3_600)(LongEngineMachine.TestCase)
)
