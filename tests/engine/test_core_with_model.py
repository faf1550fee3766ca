"""The core on the real runner and a tiny random model: what the scheduler decides never shows.

Alone with a roomy engine = in a crowd with too few rows, too few blocks and a budget of a few tokens:
the same tokens and the same bits of their logprobs, greedy and sampled, for base and adapter requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.lora.setup import BackendName, Lora, open_lora
from loraplex_engine.protocol import Generate, SamplingParams, TokenLogprobs
from loraplex_engine.runner import build_runner, load_model
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.adapter_files import ALL_LINEARS, make_adapter, native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import FakeAdapterPool, collect_outcomes, make_request
from tests.support.tiny_model import TinyShape, write_tiny_model

Output = tuple[list[int], list[TokenLogprobs]]


@dataclass(frozen=True)
class Stand:
    """A model folder, a store with adapters, and the backend that computes them (None: base only)."""

    folder: Path
    digests: tuple[str, ...]
    backend: BackendName | None
    kernels: Path

    def open_lora(self, dtype: torch.dtype) -> Lora | None:
        if self.backend is None:
            return None
        return open_lora(
            store_url=f"file://{self.folder}/store",
            shape=ModelShape.from_config_json(self.folder / "model" / "config.json"),
            cache_dir=self.kernels,
            max_loras=len(self.digests),
            max_cpu_loras=len(self.digests),
            backend=self.backend,
            dtype=dtype,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stand")
    (root / "model").mkdir()
    write_tiny_model(root / "model")
    return root


@pytest.fixture(scope="module")
def digests(folder: Path) -> tuple[str, ...]:
    """Ranks and widths that fill no tile, and one adapter on some of the linears only."""
    shape = ModelShape.from_config_json(folder / "model" / "config.json")
    store = AdapterStore(f"file://{folder}/store")
    made = []
    for rank, linears, dtype in ((5, ALL_LINEARS, "F32"), (16, ("q_proj", "down_proj"), "BF16")):
        source = folder / f"adapter-{rank}"
        adapter = make_adapter(source, shape, rank=rank, linears=linears, size=0.3, dtype=dtype)
        store.put(source, adapter.digest)
        made.append(adapter.digest)
    return tuple(made)


@pytest.fixture(params=[None, "native", "torch"], ids=str)
def stand(request: pytest.FixtureRequest, folder: Path, digests: tuple[str, ...]) -> Stand:
    made = Stand(folder, digests, request.param, native_cache_dir(request.config))
    try:
        lora = made.open_lora(torch.float32)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    if lora is not None:
        lora.pool.close()
    return made


@pytest.fixture
def open_pools() -> Iterator[list[Lora]]:
    pools: list[Lora] = []
    yield pools
    for lora in pools:
        lora.pool.close()


def make_core(stand: Stand, open_pools: list[Lora], **settings: Any) -> EngineCore:
    config = EngineConfig(
        model_dir=stand.folder / "model",
        base_model="tiny",
        max_model_len=96,
        num_threads=1,
        **settings,
    )
    model, sizes = load_model(config)
    lora = stand.open_lora(model.dtype)
    if lora is not None:
        open_pools.append(lora)
    return build_core(
        config,
        sizes,
        build_runner(
            config,
            model,
            sizes,
            lora=lora.backend if lora else None,
            slots=lora.pool if lora else None,
        ),
        lora.pool if lora else FakeAdapterPool(),
        vocab_size=TinyShape().vocab_size,
        eos_token_ids=frozenset({2}),
    )


def run(core: EngineCore, requests: list[Generate]) -> dict[str, Output]:
    for request in requests:
        core.add(request)
    events = run_to_end(core)
    logprobs: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for event in events:
        logprobs[event.request_id] += event.logprobs or []
    outcomes = collect_outcomes(events)
    return {name: (outcomes[name].token_ids, logprobs[name]) for name in logprobs}


def draw_requests(stand: Stand) -> list[Generate]:
    draw = random.Random(5)
    adapters = [None, *stand.digests] if stand.backend else [None]
    return [
        msgspec.structs.replace(
            make_request(
                f"r{index}", [draw.randrange(3, 131) for _ in range(draw.randrange(1, 60))]
            ),
            sampling=SamplingParams(
                max_tokens=draw.randrange(8, 30),
                temperature=draw.choice([0.0, 0.9]),
                seed=index,
                logprobs=2,
                ignore_eos=True,
            ),
            adapter_digest=adapters[index % len(adapters)],
        )
        for index in range(10)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_crowd_short_of_everything_says_what_each_says_alone(
    stand: Stand, open_pools: list[Lora], dtype: Literal["float32", "bfloat16"]
) -> None:
    requests = draw_requests(stand)
    roomy = make_core(stand, open_pools, dtype=dtype, num_blocks=64, max_num_batched_tokens=512)
    alone: dict[str, Output] = {}
    for request in requests:
        alone |= run(roomy, [request])
    tight = make_core(
        stand,
        open_pools,
        dtype=dtype,
        block_size=8,
        num_blocks=26,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        kv_watermark=0.0,
    )

    crowd = run(tight, requests)

    stats = tight.stats()
    assert stats.num_preemptions_total >= 2
    assert (stats.kv_blocks_free, stats.num_running) == (26, 0)
    assert crowd == alone
    if stand.backend:
        assert (stats.max_adapters_in_step, stats.mixed_steps_total > 0) == (2, True)
        same = [msgspec.structs.replace(request, adapter_digest=None) for request in requests[:3]]
        base = run(roomy, [msgspec.structs.replace(r, attempt=1) for r in same])
        assert [base[f"r{n}"] == alone[f"r{n}"] for n in range(3)] == [True, False, False]
    assert all(len(logprobs) == len(tokens) > 0 for tokens, logprobs in crowd.values())
