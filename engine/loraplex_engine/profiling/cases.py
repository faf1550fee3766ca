"""Runs the kinds of steps and turns what the clock says into figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from loraplex_engine.profiling.adapters import NUMBER_BYTES
from loraplex_engine.profiling.clock import PartClock
from loraplex_engine.profiling.figures import (
    DETOKENIZE,
    OTHER,
    PARTS,
    RECEIVE,
    SSE,
    Case,
    GatewayFigures,
    Part,
)
from loraplex_engine.profiling.floors import StepShape, Work, step_work
from loraplex_engine.profiling.machine import MachineFigures
from loraplex_engine.profiling.stand import Stand

_WARM_STEPS = 3
_REST = ""  # the clock's name for what no part took


@dataclass(slots=True)
class _Samples:
    """Steps that were timed inside, and as many that were not."""

    timed: list[dict[str, float]]  # seconds by part
    plain: list[float]  # seconds

    def best(self) -> tuple[dict[str, float], float]:
        """Of each kind the fastest quarter, averaged: other processes can only make a step longer."""
        num_kept = max(1, len(self.timed) // 4)
        kept = sorted(self.timed, key=lambda parts: sum(parts.values()))[:num_kept]
        names = {name for parts in kept for name in parts}
        timed = {name: statistics.fmean(parts.get(name, 0.0) for parts in kept) for name in names}
        return timed, statistics.fmean(sorted(self.plain)[:num_kept])


@dataclass(frozen=True, slots=True)
class Measured:
    """A kind of step: its work and what it took, whatever the machine can do."""

    phase: Literal["decode", "prefill"]
    step: StepShape
    work: Mapping[str, Work]
    seconds: Mapping[str, float]  # by part, the gateway's included
    engine_s: float
    plain_engine_s: float  # not instrumented

    def against(self, machine: MachineFigures) -> Case:
        """As shares of what `machine` can do."""
        step_s = sum(self.seconds.values())
        whole = Work(
            sum(one.num_bytes for one in self.work.values()),
            sum(one.flops for one in self.work.values()),
        )
        floor_ms = whole.floor_ms(machine)
        step = self.step
        return Case(
            phase=self.phase,
            batch=len(step.num_scheduled),
            tokens=step.num_tokens,
            context=step.num_computed[0],
            adapters=len(step.adapter_ranks),
            step_ms=1e3 * step_s,
            engine_ms=1e3 * self.engine_s,
            plain_engine_ms=1e3 * self.plain_engine_s,
            floor_ms=floor_ms,
            roofline_percent=100 * floor_ms / (1e3 * step_s),
            tokens_per_s=step.num_tokens / step_s,
            parts=_parts(self.seconds, step_s, self.work, machine),
        )


def decode_case(
    stand: Stand,
    gateway: GatewayFigures | None,
    *,
    batch: int,
    num_adapters: int,
    context: int,
    num_steps: int,
) -> Measured:
    """`batch` rows at about `context` tokens, row r on adapter r modulo their number; 0: all on the base."""
    adapters = [row % num_adapters if num_adapters else None for row in range(batch)]
    before = max(1, context - num_steps - _WARM_STEPS)
    with stand.skipping():
        requests = [stand.ask(before, 4 * num_steps + context, adapter) for adapter in adapters]
        stand.turn_until(batch)
    for _ in range(_WARM_STEPS):
        stand.turn()
    samples = _Samples([], [])
    clock = PartClock()
    for _ in range(num_steps):
        samples.plain.append(stand.turn())
        clock.clear()
        stand.turn(clock)
        samples.timed.append(clock.seconds)
    stand.end(requests)
    ranks = [stand.ranks[adapter] if adapter is not None else 0 for adapter in adapters]
    distinct = {adapter for adapter in adapters if adapter is not None}
    step = StepShape(
        num_computed=[context] * batch,
        num_scheduled=[1] * batch,
        adapter_ranks=[stand.ranks[adapter] for adapter in distinct],
        row_ranks=ranks,
    )
    return _measured("decode", stand, gateway, step, samples)


def prefill_case(
    stand: Stand,
    gateway: GatewayFigures | None,
    *,
    num_tokens: int,
    is_adapted: bool,
    num_steps: int,
) -> Measured:
    """A prompt of `num_tokens`, computed in one step that samples its first token."""
    adapter = 0 if is_adapted else None
    samples = _Samples([], [])
    clock = PartClock()
    core = stand.engine.core
    with stand.skipping():  # the adapter is in its slot before anything is timed
        request = stand.ask(1, 8, adapter)
        stand.turn_until(1)
        stand.end([request])
    for index in range(2 * num_steps + 1):
        request = stand.ask(num_tokens, 8, adapter)
        clock.clear()
        seconds = stand.turn(clock if index % 2 else None)
        assert core.last_step_num_tokens == num_tokens, "the prompt took more than one step"
        if index % 2:
            samples.timed.append(clock.seconds)
        elif index:  # the first only warms up
            samples.plain.append(seconds)
        stand.end([request])
    rank = stand.ranks[adapter] if adapter is not None else 0
    step = StepShape(
        num_computed=[0],
        num_scheduled=[num_tokens],
        adapter_ranks=[rank] if rank else [],
        row_ranks=[rank],
    )
    return _measured("prefill", stand, gateway, step, samples)


def _measured(
    phase: Literal["decode", "prefill"],
    stand: Stand,
    gateway: GatewayFigures | None,
    step: StepShape,
    samples: _Samples,
) -> Measured:
    runner = stand.engine.runner
    work = step_work(
        step,
        runner.model,
        stand.shape,
        kv_bytes_per_token=runner.attention.kv_bytes_per_block()
        / runner.limits.block_size
        * runner.model.config.num_layers,
        adapter_number_bytes=NUMBER_BYTES,
    )
    seconds, plain_s = samples.best()
    engine_s = sum(seconds.values())
    seconds[OTHER] = seconds.pop(_REST, 0.0)
    if gateway is not None:
        seconds[RECEIVE] = gateway.receive_ms / 1e3
        seconds[DETOKENIZE] = gateway.detokenize_ms / 1e3
        seconds[SSE] = gateway.stream_ms / 1e3
    return Measured(phase, step, work, seconds, engine_s, plain_s)


def _parts(
    seconds: Mapping[str, float],
    step_s: float,
    work: Mapping[str, Work],
    machine: MachineFigures,
) -> list[Part]:
    parts = []
    unknown: Sequence[str] = [name for name in seconds if name not in PARTS]
    assert not unknown, f"parts that no table shows: {unknown}"
    for name in PARTS:
        if name not in seconds:
            continue
        floor_ms = work[name].floor_ms(machine) if name in work else None
        taken_ms = 1e3 * seconds[name]
        roofline = 100 * floor_ms / taken_ms if floor_ms and taken_ms else None
        parts.append(
            Part(
                name=name,
                ms=taken_ms,
                percent=100 * seconds[name] / step_s,
                floor_ms=floor_ms,
                roofline_percent=roofline,
            )
        )
    return parts
