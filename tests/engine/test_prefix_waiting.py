"""Who waits for a prefix that another request computes: what that costs each step, and whom it may not hold up.

Look-ups and names are counted, not timed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from loraplex_engine import scheduler as scheduler_module
from loraplex_engine.config import PolicyName
from loraplex_engine.kv.hashing import BlockChain
from loraplex_engine.kv.manager import Hit
from loraplex_engine.policies import FairPolicy, make_policy
from loraplex_engine.request import BlockReason, Request

from tests.support.engine_fakes import (
    FakeEngine,
    collect_outcomes,
    make_engine,
    make_request,
    solo_output,
)

PROMPT = list(range(1, 42))  # ten blocks of four, and one token


def count_lookups(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each request is looked up from now on, by id."""
    counts: Counter[str] = Counter()
    lookup = engine.kv.lookup

    def counted(request: Request, may_wait_for: Callable[[Request], bool]) -> Hit:
        counts[request.generate.request_id] += 1
        return lookup(request, may_wait_for)

    monkeypatch.setattr(engine.kv, "lookup", counted)
    return counts


def count_names(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The names made by each call from now on."""
    counts: list[int] = []
    extend = BlockChain.extend

    def counted(self: BlockChain, token_ids: Sequence[int], num_blocks: int) -> None:
        before = len(self.names)
        extend(self, token_ids, num_blocks)
        counts.append(len(self.names) - before)

    monkeypatch.setattr(BlockChain, "extend", counted)
    return counts


def blocked_on(engine: FakeEngine) -> Counter[BlockReason | None]:
    return Counter(request.blocked_on for request in engine.scheduler._waiting.requests())


def test_followers_are_looked_up_once_however_long_their_leader_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(
        has_prefix_cache=True, num_blocks=800, max_num_seqs=64, long_prefill_token_threshold=4
    )
    lookups, names = count_lookups(engine, monkeypatch), count_names(monkeypatch)
    requests = [make_request(f"r{i}", PROMPT, seed=i, max_tokens=1) for i in range(50)]
    for request in requests:
        engine.core.add(request)
    events = []
    for _ in range(9):
        events += engine.core.step()
        assert blocked_on(engine) == {BlockReason.PREFIX: 49}

    assert set(lookups.values()) == {1}
    assert sum(names) == 10  # one prompt's: the others took them over

    events += engine.run()

    assert max(lookups.values()) <= 3
    outcomes = collect_outcomes(events)
    for request in requests:
        assert outcomes[request.request_id].token_ids == solo_output(request)[0]
    cached = [outcome.terminal.usage.cached_tokens for outcome in outcomes.values()]  # type: ignore[union-attr] # all ended
    assert sorted(cached) == [0, *[40] * 49]
    engine.assert_idle()


def test_choices_are_not_looked_up_while_another_computes_their_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(has_prefix_cache=True, max_num_seqs=16, long_prefill_token_threshold=4)
    lookups = count_lookups(engine, monkeypatch)
    engine.core.add(make_request("r", PROMPT, n=8, max_tokens=2))
    for _ in range(9):
        engine.core.step()

    assert lookups == {"r": 8}
    engine.run()
    engine.assert_idle()


def test_a_step_looks_up_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts differ, and all are to be named."""
    monkeypatch.setattr(scheduler_module, "LOOKUP_WORK", 16)
    engine = make_engine(
        has_prefix_cache=True, num_blocks=1_000, max_num_seqs=64, max_num_batched_tokens=4_000
    )
    names = count_names(monkeypatch)
    engine.core.add(make_request("runs", [96], max_tokens=50))
    events = engine.core.step()
    requests = [make_request(f"r{i}", [50 + i, *PROMPT], max_tokens=1) for i in range(30)]
    for request in requests:
        engine.core.add(request)
    before = engine.kv.lookup_work

    num_steps = 0
    while engine.scheduler.num_waiting:
        num_named, work = sum(names), engine.kv.lookup_work
        events += engine.core.step()
        num_steps += 1
        # The look-up that goes beyond is finished: one prompt's ten names and a little.
        assert sum(names) - num_named <= 16 + 12
        assert engine.kv.lookup_work - work <= 16 + 12

    assert engine.kv.lookup_work - before >= 30 * 10
    assert num_steps >= 30 * 10 / (16 + 12)
    events += engine.run()
    outcomes = collect_outcomes(events)
    for request in requests:
        assert outcomes[request.request_id].token_ids == solo_output(request)[0]
    engine.assert_idle()


def test_with_nobody_running_look_ups_go_on_until_somebody_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_module, "LOOKUP_WORK", 0)
    engine = make_engine(has_prefix_cache=True)
    engine.core.add(make_request("a", PROMPT))

    engine.core.step()

    assert engine.core.last_step_num_tokens == 32
    engine.run()
    engine.assert_idle()


def test_who_would_be_one_prefill_too_many_is_not_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(
        has_prefix_cache=True, max_partial_prefills=1, long_prefill_token_threshold=4
    )
    lookups = count_lookups(engine, monkeypatch)
    engine.core.add(make_request("long", PROMPT))
    engine.core.add(make_request("other", PROMPT[::-1]))
    for _ in range(8):
        engine.core.step()
        assert blocked_on(engine) == {BlockReason.PARTIAL_PREFILLS: 1}

    assert lookups == {"long": 1, "other": 1}
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("reason", [BlockReason.ADAPTER_LOADING, BlockReason.ADAPTER_SLOT])
def test_who_waits_for_an_adapter_is_not_looked_up_again(
    reason: BlockReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(has_prefix_cache=True, num_slots=1)
    lookups = count_lookups(engine, monkeypatch)
    engine.core.add(make_request("runs", adapter="x", max_tokens=20))
    if reason is BlockReason.ADAPTER_LOADING:
        engine.adapters.hold("y")
    engine.core.add(make_request("waits", PROMPT, adapter="y", max_tokens=2))
    for _ in range(8):
        engine.core.step()
        assert blocked_on(engine) == {reason: 1}

    assert lookups["waits"] <= 1
    engine.adapters.finish_loading("y")
    outcomes = collect_outcomes(engine.run())
    assert outcomes["waits"].terminal is not None
    engine.assert_idle()


# ------------------------------------------------------------------ for whom nobody waits

_SHARED = [1 + (i * 7) % 90 for i in range(200)]


@pytest.mark.parametrize("is_public", [False, True], ids=["one tenant", "public prefix"])
@pytest.mark.parametrize("name", ["fair", "fcfs", "priority"])
def test_an_urgent_request_does_not_wait_for_a_low_one_that_computes_its_prefix(
    name: PolicyName, is_public: bool
) -> None:
    """The low one gets what the classes between leave: a sixteenth."""
    engine = make_engine(
        has_prefix_cache=True,
        num_blocks=4_096,
        max_num_seqs=16,
        max_waiting=1_000,
        max_model_len=512,
        policy=make_policy(name, aging_s=30.0, most_charged=1e9),
        public_prefixes=[_SHARED] if is_public else [],
    )
    engine.core.add(make_request("low", _SHARED, max_tokens=2, priority=0, tenant="a"))
    engine.core.step()
    urgent = make_request(
        "urgent", _SHARED, max_tokens=2, priority=10, tenant="z" if is_public else "a"
    )
    engine.core.add(urgent)
    num_between = num_steps = 0
    tokens: list[int] = []
    while not tokens:
        while engine.scheduler.num_waiting < 5:
            draw = random.Random(num_between)
            prompt = [draw.randrange(1, 95) for _ in range(150)]
            engine.core.add(
                make_request(f"m{num_between}", prompt, max_tokens=2, priority=5, tenant="b")
            )
            num_between += 1
        events = engine.core.step()
        num_steps += 1
        assert num_steps <= 10  # alone it takes 200 / 32
        tokens = [token for e in events if e.request_id == "urgent" for token in e.token_ids]

    assert tokens[0] == solo_output(urgent)[0][0]


@pytest.mark.parametrize("priority", [0, -1])
@pytest.mark.parametrize("name", ["fair", "fcfs", "priority"])
def test_who_comes_later_or_ranks_lower_waits_and_shares(name: PolicyName, priority: int) -> None:
    engine = make_engine(
        has_prefix_cache=True,
        long_prefill_token_threshold=8,
        policy=make_policy(name, aging_s=30.0, most_charged=1e9),
    )
    engine.core.add(make_request("leader", PROMPT))
    engine.core.step()
    engine.core.add(make_request("follower", PROMPT, priority=priority))

    events = engine.core.step()

    assert blocked_on(engine) == {BlockReason.PREFIX: 1}
    terminal = collect_outcomes(events + engine.run())["follower"].terminal
    assert terminal is not None
    assert terminal.usage is not None
    assert terminal.usage.cached_tokens == 40


def test_a_follower_waits_for_the_leader_before_it_while_a_later_one_has_promised_more() -> None:
    """It looks again when the one it may wait for has done its part."""
    engine = make_engine(
        has_prefix_cache=True, max_num_seqs=8, long_prefill_token_threshold=4, num_blocks=200
    )
    engine.core.add(make_request("late", [*PROMPT, *PROMPT[:10]], max_tokens=1, priority=0))
    engine.core.step()
    engine.core.add(make_request("early", PROMPT[:21], max_tokens=1, priority=2, seed=1))
    engine.core.step()
    engine.core.add(make_request("follower", PROMPT, max_tokens=1, priority=1, seed=2))

    events = engine.core.step()

    assert blocked_on(engine) == {BlockReason.PREFIX: 1}
    outcomes = collect_outcomes(events + engine.run())
    terminal = outcomes["follower"].terminal
    assert terminal is not None
    assert terminal.usage is not None
    assert terminal.usage.cached_tokens >= 20
    engine.assert_idle()


def test_a_follower_that_was_told_to_wait_goes_on_when_another_has_computed_it() -> None:
    """Under `fair`, where the leader's part is small: an urgent one computes the same and is done first."""
    engine = make_engine(
        has_prefix_cache=True, max_num_seqs=8, num_blocks=200, policy=FairPolicy(30.0)
    )
    long = [*PROMPT, 9]
    engine.core.add(make_request("low", long, max_tokens=1, priority=1))
    engine.core.step()
    engine.core.add(make_request("follower", long, max_tokens=1, priority=0, seed=1))
    engine.core.add(make_request("urgent", long, max_tokens=1, priority=5, seed=2))

    outcomes = collect_outcomes(engine.run())

    assert set(outcomes) == {"low", "follower", "urgent"}
    terminal = outcomes["follower"].terminal
    assert terminal is not None
    assert terminal.usage is not None
    assert terminal.usage.cached_tokens == 40
    engine.assert_idle()
