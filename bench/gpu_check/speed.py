"""Parts `decode`, `invariant` and `prefill`: tokens a second of an 8B-shaped model, and what adapters cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_kernels.plans import Column

from bench.gpu_check.adapters import RandomAdapter, random_adapter
from bench.gpu_check.bandwidth import read_bandwidth
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine, median_wall_s
from bench.gpu_check.sizes import Sizes, shape_of
from bench.gpu_check.stand import GREEDY, Arrival, Room, Rows, Stand, blocks_for, random_decoder

# Of decoding without adapters, in %.
_IDLE_TARGET = 98.6
_ONE_TARGET = {"batch": 94.0, "single": 90.0}
_EIGHT_TARGET = 91.0
_MIXED_TARGET = 97.0  # of uniform ranks
_ROOFLINE_TARGET = 75.0
_TURNS = 6
_BATCHED = 16  # from so many rows on targets are those of a batch


def run_decode(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """The fast column: base, then adapters in every mixture, each in turns with base."""
    model = random_decoder(machine, sizes.speed_model, sizes.speed_dtype, "fast")
    bench = _Decoding(machine, sizes, model, "fast")
    # Both at once: what is measured minutes apart cannot be told apart to a percent.
    off = bench.open(has_adapters=False)
    stand = bench.open(has_adapters=True, cache_of=off)
    machine.warm()
    base = {batch: bench.step_s(off, batch, ()) for batch in sizes.contexts}
    for batch, seconds in base.items():
        record.add(f"LoRA off, batch {batch}", batch / seconds, "tokens/s", note=_ms(seconds))
    _record_roofline(machine, sizes, record, model, base)
    for batch in sizes.contexts:
        idle = bench.beside(off, stand, batch, ())
        _record_ratio(record, f"LoRA idle, batch {batch}", idle, batch, _IDLE_TARGET)
        for count in (count for count in sizes.adapters if count <= batch):
            slots = bench.fill(stand, [sizes.rank] * count)
            pair = bench.beside(off, stand, batch, slots)
            name = f"{count} x r{sizes.rank}, batch {batch}"
            _record_ratio(record, name, pair, batch, _target(count, batch))
        _record_mixed(sizes, record, bench, off, stand, batch)
    _record_arrival(sizes, record, bench, stand)
    _record_host(sizes, record, bench, off)


def run_invariant(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """The invariant column beside nothing: compare with the part `decode`."""
    model = random_decoder(machine, sizes.speed_model, sizes.speed_dtype, "invariant")
    bench = _Decoding(machine, sizes, model, "invariant")
    off = bench.open(has_adapters=False)
    stand = bench.open(has_adapters=True, cache_of=off)
    machine.warm()
    for batch in sizes.contexts:
        count = max(count for count in sizes.adapters if count <= batch)
        slots = bench.fill(stand, [sizes.rank] * count)
        pair = bench.beside(off, stand, batch, slots)
        record.add(f"base, batch {batch}", batch / pair.base_s, "tokens/s", note=_ms(pair.base_s))
        _record_ratio(record, f"{count} x r{sizes.rank}, batch {batch}", pair, batch, None)


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
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, model.config.vocab_size, count).tolist()

    def prefill(tokens: int, slot: int) -> Callable[[], object]:
        return lambda: Rows(stand.runner, [prompt[:tokens]], [slot], num_new=1).step()

    for tokens, slot in ((count, -1), (count, 0), (sizes.arriving_tokens, -1)):
        if not machine.is_rehearsal:
            prefill(tokens, slot)()  # kernels are compiled
    machine.warm()
    turns = 1 if machine.is_rehearsal else 5
    pair = in_turns(prefill(count, -1), prefill(count, 0), turns=turns, repeats=1)
    record.add(f"prefill of {count}, base", count / pair.base_s, "tokens/s", note=_ms(pair.base_s))
    record.add(
        f"prefill of {count}, 1 x r{sizes.rank}",
        pair.percent,
        "% of base",
        note=f"{_ms(pair.took_s)}, {pair.spread}",
    )
    short = median_wall_s(prefill(sizes.arriving_tokens, -1), turns)
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
        at_most=short * 1e3,
        note=f"{adapter.packed.image.numel() / 1e6:.0f} MB; the target is a prefill of"
        f" {sizes.arriving_tokens} tokens",
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two things that were timed in turns; seconds, one number a turn."""

    bases: tuple[float, ...]
    others: tuple[float, ...]

    @property
    def base_s(self) -> float:
        """Of the first."""
        return statistics.median(self.bases)

    @property
    def took_s(self) -> float:
        """Of the second."""
        return statistics.median(self.others)

    @property
    def percent(self) -> float:
        """The first's time of the second's: 100 where the second costs nothing; median over turns."""
        return statistics.median(self._percents())

    @property
    def spread(self) -> str:
        """From the least to the largest of `percent` over turns: what is nearer than that is not resolved."""
        percents = self._percents()
        return f"{min(percents):.1f}..{max(percents):.1f} % over {len(percents)} turns"

    def _percents(self) -> list[float]:
        return [100 * base / took for base, took in zip(self.bases, self.others, strict=True)]


def in_turns(
    base: Callable[[], object], other: Callable[[], object], *, turns: int, repeats: int
) -> Pair:
    """Time both in turns, `repeats` calls each a turn, so that a clock that drifts takes part in both alike."""
    times = [(median_wall_s(base, repeats), median_wall_s(other, repeats)) for _ in range(turns)]
    return Pair(tuple(one for one, _ in times), tuple(two for _, two in times))


@dataclass
class _Decoding:
    """Decoding steps of one model under one column."""

    machine: Machine
    sizes: Sizes
    model: Decoder
    column: Column
    _drawn: dict[int, RandomAdapter] = field(default_factory=dict)  # rank -> one of it

    def open(self, *, has_adapters: bool, cache_of: Stand | None = None) -> Stand:
        """A runner with room for every batch.

        Args:
            cache_of: whose KV cache it shares: what lies there means nothing.
        """
        sizes = self.sizes
        num_new = 2 * sizes.steps + 8
        return Stand(
            self.machine,
            self.model,
            self.column,
            Room(
                max_rows=max(sizes.contexts),
                max_tokens=max(*sizes.contexts, self.arrival_batch() + sizes.arriving_tokens),
                max_len=max(sizes.contexts.values()) + num_new,
                num_blocks=max(
                    blocks_for(batch, context + num_new)
                    for batch, context in sizes.contexts.items()
                )
                + blocks_for(1, sizes.arriving_tokens + 1),
                num_slots=sizes.num_slots if has_adapters else 0,
                max_rank=sizes.max_rank,
            ),
            cache_of=cache_of,
        )

    def arrival_batch(self) -> int:
        """Rows of the step that a prompt arrives in."""
        return max(size for size in self.sizes.contexts if size <= 64)

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
        rows = self.rows(stand, batch, slots, is_recorded=is_recorded, sampling=sampling)
        return median_wall_s(rows.step, self.sizes.steps)

    def beside(self, base: Stand, stand: Stand, batch: int, slots: tuple[int, ...]) -> Pair:
        """Steps of `stand` with adapters in turns with those of `base` without."""
        turns = min(_TURNS, self.sizes.steps)
        return in_turns(
            self.rows(base, batch, ()).step,
            self.rows(stand, batch, slots).step,
            turns=turns,
            repeats=self.sizes.steps // turns,
        )

    def rows(
        self,
        stand: Stand,
        batch: int,
        slots: tuple[int, ...],
        *,
        is_recorded: bool = True,
        sampling: SamplingParams = GREEDY,
        num_spare: int = 0,
    ) -> Rows:
        """Rows that have decoded a few steps: adapters are up, kernels compiled, the step recorded.

        Args:
            num_spare: so many fewer than `batch`.
        """
        context = self.sizes.contexts[batch]
        batch -= num_spare
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
            stand.capture(batch, min(len(slots), batch))
        else:
            stand.graphs.forget()
        for _ in range(0 if self.machine.is_rehearsal else 3):
            rows.step()
        return rows

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
    sizes: Sizes, record: Recorder, bench: _Decoding, off: Stand, stand: Stand, batch: int
) -> None:
    """Both in turns with base, as they cannot be in the slots at once."""
    count = min(max(sizes.adapters), batch)
    if count < len(sizes.mixed_ranks):
        return
    ranks = [sizes.mixed_ranks[index % len(sizes.mixed_ranks)] for index in range(count)]
    slots = bench.fill(stand, [sizes.mixed_like_rank] * count)
    uniform = bench.beside(off, stand, batch, slots)
    mixed = bench.beside(off, stand, batch, bench.fill(stand, ranks))
    record.add(
        f"{count} of ranks {min(ranks)}..{max(ranks)}, batch {batch}",
        100 * mixed.percent / uniform.percent,
        f"% of uniform r{sizes.mixed_like_rank}",
        at_least=_MIXED_TARGET,
        note=f"{_ms(mixed.took_s)}, of base {mixed.spread}; uniform {uniform.spread}",
    )


def _record_arrival(sizes: Sizes, record: Recorder, bench: _Decoding, stand: Stand) -> None:
    """A prompt that comes among decoding rows: what their step takes with it and without."""
    batch, count = bench.arrival_batch(), sizes.arriving_tokens
    most = min(8, max(sizes.adapters), batch)
    for num_adapters in (most,) if bench.machine.is_rehearsal else (0, most):
        slots = bench.fill(stand, [sizes.rank] * num_adapters)
        rows = bench.rows(stand, batch, slots, num_spare=1)
        arrival = Arrival(rows, count, slot=slots[0] if slots else -1)
        for _ in range(0 if bench.machine.is_rehearsal else 2):
            arrival.step()
        pair = in_turns(rows.step, arrival.step, turns=min(_TURNS, sizes.steps), repeats=1)
        adapters = f", {num_adapters} x r{sizes.rank}" if num_adapters else ""
        record.add(
            f"a prompt of {count} among {batch - 1} decoding rows{adapters}",
            pair.took_s * 1e3,
            "ms",
            note=f"{_ms(pair.base_s)} when only the {batch - 1} decode",
        )


def _record_ratio(
    record: Recorder, name: str, pair: Pair, batch: int, target: float | None
) -> None:
    note = f"{_ms(pair.took_s)}, {batch / pair.took_s:,.0f} tokens/s, {pair.spread}"
    record.add(name, pair.percent, "% of base", at_least=target, note=note)


def _target(count: int, batch: int) -> float | None:
    if count == 1:
        return _ONE_TARGET["batch" if batch >= _BATCHED else "single"] if batch != 8 else None
    if count == 8 and batch >= _BATCHED:
        return _EIGHT_TARGET
    return None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
