"""Compiling grammars: a real worker that hostile ones kill, and the bounds around it with a fake one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from loraplex_engine.errors import InvalidRequestError, QueueFullError
from loraplex_engine.protocol import MAX_GRAMMAR_CHARS, Grammar
from loraplex_engine.structured import worker as worker_module
from loraplex_engine.structured import worker_process as process_module
from loraplex_engine.structured.compiler import (
    FAILURE_TTL_S,
    CompilerLimits,
    GrammarCompiler,
    NoGrammars,
)
from loraplex_engine.structured.errors import (
    GrammarDeadEndError,
    GrammarError,
    GrammarInvalidError,
    GrammarTooComplexError,
    GrammarUnavailableError,
)
from loraplex_engine.structured.meter import COMPILE_BUCKETS_S
from loraplex_engine.structured.tokenizer import open_tokenizer
from loraplex_engine.structured.worker_frames import Setup, TokenizerSpec, Trial, Verdict
from loraplex_engine.structured.worker_process import WorkerProcess

from tests.support.engine_fakes import FakeClock
from tests.support.grammars import schema, wait_for, write_tokenizer

# Over a second of work and some 50 MB to compile.
HEAVY = Grammar(kind="lark", value="start: " + " ".join(['"a"?'] * 20_000))
LIGHT = Grammar(kind="regex", value="[a-z]+")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSpec:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(spec: TokenizerSpec) -> Iterator[GrammarCompiler]:
    """With the real worker and the usual limits."""
    compiler = GrammarCompiler(spec, CompilerLimits(cpu_limit_s=0.5, wall_limit_s=120.0))
    yield compiler
    compiler.close()


def outcome(compiler: GrammarCompiler, grammar: Grammar, tenant: str = "t") -> GrammarError | None:
    compilation = compiler.request(grammar, tenant)
    wait_for(compilation)
    return compilation.error


def num_workers() -> int:
    """Grammar workers that are children of ours."""
    children = psutil.Process().children(recursive=True)
    return sum("loraplex_engine.structured.worker" in " ".join(c.cmdline()) for c in children)


# ------------------------------------------------------------------ the real worker


def test_a_grammar_is_compiled_once_and_forked_for_each(compiler: GrammarCompiler) -> None:
    before = compiler.num_compiled
    first = compiler.request(LIGHT, "t")
    wait_for(first)

    again = compiler.request(Grammar(kind="regex", value="[a-z]+"), "t")

    assert again.is_done
    assert compiler.num_compiled == before + 1
    one, other = first.matcher(), again.matcher()
    assert one is not other
    assert (one.masks_for() == other.masks_for()).all()


# What a grammar can be that means harm; the error it gets, or None where it is harmless after all.
HOSTILE: list[tuple[Grammar, type[GrammarError] | None]] = [
    (Grammar(kind="regex", value=r"[^\s\S]"), GrammarDeadEndError),
    (Grammar(kind="lark", value="start: A\nA: /a/ & ~/a/"), GrammarError),
    (Grammar(kind="regex", value="(a|a?)+" * 40), None),
    (Grammar(kind="regex", value="(x+x+)+y"), None),
    (Grammar(kind="regex", value="(?:a?){40}a{40}"), None),
    (Grammar(kind="regex", value="((a{1,99}){1,99}){1,99}"), None),
    (Grammar(kind="regex", value="(.*a){30}"), None),
    (Grammar(kind="regex", value="(" * 20_000 + "a" + ")" * 20_000), GrammarError),
    (Grammar(kind="lark", value="start: " + "(" * 20_000 + '"a"' + ")" * 20_000), GrammarError),
    (Grammar(kind="lark", value='start: start "a"'), GrammarError),
    (Grammar(kind="lark", value="start: a\na: b\nb: a"), GrammarError),
    (Grammar(kind="json_schema", value='{"items":' * 20_000 + "{}" + "}" * 20_000), GrammarError),
    (Grammar(kind="json_schema", value="[" * 100_000), GrammarInvalidError),
    (Grammar(kind="json_schema", value="\x00" * 1000), GrammarInvalidError),
    (Grammar(kind="json_schema", value='"text"'), GrammarInvalidError),
    (schema({"$ref": "#"}), GrammarError),
    (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), GrammarError),
    (schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}), GrammarError),
    (schema({"enum": [f"value {i}" for i in range(15_000)]}), None),
    # An automaton with a state for each remainder: native code that never comes back by itself.
    (schema({"type": "number", "multipleOf": 2147483648}), GrammarTooComplexError),
    (Grammar(kind="regex", value="a" * (MAX_GRAMMAR_CHARS - 1)), None),
    (Grammar(kind="lark", value='start: "' + "b" * (MAX_GRAMMAR_CHARS - 20) + '"'), None),
    (Grammar(kind="json_schema", value="{" + " " * (MAX_GRAMMAR_CHARS - 2) + "}"), None),
]


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_a_hostile_grammar_is_answered_and_harms_nobody(
    index: int, compiler: GrammarCompiler
) -> None:
    grammar, kind = HOSTILE[index]

    compilation = compiler.request(grammar, "hostile")
    wait_for(compilation)

    error = compilation.error
    if kind is not None:
        assert isinstance(error, kind)
        assert len(str(error)) <= 500
    elif error is None:
        compilation.matcher().masks_for()
    else:
        assert isinstance(error, GrammarTooComplexError | GrammarInvalidError | GrammarDeadEndError)
    assert outcome(compiler, Grammar(kind="regex", value=f"fine{index}")) is None


@pytest.mark.parametrize(
    "limits",
    [
        CompilerLimits(cpu_limit_s=0.1),
        CompilerLimits(cpu_limit_s=60.0, memory_bytes=24 * 1024**2),
    ],
    ids=["cpu", "memory"],
)
def test_what_takes_too_much_kills_the_worker_and_the_next_one_gets_another(
    limits: CompilerLimits, spec: TokenizerSpec
) -> None:
    before = num_workers()  # this module's fixture may have one, and other tests of this process
    compiler = GrammarCompiler(spec, limits)
    try:
        heavy = compiler.request(HEAVY, "t")
        wait_for(heavy)
        light = compiler.request(LIGHT, "t")
        wait_for(light)

        assert isinstance(heavy.error, GrammarTooComplexError)
        assert light.error is None
        assert compiler.num_worker_starts == 2
        assert (compiler.num_compiled, compiler.num_failed) == (1, 1)
    finally:
        compiler.close()
    assert num_workers() <= before


def test_a_grammar_whose_masks_are_slow_is_refused(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(spec)
    assert worker_module.try_grammar(tokenizer, LIGHT, spec.vocab_size).code is None
    monkeypatch.setattr(worker_module, "_MASK_LIMIT_S", 0.0)

    verdict = worker_module.try_grammar(tokenizer, LIGHT, spec.vocab_size)

    assert verdict.code == "grammar_too_complex"


def test_a_worker_that_died_idle_is_replaced(spec: TokenizerSpec) -> None:
    setup = Setup(tokenizer=spec, cpu_limit_s=5.0, memory_bytes=256 * 1024**2)
    worker = WorkerProcess(setup, wall_limit_s=60.0)
    try:
        assert worker.try_grammar(LIGHT).code is None
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()

        assert worker.try_grammar(LIGHT).code is None
        assert worker.num_starts == 2
    finally:
        worker.close()


def test_a_worker_that_cannot_start_is_not_the_senders_fault(tmp_path: Path) -> None:
    missing = TokenizerSpec(path=str(tmp_path / "none.json"), vocab_size=10, eos_token_ids=(0,))
    worker = WorkerProcess(
        Setup(tokenizer=missing, cpu_limit_s=5.0, memory_bytes=256 * 1024**2), wall_limit_s=60.0
    )
    try:
        with pytest.raises(GrammarUnavailableError):
            worker.try_grammar(LIGHT)
    finally:
        worker.close()


def test_a_worker_without_cpu_is_not_the_grammars_fault(spec: TokenizerSpec) -> None:
    before = num_workers()
    setup = Setup(tokenizer=spec, cpu_limit_s=60.0, memory_bytes=1024**3)
    worker = WorkerProcess(setup, wall_limit_s=0.05)
    try:
        with pytest.raises(GrammarUnavailableError):
            worker.try_grammar(HEAVY)
        assert worker.num_starts == 2
    finally:
        worker.close()
    assert num_workers() <= before


@pytest.mark.parametrize("fault", ["silent", "killed"])
def test_what_failed_for_want_of_cpu_or_memory_is_tried_again(
    fault: str, spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(tokenizer=spec, cpu_limit_s=5.0, memory_bytes=256 * 1024**2)
    worker = WorkerProcess(setup, wall_limit_s=60.0)
    ask, faults = worker._ask, [fault]

    def ask_in_vain(process: Any, message: Any, limit_s: float) -> Verdict:
        if isinstance(message, Trial) and faults:
            if faults.pop() == "silent":
                raise process_module._GoneError("silent")
            process.kill()
            process.wait()
            raise process_module._GoneError("read")
        return ask(process, message, limit_s)

    monkeypatch.setattr(worker, "_ask", ask_in_vain)
    try:
        assert worker.try_grammar(LIGHT).code is None
        assert worker.num_starts == 2
        assert not faults
    finally:
        worker.close()


def test_closing_does_not_wait_for_what_is_compiled(spec: TokenizerSpec) -> None:
    compiler = GrammarCompiler(spec, CompilerLimits(cpu_limit_s=60.0))
    wait_for(compiler.request(LIGHT, "t"))  # the worker is up
    heavy = compiler.request(HEAVY, "t")

    started_s = time.monotonic()
    compiler.close()

    assert time.monotonic() - started_s < 10
    assert heavy.error is None or isinstance(heavy.error, GrammarError)


def test_a_choice_that_exhausts_its_limits_leaves_the_others_alone(
    compiler: GrammarCompiler,
) -> None:
    grammar = Grammar(kind="regex", value="(a|b)*a(a|b){12}c")
    compilation = compiler.request(grammar, "t")
    wait_for(compilation)
    one, other = compilation.matcher(), compilation.matcher()
    with pytest.raises(GrammarError):
        one.advance(2)  # an end, too early: an error that sticks

    assert other.masks_for().any()
    assert compilation.matcher().masks_for().any()


# ------------------------------------------------------------------ bounds, with a fake worker


@dataclass
class FakeWorker:
    """Takes grammars one by one as the test lets it; says what `verdicts` has for a value."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    num_starts: int = 1
    tried: list[str] = field(default_factory=list)
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1000))
    has_ended: bool = False

    def try_grammar(self, grammar: Grammar) -> Verdict:
        self.gate.acquire()
        if self.has_ended:
            raise GrammarUnavailableError("ended")
        self.tried.append(grammar.value)
        return self.verdicts.get(grammar.value, Verdict())

    def end(self) -> None:
        self.has_ended = True
        self.gate.release(1000)

    def close(self) -> None:
        pass


def regex(value: str) -> Grammar:
    return Grammar(kind="regex", value=value)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def bounded(spec: TokenizerSpec, worker: FakeWorker, clock: FakeClock) -> Iterator[GrammarCompiler]:
    limits = CompilerLimits(max_queued=6, max_queued_per_tenant=4, cache_bytes=1024 * 1024)
    compiler = GrammarCompiler(spec, limits, clock=clock, worker=worker)
    yield compiler
    compiler.close()


def hold_worker(compiler: GrammarCompiler, worker: FakeWorker) -> None:
    """Have the thread wait within a first trial, so that what follows is queued."""
    worker.gate = threading.Semaphore(0)
    compiler.request(regex("held"), "holder")
    deadline_s = time.monotonic() + 30
    while compiler._queues:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_the_queue_is_bounded_in_all_and_per_tenant(
    bounded: GrammarCompiler, worker: FakeWorker
) -> None:
    hold_worker(bounded, worker)
    for index in range(4):
        bounded.request(regex(f"a{index}"), "greedy")
    with pytest.raises(QueueFullError):
        bounded.request(regex("one more"), "greedy")
    queued = bounded.request(regex("a0"), "greedy")  # the same again is no other one
    bounded.request(regex("b0"), "other")
    bounded.request(regex("b1"), "other")
    with pytest.raises(QueueFullError) as refusal:
        bounded.request(regex("b2"), "third")
    assert refusal.value.retry_after_s

    worker.gate.release(100)
    wait_for(queued)

    assert queued.error is None


def test_tenants_take_turns(bounded: GrammarCompiler, worker: FakeWorker) -> None:
    hold_worker(bounded, worker)
    for index in range(4):
        bounded.request(regex(f"a{index}"), "greedy")
    last = bounded.request(regex("b0"), "other")

    worker.gate.release(100)
    wait_for(last)
    wait_for(bounded.request(regex("a3"), "greedy"))

    assert worker.tried == ["held", "a0", "b0", "a1", "a2", "a3"]


def test_another_tenant_learns_nothing_of_what_one_has_compiled(
    bounded: GrammarCompiler, worker: FakeWorker
) -> None:
    assert outcome(bounded, regex("secret"), "one") is None
    assert outcome(bounded, regex("secret"), "other") is None

    assert worker.tried == ["secret", "secret"]


def test_a_failure_is_remembered_for_a_while(
    bounded: GrammarCompiler, worker: FakeWorker, clock: FakeClock
) -> None:
    worker.verdicts["bad"] = Verdict(code="grammar_too_complex", message="no")

    for _ in range(3):
        error = outcome(bounded, regex("bad"))
        assert isinstance(error, GrammarTooComplexError)
    assert worker.tried == ["bad"]

    clock.now_s += FAILURE_TTL_S
    del worker.verdicts["bad"]
    assert outcome(bounded, regex("bad")) is None
    assert worker.tried == ["bad", "bad"]


@pytest.mark.parametrize("size_bytes", [0, 10 * 1024**2], ids=["kept", "too large to keep"])
def test_a_grammar_that_failed_in_use_is_refused_for_a_while(
    size_bytes: int, bounded: GrammarCompiler, worker: FakeWorker, clock: FakeClock
) -> None:
    worker.verdicts["slow"] = Verdict(size_bytes=size_bytes)
    compilation = bounded.request(regex("slow"), "one")
    wait_for(compilation)
    used = compilation.matcher()

    compilation.note_failure(GrammarTooComplexError("too slow"))

    for _ in range(2):
        assert isinstance(outcome(bounded, regex("slow"), "one"), GrammarTooComplexError)
    assert worker.tried == ["slow"]
    assert outcome(bounded, regex("slow"), "other") is None  # each tenant's own
    assert used.masks_for().any()
    clock.now_s += FAILURE_TTL_S
    assert outcome(bounded, regex("slow"), "one") is None
    assert bounded.num_failed == 1
    assert bounded.size_bytes >= 0


def test_look_ups_and_compilations_are_counted_each_once(
    bounded: GrammarCompiler, worker: FakeWorker, clock: FakeClock
) -> None:
    """A hit is whatever need not be compiled: kept, on its way, or known to fail; not a refusal."""
    worker.verdicts["bad"] = Verdict(code="grammar_too_complex", message="no")
    taking = {"good": 0.02, "bad": 3.0}
    try_grammar = worker.try_grammar

    def try_slowly(grammar: Grammar) -> Verdict:
        clock.now_s += taking.get(grammar.value, 0.0)
        return try_grammar(grammar)

    worker.try_grammar = try_slowly  # type: ignore[method-assign]
    for value in ("good", "good", "bad", "bad", "bad"):
        outcome(bounded, regex(value))

    meter = bounded.meter
    assert (meter.num_queries, meter.num_hits) == (5, 3)
    by_bound = dict(zip(COMPILE_BUCKETS_S, meter.compile_counts, strict=False))
    assert {bound: count for bound, count in by_bound.items() if count} == {0.025: 1, 5.0: 1}
    assert meter.compile_seconds_total == pytest.approx(3.02)

    hold_worker(bounded, worker)
    num_queries = meter.num_queries
    for index in range(4):
        bounded.request(regex(f"q{index}"), "greedy")
    with pytest.raises(QueueFullError):
        bounded.request(regex("q4"), "greedy")
    assert meter.num_queries == num_queries + 4
    worker.gate.release(100)


def test_a_passing_fault_is_not_remembered(bounded: GrammarCompiler, worker: FakeWorker) -> None:
    worker.verdicts["good"] = Verdict(code="grammar_unavailable", message="not now")
    assert isinstance(outcome(bounded, regex("good")), GrammarUnavailableError)

    del worker.verdicts["good"]

    assert outcome(bounded, regex("good")) is None
    assert worker.tried == ["good", "good"]
    assert bounded.num_failed == 1


def test_an_unknown_verdict_is_an_error(bounded: GrammarCompiler, worker: FakeWorker) -> None:
    worker.verdicts["odd"] = Verdict(code="something_new", message="?")

    error = outcome(bounded, regex("odd"))

    assert isinstance(error, GrammarError)


def test_what_passes_the_worker_and_fails_here_is_an_error(
    bounded: GrammarCompiler, worker: FakeWorker
) -> None:
    assert isinstance(outcome(bounded, regex("(")), GrammarInvalidError)
    assert worker.tried == ["("]


def test_the_cache_is_bounded_and_one_tenants_share_is_half(
    bounded: GrammarCompiler, worker: FakeWorker
) -> None:
    def compile_sized(name: str, tenant: str, kib: int) -> None:
        worker.verdicts[name] = Verdict(size_bytes=kib * 1024)
        assert outcome(bounded, regex(name), tenant) is None

    def is_kept(name: str, tenant: str) -> bool:
        before = len(worker.tried)
        assert outcome(bounded, regex(name), tenant) is None
        return len(worker.tried) == before

    compile_sized("victim", "victim", 200)
    for index in range(10):
        compile_sized(f"g{index}", "greedy", 200)
        assert bounded.size_bytes <= 1024 * 1024

    assert is_kept("victim", "victim")
    assert is_kept("g9", "greedy")
    assert is_kept("g8", "greedy")
    assert not is_kept("g0", "greedy")


def test_what_is_too_large_to_keep_can_still_be_used(
    bounded: GrammarCompiler, worker: FakeWorker
) -> None:
    worker.verdicts["huge"] = Verdict(size_bytes=10 * 1024**2)
    compilation = bounded.request(regex("huge"), "t")
    wait_for(compilation)

    assert compilation.error is None
    assert compilation.matcher().masks_for().any()
    assert bounded.size_bytes == 0


def test_too_long_a_grammar_is_refused_at_the_door(bounded: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError):
        bounded.request(regex("a" * (MAX_GRAMMAR_CHARS + 1)), "t")


def test_an_engine_without_a_tokenizer_says_so() -> None:
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        NoGrammars().request(LIGHT, "t")


def test_schemas_are_followed_in_the_order_that_they_were_sent(
    compiler: GrammarCompiler,
) -> None:
    properties = {name: {"type": "boolean"} for name in ("zeta", "alpha")}
    value = json.dumps({"type": "object", "properties": properties, "required": ["alpha", "zeta"]})
    compilation = compiler.request(Grammar(kind="json_schema", value=value), "t")
    wait_for(compilation)
    matcher = compilation.matcher()

    from tests.platform.gateway.tiny_model import ids_of

    for token_id in ids_of('{"zeta":true,"alpha":false}'):
        matcher.advance(token_id)

    assert matcher.is_complete
