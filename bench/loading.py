"""`python -m bench.loading`: what loading an adapter adds to a step, on the engine's core without HTTP.

One round is a pair: four rows decode while nothing is loaded (quiet), then four rows decode while the
largest adapters (rank 64 on all linears) are loaded one after another, each pushing the last one out
(loading). Figures are medians over the rounds. Exits 1 if a load delays a step by more than one step's
time: if p95 while loading exceeds the quiet median by more than the quiet p95.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex_engine.config import EngineConfig
from loraplex_engine.convert import cache_dir
from loraplex_engine.numerics_environment import prepare_numerics
from loraplex_engine.protocol import Generate, SamplingParams

if TYPE_CHECKING:
    from loraplex_engine.build import AssembledEngine

_NUM_ROWS = 4
_NUM_ADAPTERS = 3
_RANK = 64


class _Clock:
    """The pool's: moved on so that what was loaded is not waited for and the next may push it out."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


def _requests(round_index: int, max_tokens: int) -> list[Generate]:
    return [
        Generate(
            request_id=f"{round_index}-{row}-{time.monotonic_ns()}",
            attempt=0,
            lease_token=0,
            tenant_id="bench",
            tenant_salt=b"bench",
            prompt_token_ids=[1 + row, 2, 3],
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        for row in range(_NUM_ROWS)
    ]


def _step_seconds(
    engine: AssembledEngine, requests: list[Generate], digests: list[str], clock: _Clock
) -> list[float]:
    """Each step's time while the rows decode; with digests, while these are loaded in turn."""
    from loraplex_engine.lora.pool import WANTED_GRACE_S

    assert engine.lora is not None
    for request in requests:
        engine.core.add(request)
    times, index = [], 0
    while engine.core.has_work():
        if digests and not engine.stats().adapters_loading:
            clock.now_s += 2 * WANTED_GRACE_S
            engine.lora.pool.prefetch(digests[index % len(digests)])
            index += 1
        started = time.perf_counter()
        engine.core.step()
        times.append(time.perf_counter() - started)
    return times[2:]  # the prompt's step and the first after it are not decoding's


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=cache_dir() / "models" / "smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3, help="counted; one more comes before")
    parser.add_argument("--max-tokens", type=int, default=80)
    args = parser.parse_args()
    prepare_numerics()  # what follows imports numpy and torch
    import numpy as np
    from loraplex_engine.artifact import AdapterLimits, AdapterStore, read_adapter
    from loraplex_engine.build import assemble_engine

    from bench.adapters import write

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = AdapterStore(f"file://{folder / 'store'}")
        digests = []
        for seed in range(_NUM_ADAPTERS):
            path = write(
                folder / str(seed), args.model, rank=_RANK, seed=seed, base_name="smollm2-135m"
            )
            digests.append(read_adapter(path, limits=AdapterLimits()).digest)
            store.put(path, digests[-1])
        engine = assemble_engine(
            EngineConfig(
                model_dir=args.model,
                base_model="smollm2-135m",
                store_url=store.url,
                max_loras=1,
                max_cpu_loras=1,
                num_threads=max((os.cpu_count() or 2) - 1, 1),  # the last core is the loader's
                speculative="off",
            )
        )
        assert engine.lora is not None
        clock = _Clock()
        engine.lora.pool._clock = clock
        quiet_ms, loading_ms, num_loads = [], [], 0
        try:
            for index in range(args.rounds + 1):
                requests = _requests(index, args.max_tokens)
                quiet = _step_seconds(engine, requests, [], clock)
                before = engine.stats().adapter_loads_total
                loading = _step_seconds(engine, _requests(index, args.max_tokens), digests, clock)
                if index:
                    num_loads += engine.stats().adapter_loads_total - before
                    quiet_ms.append(1e3 * np.percentile(quiet, [50, 95]))
                    loading_ms.append(1e3 * np.percentile(loading, [50, 95]))
        finally:
            engine.close()
    quiet_p50, quiet_p95 = np.median(quiet_ms, axis=0)
    loading_p50, loading_p95 = np.median(loading_ms, axis=0)
    delay = loading_p95 - quiet_p50
    sys.stdout.write(
        f"{num_loads} loads of rank {_RANK} in {args.rounds} rounds of {_NUM_ROWS} rows\n"
        f"step p50 / p95 ms: quiet {quiet_p50:.1f} / {quiet_p95:.1f}, "
        f"loading {loading_p50:.1f} / {loading_p95:.1f}\n"
        f"delay at p95 {delay:.1f} ms (at most a step's {quiet_p95:.1f})\n"
    )
    sys.exit(0 if num_loads >= args.rounds and delay <= quiet_p95 else 1)


if __name__ == "__main__":
    main()
