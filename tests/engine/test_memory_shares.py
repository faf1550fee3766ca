"""What a tenant may take of an engine's memory: its share of the cache, and adapters at a time."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from loraplex_engine.policies import FairPolicy, Policy
from loraplex_engine.protocol import Generate
from loraplex_engine.request import BlockReason

from tests.support.engine_fakes import (
    FakeEngine,
    collect_outcomes,
    digest,
    make_engine,
    make_request,
    solo_output,
)

NUM_PROMPTS = 5


def prompt_of(tenant: str, number: int) -> list[int]:
    """Eight blocks of four and one token; nobody else's."""
    first = 1 + number + (40 if tenant == "noisy" else 0)
    return [first % 90 + 1, *range(1, 33)]


def ask(tenant: str, number: int, *, memory_weight: float | None, turn: int = 0) -> Generate:
    request = make_request(
        f"{tenant}-{turn}-{number}", prompt_of(tenant, number), tenant=tenant, max_tokens=1
    )
    return msgspec.structs.replace(request, memory_weight=memory_weight)


def serve(engine: FakeEngine, requests: list[Generate]) -> int:
    """One after the other, each with what it says alone; how many of their tokens were found."""
    num_found = 0
    for request in requests:
        engine.core.add(request)
        outcome = collect_outcomes(engine.run())[request.request_id]
        assert outcome.terminal is not None
        assert outcome.terminal.usage is not None
        assert (outcome.token_ids, outcome.terminal.finish_reason) == solo_output(request)
        num_found += outcome.terminal.usage.cached_tokens
    engine.assert_idle()
    return num_found


def found_after_a_flood(quiet: float | None, noisy: float | None) -> int:
    """Of the quiet tenant's prompts, when a noisy one has asked for twice what the cache holds."""
    engine = make_engine(has_prefix_cache=True, num_blocks=64)
    serve(engine, [ask("quiet", n, memory_weight=quiet) for n in range(NUM_PROMPTS)])
    serve(engine, [ask("noisy", n, memory_weight=noisy) for n in range(16)])
    return serve(engine, [ask("quiet", n, memory_weight=quiet, turn=1) for n in range(NUM_PROMPTS)])


def test_a_noisy_tenant_evicts_nothing_of_anothers_share() -> None:
    # 40 blocks of 64 are the quiet tenant's, which has three quarters; the weights of both are 1.
    assert found_after_a_flood(quiet=3.0, noisy=1.0) == NUM_PROMPTS * 32


def test_beyond_its_share_a_tenant_has_what_nobody_needs() -> None:
    assert found_after_a_flood(quiet=0.25, noisy=1.0) < NUM_PROMPTS * 32
    engine = make_engine(has_prefix_cache=True, num_blocks=64)
    requests = [ask("quiet", n, memory_weight=0.001) for n in range(NUM_PROMPTS)]
    serve(engine, requests)
    again = [ask("quiet", n, memory_weight=0.001, turn=1) for n in range(NUM_PROMPTS)]
    assert serve(engine, again) == NUM_PROMPTS * 32


def test_without_one_of_its_own_the_share_goes_by_the_weight() -> None:
    assert found_after_a_flood(quiet=None, noisy=None) == found_after_a_flood(1.0, 1.0)


def with_most(request: Generate, max_adapters: int | None) -> Generate:
    return msgspec.structs.replace(request, max_adapters=max_adapters)


@pytest.mark.parametrize(("max_adapters", "most_held"), [(1, 1), (2, 2), (None, 3)])
def test_a_tenant_holds_no_more_slots_than_it_may(max_adapters: int | None, most_held: int) -> None:
    engine = make_engine(num_slots=4, max_num_seqs=8)
    requests = [
        with_most(make_request(f"a{n}", adapter=name, tenant="a", max_tokens=6), max_adapters)
        for n, name in enumerate(["x", "y", "z", "x", "y"])
    ]
    requests.append(make_request("b", adapter="w", tenant="b", max_tokens=6))
    for request in requests:
        engine.core.add(request)
    held = [0]
    reasons: set[BlockReason | None] = set()

    def note() -> None:
        running = engine.scheduler._running
        adapters = {one.adapter_digest for one in running if one.generate.tenant_id == "a"}
        held.append(len(adapters))
        reasons.update(one.blocked_on for one in engine.scheduler._waiting.requests())

    outcomes = collect_outcomes(engine.run(after_step=note))

    assert max(held) == most_held
    assert (BlockReason.ADAPTER_SHARE in reasons) == (most_held < 3)
    for request in requests:
        outcome = outcomes[request.request_id]
        assert outcome.terminal is not None
        assert (outcome.token_ids, outcome.terminal.finish_reason) == solo_output(request)
    # Whoever runs nothing beside it is not held back by who does.
    assert digest("w") in engine.adapters.slots.values()
    engine.assert_idle()


@pytest.mark.parametrize("policy", [None, FairPolicy(30.0)], ids=["fcfs", "fair"])
@pytest.mark.parametrize("names", ["x", "xz"])
def test_an_adapter_beyond_the_most_gets_a_slot_though_the_others_are_asked_for_without_end(
    names: str, policy: Policy | None
) -> None:
    engine = make_engine(num_slots=4, max_num_seqs=8, policy=policy)
    steps = itertools.count(1)
    admitted: list[int] = []

    def ask(request_id: str, name: str) -> None:
        request = make_request(request_id, adapter=name, tenant="a", max_tokens=8)
        engine.core.add(with_most(request, len(names)))

    def go_on() -> None:
        step = next(steps)
        if step == 2:
            ask("beyond", "y")
        if step % 2 == 0 and step < 100:  # there is always one more than has ended
            ask(f"{step}", names[step // 2 % len(names)])
        if any(one.generate.request_id == "beyond" for one in engine.scheduler._running):
            admitted.append(step)

    for name in names:
        ask(name, name)
    engine.run(after_step=go_on)

    assert admitted[0] < 20  # once those have ended that were admitted before it
    engine.assert_idle()
