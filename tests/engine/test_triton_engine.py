"""The whole engine on the Triton backends, interpreted: what the CPU's own backends say, and recorded or not alike."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.compute import Compute, open_compute
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.kv.setup import open_prefix_cache
from loraplex_engine.protocol import Generate, SamplingParams, TokenLogprobs
from loraplex_engine.row_rule import check_row_rule
from loraplex_engine.runner import ModelRunner
from loraplex_engine.step import Step

from tests.support.adapter_files import ALL_LINEARS, make_adapter, native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import collect_outcomes, make_request
from tests.support.recorded_graph import RecordingBackend
from tests.support.tiny_model import TinyShape, write_tiny_model

SHAPE = TinyShape(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
)
EOS = 2
Output = tuple[list[int], list[TokenLogprobs]]


@dataclass
class Stand:
    """`folder` holds `model` and `store`, the latter more adapters than there are slots."""

    folder: Path
    digests: list[str]
    kernels: Path
    opened: list[Compute] = field(default_factory=list)

    def open(self, backend: str, *, records: bool = False, **settings: Any) -> Opened:
        settings = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "num_blocks": 12,
            "block_size": 16,
            "max_model_len": 64,
            "prefix_cache": False,
            "speculative": "off",
            "dtype": "float32",
        } | settings
        config = EngineConfig(
            model_dir=self.folder / "model",
            base_model="tiny",
            device="cpu",
            attention_backend=backend,  # type: ignore[arg-type]
            lora_backend=backend,  # type: ignore[arg-type]
            max_loras=2,
            max_lora_rank=16,
            store_url=f"file://{self.folder}/store",
            num_threads=1,
            cuda_graphs=records,
            **settings,
        )
        compute = open_compute(
            config, cache=self.kernels, graph_backend=RecordingBackend() if records else None
        )
        self.opened.append(compute)
        assert compute.lora is not None
        core = build_core(
            config,
            compute.sizes,
            compute.runner,
            compute.lora.pool,
            vocab_size=SHAPE.vocab_size,
            eos_token_ids=frozenset({EOS}),
            prefix_cache=open_prefix_cache(
                config,
                compute.sizes,
                model_fingerprint="tiny",
                kv_format="test",
                vocab_size=SHAPE.vocab_size,
            ),
        )
        return Opened(compute, core)

    def close(self) -> None:
        for compute in self.opened:
            assert compute.lora is not None
            compute.lora.pool.close()
        self.opened.clear()


@dataclass
class Opened:
    compute: Compute
    core: EngineCore

    def run(self, requests: list[Generate]) -> dict[str, Output]:
        self._load({one.adapter_digest for one in requests if one.adapter_digest is not None})
        for request in requests:
            self.core.add(request)
        events = run_to_end(self.core)
        logprobs: dict[str, list[TokenLogprobs]] = {one.request_id: [] for one in requests}
        for event in events:
            logprobs[event.request_id] += event.logprobs or []
        outcomes = collect_outcomes(events)
        return {name: (outcomes[name].token_ids, logprobs[name]) for name in logprobs}

    def _load(self, digests: set[str]) -> None:
        """Into host memory, so that no step depends on how long loading takes."""
        assert self.compute.lora is not None
        pool = self.compute.lora.pool
        loaded = threading.Event()
        pool.loader.on_loaded = loaded.set
        for digest in digests:
            pool.prefetch(digest)
        while not all(pool.is_loaded(digest) for digest in digests):
            assert loaded.wait(60.0)
            loaded.clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Stand:
    root = tmp_path_factory.mktemp("triton")
    (root / "model").mkdir()
    write_tiny_model(root / "model", SHAPE)
    shape = ModelShape.from_config_json(root / "model" / "config.json")
    store = AdapterStore(f"file://{root}/store")
    digests = []
    for rank, linears in ((5, ALL_LINEARS), (16, ("q_proj", "down_proj")), (8, ("v_proj",))):
        source = root / f"adapter-{rank}"
        adapter = make_adapter(source, shape, rank=rank, linears=linears, size=0.3)
        store.put(source, adapter.digest)
        digests.append(adapter.digest)
    return Stand(root, digests, native_cache_dir(request.config))


@pytest.fixture
def stand(made: Stand) -> Iterator[Stand]:
    with contextlib.closing(made):
        yield made


def requests_for(
    stand: Stand, count: int, *, max_tokens: int, is_sampled: bool = False
) -> list[Generate]:
    """Base and adapters mixed, prompts of many lengths with a common beginning."""
    rng = np.random.default_rng(3)
    common = rng.integers(3, SHAPE.vocab_size, 17).tolist()
    made = []
    for index in range(count):
        adapter = [None, *stand.digests][index % 4]
        length = [18, 3, 23, 9, 20, 1][index]
        prompt = (common + rng.integers(3, SHAPE.vocab_size, 10).tolist())[:length]
        sampling = SamplingParams(
            max_tokens=max_tokens + index % 3,
            temperature=0.8 if is_sampled and index % 2 else 0.0,
            seed=index,
            # Without, a row is sampled on the device.
            logprobs=2 if index % 3 else None,
            ignore_eos=True,
        )
        made.append(
            msgspec.structs.replace(
                make_request(f"r{index}", prompt), adapter_digest=adapter, sampling=sampling
            )
        )
    return made


def assert_close(got: dict[str, Output], expected: dict[str, Output]) -> None:
    for name, (tokens, logprobs) in expected.items():
        assert got[name][0] == tokens
        for one, other in zip(got[name][1], logprobs, strict=True):
            assert one.top_ids == other.top_ids
            np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=2e-4)


def test_a_crowd_gets_what_the_cpu_s_own_backends_give_it(stand: Stand) -> None:
    """Adapters beside base, more of them than slots, chunks, preemption and found prefixes."""
    requests = requests_for(stand, 5, max_tokens=5, is_sampled=True)
    # Too few blocks for all: somebody is preempted.
    triton = stand.open("triton", prefix_cache=True, num_blocks=5, block_size=8, max_model_len=40)
    torch_alone = stand.open("torch", max_num_seqs=1)

    got = triton.run(requests)

    assert_close(got, torch_alone.run(requests))
    # The same again, twice: what the first one computed is found by the second.
    for name in ("again", "found"):
        short = msgspec.structs.replace(requests[4].sampling, max_tokens=2)
        request = msgspec.structs.replace(requests[4], request_id=name, sampling=short)
        tokens, logprobs = got["r4"]
        assert_close(triton.run([request]), {name: (tokens[:2], logprobs[:2])})
    stats = triton.core.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hit_tokens_total > 0
    assert stats.max_adapters_in_step == 2


def distance(got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> float:
    """The largest difference of a log-probability, as far as both texts are the same and of the ids that both name."""
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        ones = dict(zip(one.top_ids, one.top_logprobs, strict=True))
        others = dict(zip(other.top_ids, other.top_logprobs, strict=True))
        shared = ones.keys() & others.keys()
        assert len(shared) > len(ones) // 2
        worst = max(worst, *(abs(ones[token] - others[token]) for token in shared))
        if one.top_ids[0] != other.top_ids[0]:
            break
    return worst


# What is recorded is tried by test_decode_graphs.py and test_triton_lora.py too.
@pytest.mark.slow
def test_recorded_steps_have_the_bits_of_eager_ones(stand: Stand) -> None:
    requests = requests_for(stand, 4, max_tokens=5, is_sampled=True)
    settings: dict[str, Any] = {"max_num_seqs": 3, "num_blocks": 8}
    eager = stand.open("triton", **settings)
    recorded = stand.open("triton", records=True, **settings)

    expected, got = eager.run(requests), recorded.run(requests)

    assert got == expected
    graphs = recorded.compute.runner.graphs
    assert graphs is not None
    assert graphs.num_captured == len(graphs.keys)
    assert graphs.replays_total > 5
    stats = recorded.core.stats()
    assert stats.max_adapters_in_step == 2
    assert stats.mixed_steps_total > 0


def watch_kinds(runner: ModelRunner) -> set[str]:
    """Filled with what comes by: `end`, one token that ends a prompt; `beside`, decoding beside a prompt."""
    kinds: set[str] = set()
    launch = runner.launch

    def watched(step: Step) -> None:
        launch(step)
        left_B = runner._num_prompt[step.rows_B] - step.num_computed_B
        if ((left_B == 1) & (step.num_scheduled_B == 1) & (step.num_computed_B > 0)).any():
            kinds.add("end")
        if (left_B <= 0).any() and (left_B > 1).any():
            kinds.add("beside")

    runner.launch = watched  # type: ignore[method-assign]
    return kinds


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_under_invariant_plans_a_row_s_bits_are_its_own(stand: Stand, dtype: str) -> None:
    """Prompts cut by the neighbours' budget, found in the cache or computed again; drafts; mixed steps."""
    requests = [
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, logprobs=2))
        for one in requests_for(stand, 3, max_tokens=5)
    ]
    settings: dict[str, Any] = {"batch_invariant": True, "dtype": dtype}
    # Five tokens a step: the prompt of 18 comes in pieces that end in one token, beside others.
    crowd = stand.open(
        "triton",
        max_num_seqs=3,
        max_num_batched_tokens=5,
        num_blocks=6,
        block_size=8,
        max_model_len=40,
        prefix_cache=True,
        speculative="ngram",
        ngram_min=1,
        **settings,
    )
    alone = stand.open("triton", max_num_batched_tokens=64, **settings)

    kinds = watch_kinds(crowd.compute.runner)
    together = crowd.run(requests)
    again = crowd.run([msgspec.structs.replace(requests[0], request_id="again")])

    for request in requests:
        assert together[request.request_id] == alone.run([request])[request.request_id]
    assert again["again"] == together["r0"]
    stats = crowd.core.stats()
    assert stats.prefix_cache_hit_tokens_total > 0
    assert stats.spec_draft_tokens_total > 0
    # One token that ends a prompt, and somebody decoding beside somebody's prompt.
    assert "end" in kinds
    assert "beside" in kinds
    assert crowd.compute.plans is not None
    assert crowd.compute.plans.column == "invariant"


@pytest.mark.parametrize(
    ("kv_cache_dtype", "half_step"),
    [
        pytest.param("int8", 0.5 / 127, id="int8"),
        pytest.param("fp8", 16 / 448, marks=pytest.mark.slow, id="fp8"),
    ],
)
def test_a_quantized_cache_is_near_the_model_s_own_and_a_row_s_bits_are_its_own(
    stand: Stand, kv_cache_dtype: str, half_step: float
) -> None:
    """Whole prompts beside prompts in pieces beside one found in the cache; then beside what is not quantized."""
    requests = [
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, logprobs=20))
        for one in requests_for(stand, 2, max_tokens=2)
    ]
    settings: dict[str, Any] = {"batch_invariant": True, "max_num_seqs": 2}
    alone = stand.open(
        "triton", kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=64, **settings
    )
    crowd = stand.open(
        "triton",
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=7,
        num_blocks=8,
        block_size=8,
        max_model_len=40,
        prefix_cache=True,
        **settings,
    )
    plain = stand.open("triton", max_num_batched_tokens=64, **settings)

    expected = {name: got for one in requests for name, got in alone.run([one]).items()}
    together = crowd.run(requests)
    again = crowd.run([msgspec.structs.replace(requests[0], request_id="again")])
    unquantized = plain.run(requests)

    assert together == expected
    assert again["again"] == expected["r0"]
    assert crowd.core.stats().prefix_cache_hit_tokens_total > 0
    distances = [distance(expected[name][1], unquantized[name][1]) for name in expected]
    # A key or value moves by half a step at most, of its head's largest. What that does to this model's
    # log-probabilities is proportional to it: of either format some 6 to 9 nats a half step are seen.
    assert 0 < max(distances) < 16 * half_step


def test_the_self_check_finds_invariant_plans_sound_and_the_phases_different(stand: Stand) -> None:
    runner = stand.open("triton", batch_invariant=True).compute.runner

    sound = check_row_rule(runner, max_rows=3, row_counts=(1, 3))
    # As where the number of tokens decides about the routine.
    runner.attention.splits_prompts = False
    other = check_row_rule(runner, max_rows=2, row_counts=(2,))

    assert sound.failures == ()
    assert other.failures
    assert all("attention chunk" in name and "across phases" in name for name in other.failures)
