"""The loop around a core on fakes: what it counts as a stall, and what one request's fault leaves behind."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from loraplex_engine.core import EngineCore
from loraplex_engine.protocol import EngineStats, Generate, Grammar
from loraplex_engine.request import Request
from loraplex_engine.step_loop import (
    Admitted,
    Failed,
    Output,
    Poisoned,
    ReplicaFacts,
    StepLoop,
    StepOutput,
)

from tests.support.engine_fakes import FakeClock, FakeEngine, make_engine, make_request
from tests.support.grammars import ListGrammars

DEADLINE_S = 60.0
FACTS = ReplicaFacts(
    model_fingerprint="sha256:" + "f" * 64,
    kv_format="fake",
    device="cpu",
    isa="none",
    dtype="float32",
    torch_version="none",
    backends={},
    max_model_len=64,
    row_rule_holds=True,
)


@dataclass
class LoopEngine:
    """`step_loop.Engine` around a core on fakes."""

    fakes: FakeEngine
    facts: ReplicaFacts = FACTS
    num_stats: int = 0
    pinned: frozenset[str] = frozenset()

    @property
    def core(self) -> EngineCore:
        return self.fakes.core

    def attach(self, wake: Callable[[], None], observe_load: object) -> None:
        pass

    def prefetch(self, digest: str) -> None:
        pass

    def pin(self, digest: str) -> None:
        pass

    def unpin(self, digest: str) -> None:
        pass

    def tidy(self) -> None:
        pass

    def stats(self) -> EngineStats:
        self.num_stats += 1  # once a turn
        return self.fakes.core.stats()

    def close(self) -> None:
        pass


@dataclass
class Loop:
    """A running loop, its clock and what it said."""

    engine: LoopEngine
    clock: FakeClock = field(default_factory=FakeClock)
    outputs: queue.SimpleQueue[Output] = field(default_factory=queue.SimpleQueue)

    def __enter__(self) -> Loop:
        self.loop = StepLoop(lambda: self.engine, self.outputs.put, clock=self.clock)
        self.loop.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self.loop.stop(DEADLINE_S)

    def next(self, kind: type[Output]) -> Output:
        """Skips what is of another kind."""
        give_up_s = time.monotonic() + DEADLINE_S
        while True:
            output = self.outputs.get(timeout=max(0.0, give_up_s - time.monotonic()))
            if isinstance(output, kind):
                return output
            assert not isinstance(output, Failed), output

    def turn(self, count: int = 3) -> None:
        """Wait until the loop has come round so often."""
        target = self.engine.num_stats + count
        give_up_s = time.monotonic() + DEADLINE_S
        while self.engine.num_stats < target:
            assert time.monotonic() < give_up_s
            time.sleep(0.001)


# ---------------------------------------------------------------------------- the watchdog


def test_waiting_for_nothing_that_could_come_is_a_stall() -> None:
    fakes = make_engine(num_blocks=4)
    fakes.pool.take(4)  # nobody's: blocks that were lost
    with Loop(LoopEngine(fakes)) as loop:
        loop.loop.submit(make_request())
        loop.next(Admitted)
        loop.turn()
        loop.clock.now_s += 100

        loop.turn()

        assert loop.loop.stalled_s() == 100


def test_waiting_for_an_adapter_or_a_grammar_is_none() -> None:
    grammars = ListGrammars(97, is_open=False)
    fakes = make_engine(grammars=grammars)
    fakes.adapters.hold("slow")
    with Loop(LoopEngine(fakes)) as loop:
        loop.loop.submit(make_request("a", adapter="slow"))
        loop.loop.submit(with_grammar(make_request("g")))
        loop.next(Admitted)
        loop.next(Admitted)
        loop.turn()
        loop.clock.now_s += 100

        loop.turn()

        assert loop.loop.stalled_s() == 0
        fakes.adapters.finish_loading("slow")
        grammars.finish()
        while fakes.core.has_work():
            loop.next(StepOutput)


def with_grammar(request: Generate) -> Generate:
    sampling = msgspec.structs.replace(
        request.sampling, grammar=Grammar(kind="regex", value="[[10, 11]]")
    )
    return msgspec.structs.replace(request, sampling=sampling)


# ------------------------------------------------------------------------ a fault in one


@pytest.mark.parametrize("is_queued", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("num_good", [0, 1])
def test_a_request_that_cannot_be_queued_ends_alone(
    num_good: int, is_queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its grammar still compiling, so that whatever keeps a hold on it would find it later."""
    grammars = ListGrammars(97, is_open=False)
    fakes = make_engine(grammars=grammars)
    calls = itertools.count()
    add = fakes.scheduler.add

    def failing_add(request: Request) -> None:
        is_bad = next(calls) == num_good
        if not is_bad or is_queued:
            add(request)
        if is_bad:
            raise MemoryError("injected")

    monkeypatch.setattr(fakes.scheduler, "add", failing_add)
    with Loop(LoopEngine(fakes)) as loop:
        loop.loop.submit(with_grammar(make_request("bad", n=3)))
        loop.next(Poisoned)
        grammars.finish()
        loop.loop.submit(make_request("good", max_tokens=2))

        loop.next(Admitted)
        output = loop.next(StepOutput)
        while output.events[-1].finish_reason is None:
            output = loop.next(StepOutput)

        assert output.events[-1].request_id == "good"
    assert fakes.core.live_usage() == {}
    fakes.assert_idle()


def test_a_policy_that_fails_leaves_the_counts_of_the_queue_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fakes = make_engine()

    def failing_push(request: Request) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(fakes.scheduler._waiting, "push", failing_push)
        with pytest.raises(MemoryError):
            fakes.core.add(make_request())

    fakes.assert_idle()
