"""A runner and an adapter pool without a model, which check what the scheduler promises them.

`FakeRunner` keeps a KV cache of (position, token, adapter) entries in numbered blocks and reads a row's
context back through its block table only: a lost, doubled or stale block changes what it reads. The token
it samples is a hash of that context, so a request's output can be known without any engine: `solo_output`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from loraplex_engine.admission import ModelLimits
from loraplex_engine.block_events import BlockEvent
from loraplex_engine.config import Admission
from loraplex_engine.core import EngineCore
from loraplex_engine.errors import RequestRejectedError
from loraplex_engine.kv.block_pool import BlockPool
from loraplex_engine.kv.hashing import BlockHasher
from loraplex_engine.kv.manager import KvManager
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.policies import FcfsPolicy, Policy
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent, TokenLogprobs
from loraplex_engine.request import BlockReason
from loraplex_engine.scheduler import Scheduler, SchedulerLimits
from loraplex_engine.speculative import Drafter
from loraplex_engine.step import NewRow, Step, StepResult, UInt32Array
from loraplex_engine.structured.compiler import GrammarSource

from tests.support.core_driver import run_to_end

VOCAB_SIZE = 97
EOS = 0


def digest(name: str) -> str:
    """A well-formed adapter digest."""
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def next_token(token_ids: tuple[int, ...], adapter: str | None, seed: int) -> int:
    """What the fake model says after `token_ids`."""
    text = f"{adapter}|{seed}|{token_ids}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") % VOCAB_SIZE


def solo_output(generate: Generate) -> tuple[list[int], str]:
    """The tokens and the finish reason that a request gets when it runs alone and undisturbed."""
    sampling = generate.sampling
    stop_ids = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
    tokens = list(generate.prompt_token_ids)
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        output.append(next_token(tuple(tokens), generate.adapter_digest, sampling.seed))
        tokens.append(output[-1])
        if output[-1] in stop_ids:
            return output, "stop"
    return output, "length"


def make_request(
    request_id: str = "r0",
    prompt: list[int] | None = None,
    *,
    attempt: int = 0,
    max_tokens: int = 4,
    adapter: str | None = None,
    priority: int = 0,
    deadline_unix_s: float | None = None,
    seed: int = 7,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = True,
    logprobs: int | None = None,
    tenant: str = "t",
    weight: float = 1.0,
    n: int = 1,
) -> Generate:
    """A valid request; `adapter` is a name, sent as its digest; a tenant's salt follows from its name."""
    return Generate(
        request_id=request_id,
        attempt=attempt,
        lease_token=1,
        tenant_id=tenant,
        tenant_salt=f"salt of {tenant}".encode(),
        prompt_token_ids=[5, 6, 7] if prompt is None else prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            n=n,
        ),
        adapter_digest=None if adapter is None else digest(adapter),
        priority=priority,
        weight=weight,
        deadline_unix_s=deadline_unix_s,
    )


@dataclass
class FakeClock:
    """Time that tests move."""

    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeAdapterPool:
    """`num_slots` slots. Adapters load at once, except those `hold` names, until `finish_loading`."""

    num_slots: int = 2
    slots: dict[int, str] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    held_back: set[str] = field(default_factory=set)
    failures: dict[str, RequestRejectedError] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    beyond_share: set[str] = field(default_factory=set)  # tenants
    num_lease_calls: int = 0
    num_leased: int = 0
    num_released: int = 0

    def hold(self, name: str) -> None:
        self.held_back.add(digest(name))

    def finish_loading(self, name: str) -> None:
        self.held_back.discard(digest(name))

    def fail(self, name: str, error: RequestRejectedError) -> None:
        self.failures[digest(name)] = error

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        self.wanted.add(digest)

    def lease(self, digest: str, tenant_id: str = "") -> int | None:
        self.num_lease_calls += 1
        if digest in self.failures:
            raise self.failures[digest]
        assert digest in self.wanted, "leased before it was prefetched"
        if digest in self.held_back or tenant_id in self.beyond_share:
            return None
        slot = self._slot(digest)
        if slot is not None:
            self.leases[digest] = self.leases.get(digest, 0) + 1
            self.num_leased += 1
        return slot

    def is_loaded(self, digest: str) -> bool:
        return digest not in self.held_back and digest not in self.failures

    def why_refused(self, digest: str, tenant_id: str = "") -> BlockReason:
        if digest in self.held_back:
            return BlockReason.ADAPTER_LOADING
        is_beyond = tenant_id in self.beyond_share
        return BlockReason.ADAPTER_SHARE if is_beyond else BlockReason.ADAPTER_SLOT

    def release(self, digest: str, tenant_id: str = "") -> None:
        assert self.leases.get(digest, 0) > 0, "released more often than leased"
        self.leases[digest] -= 1
        self.num_released += 1

    @property
    def num_leases(self) -> int:
        return sum(self.leases.values())

    def _slot(self, digest: str) -> int | None:
        for slot, resident in self.slots.items():
            if resident == digest:
                return slot
        for slot in range(self.num_slots):
            resident_or_none = self.slots.get(slot)
            if resident_or_none is None or not self.leases.get(resident_or_none):
                self.slots[slot] = digest
                return slot
        return None


@dataclass
class _Row:
    """What the runner remembers of a row between steps."""

    num_tokens: int  # known
    unwritten: dict[int, int]  # position -> token not in the KV cache yet
    block_ids: list[int]
    adapter: str | None
    adapter_slot: int
    num_prompt_tokens: int
    seed: int
    logprobs: int | None


@dataclass
class FakeRunner:
    """An `Executor` that asserts the contract of `Step` and computes `next_token`."""

    adapters: FakeAdapterPool
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    # Called while a step is in flight, after it was launched and before it is collected.
    in_flight_hook: Callable[[], None] | None = None
    poisoned_seeds: set[int] = field(default_factory=set)  # their rows' logits are not finite
    steps: list[Step] = field(default_factory=list)
    rows: dict[int, _Row] = field(default_factory=dict)
    _cache: dict[int, tuple[int, int, str | None]] = field(default_factory=dict)
    _results: list[StepResult] = field(default_factory=list)

    def launch(self, step: Step) -> None:
        self.steps.append(step)
        self._forget_and_admit(step)
        self._check(step)
        self._results.append(self._compute(step))

    def collect(self) -> StepResult:
        if self.in_flight_hook is not None:
            hook, self.in_flight_hook = self.in_flight_hook, None
            hook()
        return self._results.pop(0)

    def _forget_and_admit(self, step: Step) -> None:
        for row in step.freed_rows:
            del self.rows[row]
        for source, target in step.block_copies:
            for offset in range(self.block_size):
                entry = self._cache.get(source * self.block_size + offset)
                self._cache.pop(target * self.block_size + offset, None)
                if entry is not None:
                    self._cache[target * self.block_size + offset] = entry
        for new in step.new_rows:
            assert new.row not in self.rows, "a row was given away twice"
            assert new.row == min(set(range(self.max_num_seqs)) - set(self.rows)), "not the lowest"
            self.rows[new.row] = self._new_row(new)
        for update in step.block_updates:
            table = self.rows[update.row].block_ids
            assert update.first_index == len(table)
            table.extend(update.block_ids)

    def _new_row(self, new: NewRow) -> _Row:
        adapter = None
        if new.adapter_slot >= 0:
            adapter = self.adapters.slots[new.adapter_slot]
        return _Row(
            num_tokens=len(new.token_ids),
            unwritten=dict(enumerate(new.token_ids)),
            block_ids=list(new.block_ids),
            adapter=adapter,
            adapter_slot=new.adapter_slot,
            num_prompt_tokens=new.num_prompt_tokens,
            seed=new.sampling.seed,
            logprobs=new.sampling.logprobs,
        )

    def _check(self, step: Step) -> None:
        arrays = (step.rows_B, step.num_computed_B, step.num_scheduled_B)
        assert all(array.dtype == np.int32 for array in arrays)
        assert step.samples_B.dtype == np.bool_
        assert 0 < step.num_tokens <= self.max_num_batched_tokens
        assert (step.num_scheduled_B >= 1).all()
        rows = step.rows_B.tolist()
        assert len(set(rows)) == len(rows)
        held = Counter(block for row in self.rows.values() for block in row.block_ids)
        assert all(0 <= block < self.num_blocks for block in held)
        for index, row_id in enumerate(rows):
            row = self.rows[row_id]
            first = int(step.num_computed_B[index])
            last = first + int(step.num_scheduled_B[index]) - 1
            for block in row.block_ids[first // self.block_size : last // self.block_size + 1]:
                assert held[block] == 1, "a row writes into a block that another one holds"
        for row in self.rows.values():
            assert len(set(row.block_ids)) == len(row.block_ids), "a row holds a block twice"
            if row.adapter is not None:
                assert self.adapters.leases.get(row.adapter, 0) > 0, "a row without a lease"
                assert self.adapters.slots[row.adapter_slot] == row.adapter, "evicted under a row"

    def _compute(self, step: Step) -> StepResult:
        tokens: list[tuple[int, ...]] = []
        finite, logprobs = [], {}
        for index, row_id in enumerate(step.rows_B.tolist()):
            row = self.rows[row_id]
            start, count = int(step.num_computed_B[index]), int(step.num_scheduled_B[index])
            drafts = step.drafts.get(index, ())
            row.unwritten.update(enumerate(drafts, row.num_tokens))
            for position in range(start, start + count):
                token = row.unwritten.pop(position)
                self._cache[self._place(row, position)] = (position, token, row.adapter)
            is_caught_up = start + count == row.num_tokens + len(drafts)
            assert is_caught_up or not drafts
            if is_caught_up and not step.samples_B[index]:  # its last token is to come again
                last = row.num_tokens - 1
                row.unwritten[last] = self._cache[self._place(row, last)][1]
            assert is_caught_up or not step.samples_B[index]
            finite.append(row.seed not in self.poisoned_seeds)
            if not step.samples_B[index]:
                tokens.append(())
                continue
            sampled: list[int] = []
            masks = step.token_masks.get(index)
            for place, draft in enumerate((*drafts, None)):
                token = next_token(self._read(row), row.adapter, row.seed)
                sampled.append(token if masks is None else _masked(token, masks[place]))
                row.num_tokens += 1
                if sampled[-1] != draft:
                    break
            if drafts and not finite[-1]:
                row.num_tokens -= len(sampled)
                row.unwritten[row.num_tokens - 1] = self._cache[
                    self._place(row, row.num_tokens - 1)
                ][1]
                tokens.append(())
                continue
            row.unwritten[row.num_tokens - 1] = sampled[-1]
            tokens.append(tuple(sampled) if finite[-1] else (-1,))
            if row.logprobs is not None and finite[-1]:
                logprobs[index] = [TokenLogprobs(-float(token), [], []) for token in sampled]
        return StepResult(
            step_id=step.step_id,
            tokens=tokens,
            is_finite_B=np.array(finite, dtype=np.bool_),
            logprobs=logprobs,
        )

    def _place(self, row: _Row, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        return row.block_ids[index] * self.block_size + offset

    def _read(self, row: _Row) -> tuple[int, ...]:
        entries = [self._cache[self._place(row, position)] for position in range(row.num_tokens)]
        assert [entry[0] for entry in entries] == list(range(row.num_tokens)), "foreign KV read"
        assert {entry[2] for entry in entries} == {row.adapter}, "another adapter's KV read"
        return tuple(entry[1] for entry in entries)


def _masked(token: int, mask_W: UInt32Array) -> int:
    """An allowed token, which one `token` decides."""
    bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    allowed = np.flatnonzero(bits)
    assert len(allowed), "a mask that allows nothing reached the runner"
    return int(allowed[token % len(allowed)])


@dataclass
class FakeEngine:
    """A core on the fakes, with everything at hand."""

    core: EngineCore
    scheduler: Scheduler
    runner: FakeRunner
    adapters: FakeAdapterPool
    pool: BlockPool
    clock: FakeClock
    kv: KvManager
    cache: PrefixCache  # without effect unless the engine was made with one

    def run(
        self, max_steps: int = 2_000, after_step: Callable[[], None] | None = None
    ) -> list[TokenEvent]:
        """Step until idle, checking invariants; all events in order."""
        return run_to_end(self.core, after_step=after_step, max_steps=max_steps)

    def assert_idle(self) -> None:
        """Nothing is held by anyone."""
        self.core.check()
        assert not self.core.has_work()
        assert self.pool.num_free == self.pool.num_blocks
        assert self.adapters.num_leases == 0
        assert self.adapters.num_leased == self.adapters.num_released
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.adapter_leases) == (0, 0, 0)


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_batched_tokens: int = 32,
    max_num_seqs: int = 4,
    max_waiting: int = 100,
    long_prefill_token_threshold: int | None = None,
    watermark_blocks: int = 0,
    max_model_len: int = 64,
    num_slots: int = 2,
    policy: Policy | None = None,
    admission: Admission = "optimistic",
    max_partial_prefills: int | None = None,
    waiting_served_ratio: float = 0.0,
    max_steps_closed: int = 20,
    has_prefix_cache: bool = False,
    tenant_share: float | None = None,
    public_prefixes: Sequence[Sequence[int]] = (),
    publish: Callable[[BlockEvent], None] | None = None,
    drafter: Drafter | None = None,
    grammars: GrammarSource | None = None,
) -> FakeEngine:
    """A small engine; first come, first served unless `policy` says otherwise."""
    adapters = FakeAdapterPool(num_slots=num_slots)
    pool = BlockPool(num_blocks)
    hasher = BlockHasher(
        model_fingerprint="fake",
        kv_format="fake",
        block_size=block_size,
        public_prefixes=public_prefixes,
    )
    cache = PrefixCache(hasher, num_blocks, tenant_share=tenant_share, publish=publish)
    kv = KvManager(pool, block_size, cache=cache if has_prefix_cache else None)
    limits = SchedulerLimits(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        long_prefill_token_threshold=long_prefill_token_threshold,
        watermark_blocks=watermark_blocks,
        max_partial_prefills=max_partial_prefills,
        admission=admission,
        waiting_served_ratio=waiting_served_ratio,
        max_steps_closed=max_steps_closed,
    )
    scheduler = Scheduler(limits, kv, adapters, FcfsPolicy() if policy is None else policy, drafter)
    runner = FakeRunner(
        adapters=adapters,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    clock = FakeClock()
    core = EngineCore(
        scheduler,
        runner,
        adapters,
        clock,
        limits=ModelLimits(
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            max_model_len=max_model_len,
        ),
        grammars=grammars,
    )
    return FakeEngine(core, scheduler, runner, adapters, pool, clock, kv, cache)


@dataclass
class Outcome:
    """All that one request's events said."""

    token_ids: list[int] = field(default_factory=list)
    terminal: TokenEvent | None = None


def collect_outcomes(events: list[TokenEvent]) -> dict[str, Outcome]:
    """Events by request id; asserts that nothing follows a terminal event."""
    outcomes: dict[str, Outcome] = {}
    for event in events:
        outcome = outcomes.setdefault(event.request_id, Outcome())
        assert outcome.terminal is None, f"{event.request_id} spoke after its end"
        outcome.token_ids += event.token_ids
        if event.usage is not None:
            assert event.finish_reason is not None
            outcome.terminal = event
    return outcomes
