"""Continuous batching: the real core and scheduler, an executor that only lets time pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from loraplex_engine.admission import ModelLimits
from loraplex_engine.config import Admission, PolicyName
from loraplex_engine.core import EngineCore
from loraplex_engine.errors import QueueFullError
from loraplex_engine.kv.block_pool import BlockPool
from loraplex_engine.kv.manager import KvManager
from loraplex_engine.policies import Policy, ServiceGap, make_policy, max_charge
from loraplex_engine.policies.fair import INPUT_WEIGHT, OUTPUT_WEIGHT
from loraplex_engine.protocol import Generate, SamplingParams
from loraplex_engine.request import BlockReason
from loraplex_engine.scheduler import Scheduler, SchedulerLimits
from loraplex_engine.step import Step, StepResult

from bench.simulation.costs import CostModel
from bench.simulation.outcomes import Objectives, Recorder, TenantReport
from bench.simulation.traces import Arrival

_END, _TOKEN = 0, 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What of the engine's settings scheduling depends on."""

    policy: PolicyName = "fair"
    admission: Admission = "optimistic"
    num_blocks: int = 4096
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_waiting: int = 256
    max_model_len: int = 2048
    long_prefill_token_threshold: int | None = None
    max_partial_prefills: int | None = None
    waiting_served_ratio: float = 0.0
    max_steps_closed: int = 20
    aging_s: float = 30.0
    kv_watermark: float = 0.02
    patience_s: float | None = None  # a request that waits for longer expires


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a trace."""

    reports: list[TenantReport]
    elapsed_s: float
    num_steps: int
    num_preemptions: int = 0
    gap: ServiceGap | None = None  # as the policy's accounts have it
    service_gap: float = 0.0  # widest difference in service, as seen from outside


class Clock:
    """Seconds that pass when the executor says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


_LENGTH_BITS = 20


def _seed(index: int, output_tokens: int) -> int:
    """The core does not know which request of the trace it runs, nor when that will end; the seed does."""
    return index << _LENGTH_BITS | output_tokens


class _Executor:
    """Each step takes what the cost model says; each row puts out as many tokens as it is to."""

    def __init__(self, clock: Clock, costs: CostModel, on_first_run: Callable[[int], None]) -> None:
        self._clock = clock
        self._costs = costs
        self._on_first_run = on_first_run
        self._left: dict[int, int] = {}  # row -> tokens that it has still to put out
        self._launched: deque[Step] = deque()
        self.num_steps = 0

    def launch(self, step: Step) -> None:
        self.num_steps += 1
        for new in step.new_rows:
            index, length = divmod(new.sampling.seed, 1 << _LENGTH_BITS)
            self._left[new.row] = length - (len(new.token_ids) - new.num_prompt_tokens)
            self._on_first_run(index)
        self._launched.append(step)

    def collect(self) -> StepResult:
        step = self._launched.popleft()
        self._clock.now_s += self._costs.step_s(step.num_computed_B, step.num_scheduled_B)
        tokens: list[tuple[int, ...]] = []
        for row, samples in zip(step.rows_B.tolist(), step.samples_B.tolist(), strict=True):
            if not samples:
                tokens.append(())
                continue
            self._left[row] -= 1
            tokens.append((_TOKEN if self._left[row] else _END,))
        is_finite_B = np.ones(len(tokens), dtype=np.bool_)
        return StepResult(step_id=step.step_id, tokens=tokens, is_finite_B=is_finite_B)


class _NoAdapters:
    """Base model only."""

    num_leases = 0

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        raise AssertionError("no request has an adapter")

    def lease(self, digest: str, tenant_id: str = "") -> int | None:
        raise AssertionError("no request has an adapter")

    def is_loaded(self, digest: str) -> bool:
        raise AssertionError("no request has an adapter")

    def why_refused(self, digest: str, tenant_id: str = "") -> BlockReason:
        raise AssertionError("no request has an adapter")

    def release(self, digest: str, tenant_id: str = "") -> None:
        raise AssertionError("no request has an adapter")


class ServiceWatch:
    """Measures the gap between tenants from what runs, without asking the policy for its accounts.

    For each two tenants and each stretch of time in which both have something waiting throughout: the
    widest difference, over all intervals in it, between the services they got, each divided by its
    weight. A prompt counts when its request first runs, an output token when it is put out.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.widest = 0.0
        self._weights = weights
        self._service = dict.fromkeys(weights, 0.0)
        # Of each two tenants who have both been waiting: least and most of the difference since then.
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}

    def served(self, tenant: str, amount: float) -> None:
        self._service[tenant] += amount / self._weights[tenant]

    def look(self, waiting: set[str]) -> None:
        """After each step, before arrivals: whoever has nothing waiting then is out of the comparison."""
        tenants = sorted(waiting)
        ranges = {}
        for index, one in enumerate(tenants):
            for other in tenants[index + 1 :]:
                now = self._service[one] - self._service[other]
                least, most = self._ranges.get((one, other), (now, now))
                ranges[one, other] = least, most = min(least, now), max(most, now)
                self.widest = max(self.widest, most - least)
        self._ranges = ranges


def replay(
    arrivals: Sequence[Arrival],
    costs: CostModel,
    settings: EngineSettings,
    objectives: Objectives,
) -> Replay:
    """Run a trace through the scheduler, from its first arrival until all have ended."""
    watch = ServiceWatch({arrival.tenant: arrival.weight for arrival in arrivals})
    recorder = Recorder(objectives)
    clock = Clock()
    has_run: set[int] = set()

    def note_first_run(index: int) -> None:
        if index not in has_run:
            has_run.add(index)
            arrival = arrivals[index]
            watch.served(arrival.tenant, INPUT_WEIGHT * arrival.prompt_tokens)

    executor = _Executor(clock, costs, note_first_run)
    core, policy = _make_core(settings, executor, clock)
    next_index = 0
    while next_index < len(arrivals) or core.has_work():
        if not core.has_work():
            clock.now_s = max(clock.now_s, arrivals[next_index].at_s)
        while next_index < len(arrivals) and arrivals[next_index].at_s <= clock.now_s:
            arrival = arrivals[next_index]
            recorder.sent(next_index, arrival.tenant, arrival.at_s)
            try:
                core.add(_generate(next_index, arrival, settings.patience_s))
            except QueueFullError:
                recorder.refused(next_index)
            next_index += 1
        for event in core.step():
            index = int(event.request_id)
            if event.error_code == "deadline_exceeded":
                recorder.expired(index)
                continue
            for _ in event.token_ids:
                is_last = event.finish_reason is not None
                recorder.token(index, clock.now_s, is_last=is_last)
                watch.served(arrivals[index].tenant, OUTPUT_WEIGHT)
        watch.look({request.generate.tenant_id for request in policy.requests()})
    core.check()
    return Replay(
        reports=recorder.reports(clock.now_s),
        elapsed_s=clock.now_s,
        num_steps=executor.num_steps,
        num_preemptions=core.stats().num_preemptions_total,
        gap=policy.service_gap(),
        service_gap=watch.widest,
    )


def _make_core(
    settings: EngineSettings, executor: _Executor, clock: Clock
) -> tuple[EngineCore, Policy]:
    most_charged = max_charge(
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        num_kv_tokens=settings.num_blocks * settings.block_size,
        is_reserving=settings.admission == "reserve",
    )
    policy = make_policy(settings.policy, aging_s=settings.aging_s, most_charged=most_charged)
    limits = SchedulerLimits(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        watermark_blocks=int(settings.kv_watermark * settings.num_blocks),
        max_partial_prefills=settings.max_partial_prefills,
        admission=settings.admission,
        waiting_served_ratio=settings.waiting_served_ratio,
        max_steps_closed=settings.max_steps_closed,
    )
    adapters = _NoAdapters()
    kv = KvManager(BlockPool(settings.num_blocks), settings.block_size)
    core = EngineCore(
        Scheduler(limits, kv, adapters, policy),
        executor,
        adapters,
        clock,
        limits=ModelLimits(
            vocab_size=2, eos_token_ids=frozenset({_END}), max_model_len=settings.max_model_len
        ),
    )
    return core, policy


def _generate(index: int, arrival: Arrival, patience_s: float | None) -> Generate:
    return Generate(
        request_id=str(index),
        attempt=0,
        lease_token=0,
        tenant_id=arrival.tenant,
        tenant_salt=b"",
        prompt_token_ids=[_TOKEN] * arrival.prompt_tokens,
        sampling=SamplingParams(
            max_tokens=arrival.max_tokens, seed=_seed(index, arrival.output_tokens)
        ),
        priority=arrival.priority,
        weight=arrival.weight,
        deadline_unix_s=None if patience_s is None else arrival.at_s + patience_s,
    )
