"""Parts `decode`, `invariant` and `prefill`: tokens a second of an 8B-shaped model, and what adapters cost."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_kernels.plans import Column

from bench.gpu_check.adapters import RandomAdapter, random_adapter
from bench.gpu_check.bandwidth import read_bandwidth
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine, median_wall_s
from bench.gpu_check.sizes import Sizes, shape_of
from bench.gpu_check.stand import GREEDY, Room, Rows, Stand, blocks_for, random_decoder

# Of decoding without adapters, in %.
_IDLE_TARGET = 98.6
_ONE_TARGET = {"batch": 94.0, "single": 90.0}
_EIGHT_TARGET = 91.0
_MIXED_TARGET = 97.0  # of uniform ranks
_ROOFLINE_TARGET = 75.0
_BATCHED = 16  # from so many rows on targets are those of a batch


def run_decode(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """The fast column: base, then adapters in every mixture."""
    model = random_decoder(machine, sizes.speed_model, sizes.speed_dtype, "fast")
    bench = _Decoding(machine, sizes, model, "fast")
    off = bench.open(has_adapters=False)
    base = {batch: bench.step_s(off, batch, ()) for batch in sizes.contexts}
    for batch, seconds in base.items():
        record.add(f"LoRA off, batch {batch}", batch / seconds, "tokens/s", note=_ms(seconds))
    _record_roofline(machine, sizes, record, model, base)
    _record_host(sizes, record, bench, off)
    del off
    bench.tidy()
    stand = bench.open(has_adapters=True)
    for batch, seconds in base.items():
        idle = bench.step_s(stand, batch, ())
        _record_ratio(record, f"LoRA idle, batch {batch}", idle, seconds, batch, _IDLE_TARGET)
        for count in (count for count in sizes.adapters if count <= batch):
            slots = bench.fill(stand, [sizes.rank] * count)
            took = bench.step_s(stand, batch, slots)
            name = f"{count} x r{sizes.rank}, batch {batch}"
            _record_ratio(record, name, took, seconds, batch, _target(count, batch))
        _record_mixed(sizes, record, bench, stand, batch)


def run_invariant(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """The invariant column beside nothing: compare with the part `decode`."""
    model = random_decoder(machine, sizes.speed_model, sizes.speed_dtype, "invariant")
    bench = _Decoding(machine, sizes, model, "invariant")
    stand = bench.open(has_adapters=True)
    for batch in sizes.contexts:
        seconds = bench.step_s(stand, batch, ())
        record.add(f"base, batch {batch}", batch / seconds, "tokens/s", note=_ms(seconds))
        count = max(count for count in sizes.adapters if count <= batch)
        took = bench.step_s(stand, batch, bench.fill(stand, [sizes.rank] * count))
        _record_ratio(record, f"{count} x r{sizes.rank}, batch {batch}", took, seconds, batch, None)


def run_prefill(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """One long prompt in one step, without and with an adapter; and how long an adapter takes to its slot."""
    model = random_decoder(machine, sizes.speed_model, sizes.speed_dtype, "fast")
    count = sizes.prefill_tokens
    stand = Stand(
        machine,
        model,
        "fast",
        Room(
            max_rows=8,
            max_tokens=count,
            max_len=count + 16,
            num_blocks=blocks_for(1, count + 16),
            num_slots=2,
            max_rank=sizes.max_rank,
        ),
    )
    adapter = random_adapter(
        shape_of(model.config), sizes.rank, model.dtype, pin=not machine.is_rehearsal
    )
    stand.pool.put(0, adapter)
    prompt = np.random.default_rng(0).integers(3, model.config.vocab_size, count).tolist()

    def prefill(slot: int) -> float:
        def once() -> None:
            Rows(stand.runner, [prompt], [slot], num_new=1).step()

        if not machine.is_rehearsal:
            once()
        return median_wall_s(once, 1 if machine.is_rehearsal else 5)

    base, adapted = prefill(-1), prefill(0)
    record.add(f"prefill of {count}, base", count / base, "tokens/s", note=_ms(base))
    record.add(
        f"prefill of {count}, 1 x r{sizes.rank}",
        100 * base / adapted,
        "% of base",
        note=_ms(adapted),
    )
    assert stand.lora is not None
    times = []
    for _ in range(2 if machine.is_rehearsal else 9):
        other = adapter.again()
        machine.synchronize()
        started = time.perf_counter()
        stand.lora.slots.hold(1, other.packed)
        machine.synchronize()
        times.append(time.perf_counter() - started)
    swap = statistics.median(times)
    record.add(
        f"swap-in of r{sizes.rank}",
        swap * 1e3,
        "ms",
        at_most=base * 1e3,
        note=f"{adapter.packed.image.numel() / 1e6:.0f} MB; the target is the prefill above",
    )


@dataclass
class _Decoding:
    """Decoding steps of one model under one column."""

    machine: Machine
    sizes: Sizes
    model: Decoder
    column: Column
    _drawn: dict[int, RandomAdapter] = field(default_factory=dict)  # rank -> one of it

    def open(self, *, has_adapters: bool) -> Stand:
        """A runner with room for every batch."""
        sizes = self.sizes
        num_new = 2 * sizes.steps + 8
        return Stand(
            self.machine,
            self.model,
            self.column,
            Room(
                max_rows=max(sizes.contexts),
                max_tokens=max(sizes.contexts),
                max_len=max(sizes.contexts.values()) + num_new,
                num_blocks=max(
                    blocks_for(batch, context + num_new)
                    for batch, context in sizes.contexts.items()
                ),
                num_slots=sizes.num_slots if has_adapters else 0,
                max_rank=sizes.max_rank,
            ),
        )

    def fill(self, stand: Stand, ranks: list[int]) -> tuple[int, ...]:
        """Put adapters of these ranks into the slots; returns the slots."""
        for slot, rank in enumerate(ranks):
            stand.pool.put(slot, self._adapter(rank).again())
        return tuple(range(len(ranks)))

    def step_s(
        self,
        stand: Stand,
        batch: int,
        slots: tuple[int, ...],
        *,
        is_recorded: bool = True,
        sampling: SamplingParams = GREEDY,
    ) -> float:
        """Median seconds of a whole step, from launch to tokens: host, copy, kernels, sampling."""
        context = self.sizes.contexts[batch]
        rng = np.random.default_rng(batch)
        prompts = rng.integers(3, self.model.config.vocab_size, (batch, context)).tolist()
        rows = Rows(
            stand.runner,
            prompts,
            [slots[row % len(slots)] if slots else -1 for row in range(batch)],
            num_new=self.sizes.steps + 4,
            is_computed=True,
            sampling=sampling,
        )
        if is_recorded:
            stand.capture(batch, len(slots))
        else:
            stand.graphs.forget()
        for _ in range(0 if self.machine.is_rehearsal else 3):
            rows.step()  # adapters go up, kernels are compiled
        return median_wall_s(rows.step, self.sizes.steps)

    def tidy(self) -> None:
        """Give memory back before the next runner takes its own."""
        gc.collect()
        if not self.machine.is_rehearsal:
            torch.cuda.empty_cache()

    def _adapter(self, rank: int) -> RandomAdapter:
        if rank not in self._drawn:
            shape, pin = shape_of(self.model.config), not self.machine.is_rehearsal
            self._drawn[rank] = random_adapter(shape, rank, self.model.dtype, pin=pin)
        return self._drawn[rank]


def _record_roofline(
    machine: Machine, sizes: Sizes, record: Recorder, model: Decoder, base: dict[int, float]
) -> None:
    """Batch 1 against the time that reading the weights once takes."""
    config = model.config
    layer = (config.q_size + 2 * config.kv_size + config.q_size) * config.hidden_size
    layer += 3 * config.hidden_size * config.intermediate_size
    numbers = layer * config.num_layers + config.num_token_ids * config.hidden_size
    floor = numbers * model.dtype.itemsize / read_bandwidth(machine, sizes)
    record.add(
        "batch 1 with graphs, of the weight-read roofline",
        100 * floor / base[1],
        "%",
        at_least=_ROOFLINE_TARGET,
        note=f"floor {_ms(floor)}",
    )


def _record_host(sizes: Sizes, record: Recorder, bench: _Decoding, stand: Stand) -> None:
    """What graphs and sampling change, at one batch."""
    eager = bench.step_s(stand, 1, (), is_recorded=False)
    record.add("eager, batch 1", 1 / eager, "tokens/s", note=_ms(eager))
    batch = max(size for size in sizes.contexts if size <= 64)
    drawn = SamplingParams(max_tokens=1 << 20, temperature=0.8, top_p=0.95, seed=1)
    took = bench.step_s(stand, batch, (), sampling=drawn)
    record.add(f"drawn with top-p, batch {batch}", batch / took, "tokens/s", note=_ms(took))


def _record_mixed(
    sizes: Sizes, record: Recorder, bench: _Decoding, stand: Stand, batch: int
) -> None:
    count = min(max(sizes.adapters), batch)
    if count < len(sizes.mixed_ranks):
        return
    ranks = [sizes.mixed_ranks[index % len(sizes.mixed_ranks)] for index in range(count)]
    uniform = bench.step_s(stand, batch, bench.fill(stand, [sizes.mixed_like_rank] * count))
    mixed = bench.step_s(stand, batch, bench.fill(stand, ranks))
    record.add(
        f"{count} of ranks {min(ranks)}..{max(ranks)}, batch {batch}",
        100 * uniform / mixed,
        f"% of uniform r{sizes.mixed_like_rank}",
        at_least=_MIXED_TARGET,
        note=_ms(mixed),
    )


def _record_ratio(
    record: Recorder, name: str, took: float, base: float, batch: int, target: float | None
) -> None:
    note = f"{_ms(took)}, {batch / took:,.0f} tokens/s"
    record.add(name, 100 * base / took, "% of base", at_least=target, note=note)


def _target(count: int, batch: int) -> float | None:
    if count == 1:
        return _ONE_TARGET["batch" if batch >= _BATCHED else "single"] if batch != 8 else None
    if count == 8 and batch >= _BATCHED:
        return _EIGHT_TARGET
    return None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
