"""Many more adapters than slots and places, random traffic of several tenants, through the whole engine.

What each request says is what it says alone; nothing is held when it is over; memory comes back.
"""

from __future__ import annotations

import gc
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.build import AssembledEngine, assemble_engine
from loraplex_engine.config import EngineConfig
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent

from tests.support.adapter_files import ALL_LINEARS, OUTSIDE, make_adapter, native_cache_dir
from tests.support.tiny_model import TinyShape, write_tiny_model

TENANTS = ("acme", "globex", "initech")
MAX_TOKENS = 8


@dataclass
class Soak:
    """An engine under random traffic."""

    engine: AssembledEngine
    digests: list[str]
    rng: random.Random
    deadline_s: float
    answers: dict[tuple[str | None, int], list[int]] = field(default_factory=dict)
    num_aborted: int = 0
    num_compared: int = 0
    _count: int = 0

    def run(self, num_requests: int) -> None:
        """Keep a dozen in flight until so many have come and gone."""
        core = self.engine.core
        live: dict[str, Generate] = {}
        tokens: dict[str, dict[int, list[int]]] = {}  # by request, then choice
        left = num_requests
        give_up_s = time.monotonic() + self.deadline_s
        while left or core.has_work():
            assert time.monotonic() < give_up_s
            while left and len(live) < 12:
                request = self._draw()
                core.add(request)
                live[request.request_id] = request
                tokens[request.request_id] = {i: [] for i in range(request.sampling.n)}
                left -= 1
            if live and self.rng.random() < 0.05:
                victim = live[self.rng.choice(sorted(live))]
                core.abort(victim.request_id, victim.attempt)
                self.num_aborted += 1
            for event in core.step():
                tokens[event.request_id][event.index] += event.token_ids
                if event.usage is not None:
                    request = live.pop(event.request_id)
                    for token_ids in tokens.pop(event.request_id).values():
                        self._end(request, token_ids, event)
            core.check()
            assert self.engine.lora is not None
            self.engine.lora.pool.check()

    def _draw(self) -> Generate:
        """A few adapters are hot, most are rare; each tenant has its own third."""
        self._count += 1
        tenant = self.rng.randrange(len(TENANTS))
        own = self.digests[tenant :: len(TENANTS)]
        rank = min(int(self.rng.paretovariate(0.6)) - 1, len(own) - 1)
        prompt = self.rng.randrange(4)
        return Generate(
            request_id=f"r{self._count}",
            attempt=prompt,
            lease_token=1,
            tenant_id=TENANTS[tenant],
            tenant_salt=TENANTS[tenant].encode(),
            prompt_token_ids=[3 + prompt * 7 + i % 60 for i in range(4 + 9 * prompt)],
            # Greedy choices are the same, each with a lease of its own.
            sampling=SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                ignore_eos=True,
                n=2 if self.rng.random() < 0.2 else 1,
            ),
            adapter_digest=None if self.rng.random() < 0.1 else own[rank],
        )

    def _end(self, request: Generate, token_ids: list[int], event: TokenEvent) -> None:
        assert event.finish_reason in ("length", "abort"), event.error_message
        key = (request.adapter_digest, request.attempt)
        known = self.answers.setdefault(key, token_ids)
        count = min(len(known), len(token_ids))
        assert known[:count] == token_ids[:count], "the same request got another answer"
        self.num_compared += known is not token_ids and count > 0
        if len(token_ids) > len(known):
            self.answers[key] = token_ids

    def assert_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.adapter_leases) == (0, 0, 0)
        assert stats.adapter_load_failures_total == 0


def make_soak(
    root: Path, native_cache: Path, num_adapters: int, max_loras: int, deadline_s: float
) -> Soak:
    model_dir = write_tiny_model(root / "model", TinyShape(num_layers=2))
    shape = ModelShape.from_config_json(model_dir / "config.json")
    store = AdapterStore(f"file://{root}/store")
    digests = []
    for seed in range(num_adapters):
        folder = root / "adapter"
        linears = [*ALL_LINEARS, *OUTSIDE] if seed % 3 == 0 else ["q_proj", "down_proj"]
        artifact = make_adapter(
            folder, shape, rank=1 + seed % 9, linears=linears, seed=seed, size=0.3
        )
        store.put(folder, artifact.digest)
        digests.append(artifact.digest)
    engine = assemble_engine(
        EngineConfig(
            model_dir=model_dir,
            base_model="tiny",
            dtype="float32",
            store_url=store.url,
            max_loras=max_loras,
            max_cpu_loras=2 * max_loras,
            num_blocks=14,  # too few for a dozen: requests are preempted too
            max_model_len=64,
            max_num_seqs=12,
            max_num_batched_tokens=16,  # rows that sample stand beside rows that do not yet
            num_threads=1,
        ),
        cache=native_cache,
    )
    return Soak(engine, digests, random.Random(5), deadline_s)


def test_20_adapters_over_4_slots(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    soak = make_soak(tmp_path, native_cache_dir(pytestconfig), 20, 4, 200.0)
    try:
        soak.run(150)

        soak.assert_idle()
        stats = soak.engine.stats()
        assert soak.num_compared > 50
        assert soak.num_aborted > 0
        assert stats.adapter_evictions_total > 0
        assert stats.adapter_loads_total > 20, "some came back"
        assert len(stats.adapters_host) <= 8
        assert stats.max_adapters_in_step == 4
        assert stats.num_preemptions_total > 0
        assert stats.adapter_load_seconds_total > 0
    finally:
        soak.engine.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_adapters_over_8_slots(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Memory is flat: what 200 adapters need in turn is what 16 places hold."""
    soak = make_soak(tmp_path, native_cache_dir(pytestconfig), 200, 8, 1700.0)
    process = psutil.Process(os.getpid())
    try:
        soak.run(600)
        gc.collect()
        before = process.memory_info().rss

        soak.run(4400)

        gc.collect()
        grown = process.memory_info().rss - before
        soak.assert_idle()
        stats = soak.engine.stats()
        print(
            f"loads {stats.adapter_loads_total}, evictions {stats.adapter_evictions_total}, "
            f"preemptions {stats.num_preemptions_total}, aborts {soak.num_aborted}, "
            f"compared {soak.num_compared}, RSS grown {grown / 2**20:.1f} MiB"
        )
        assert stats.adapter_loads_total > 400
        assert stats.adapter_evictions_total > 300
        assert grown < 24 * 2**20
    finally:
        soak.engine.close()
