"""What ours costs as work grows: requests in flight x adapters in use, and adapters registered.

Each number of adapters is one start of the product; the levels of concurrency run in it one after the other, so
its memory is the most that any of them took. Last, 2,000 adapters are registered (most of rank 1, so that their
files stay small) and 128 of the larger are used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import adapters, load
from bench.peers.base import Place, Tell
from bench.peers.loraplex import Loraplex
from bench.suite import BASE_MODEL, Workload, adapter_name
from bench.workload import PromptWriter, WorkItem

Ours = Loraplex
LEVELS = (1, 4, 16, 64)
ADAPTERS = (1, 8, 32, 128)
REGISTERED = 2000
_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 32
_LEAST_REQUESTS = 8
_QUICK_LEVELS = (1, 16)
_QUICK_ADAPTERS = (1, 8)
_QUICK_REGISTERED = 12


def num_adapters(is_wanted: bool) -> int:
    """How many of the fleet's adapters it uses."""
    return max(ADAPTERS) if is_wanted else 0


def cell_items(
    writer: PromptWriter, used: int, concurrency: int, *, is_quick: bool = False
) -> list[WorkItem]:
    """Requests of one cell: each adapter in turn, at least two for each in flight."""
    count = max(_LEAST_REQUESTS, 2 * concurrency)
    output = 4 if is_quick else _OUTPUT_TOKENS
    return [
        WorkItem(idx, adapter_name(idx % used), writer.write(_PROMPT_TOKENS), output)
        for idx in range(count)
    ]


def run(
    ours: Loraplex,
    place: Place,
    tell: Tell,
    keep: Callable[[dict[str, Any]], None],
    *,
    is_quick: bool = False,
) -> None:
    """All cells; `keep` gets each as it is measured."""
    counts = _QUICK_ADAPTERS if is_quick else ADAPTERS
    levels = _QUICK_LEVELS if is_quick else LEVELS
    most = max(counts)
    registered = _QUICK_REGISTERED if is_quick else REGISTERED
    ours.register(place, [adapter_name(n) for n in range(most)], place.adapters_dir, tell)
    plan = [(used, most) for used in counts]
    for used, known in [*plan, (most, registered)]:
        if known > most:
            _register_many(ours, place, known - most, tell)
        writer = PromptWriter(place.model_dir / "tokenizer.json", seed=used)
        cells = [(n, cell_items(writer, used, n, is_quick=is_quick)) for n in levels]
        items = tuple(item for _, cell in cells for item in cell)
        one = Workload(f"scale-{used}-{known}", "", items, concurrency=max(levels))
        with ours.serve(place, one) as (served, target):
            first = WorkItem(0, BASE_MODEL, [1, 2, 3], 1)
            asyncio.run(load.replay(target, [first], concurrency=1, limit_s=place.limit_s))
            startup_s = time.perf_counter() - served.started
            for level, cell in cells:
                tell(f"{used} of {known} adapters, {level} in flight")
                samples = asyncio.run(
                    load.replay(target, cell, concurrency=level, limit_s=place.limit_s)
                )
                served.meter.sample()
                keep(
                    {
                        "adapters": used,
                        "registered": known,
                        "concurrency": level,
                        "startup_s": startup_s,
                        "peak_memory_gib": served.meter.peak_tree_gib,
                        "peak_process_gib": served.meter.peak_process_gib,
                        **load.summarise(samples, len(cell)),
                    }
                )


def _register_many(ours: Loraplex, place: Place, count: int, tell: Tell) -> None:
    names = [f"registered-{number:04d}" for number in range(count)]
    folder = place.scratch / "registered"

    def make(name: str) -> Path:
        return adapters.write(
            folder / name,
            place.model_dir,
            rank=1,
            seed=random.Random(name).getrandbits(32),
            base_name=BASE_MODEL,
        )

    ours.register(place, names, folder, tell, make=make)
