"""The prefix cache and choices on the real runner and a tiny model: found = computed, to the bit.

The oracle is a request alone on an engine without a cache. Everything else (warm, chunked, preempted, in a
crowd, as one of several choices) must give the same tokens and the same bits of their logprobs, for base
and adapter rows, in fp32 and bf16, on every attention backend; each test proves that the cache acted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.attention.setup import BackendName, open_attention
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.kv.setup import open_prefix_cache
from loraplex_engine.lora.setup import Lora, open_lora
from loraplex_engine.protocol import Generate, SamplingParams, TokenLogprobs, Usage
from loraplex_engine.runner import ModelRunner, build_runner, load_model
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.adapter_files import ALL_LINEARS, make_adapter, native_cache_dir
from tests.support.choice_outcomes import Choices, collect_choices, single
from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import make_request
from tests.support.tiny_model import TinyShape, write_tiny_model

DType = Literal["float32", "bfloat16"]
Said = tuple[dict[int, list[int]], dict[int, list[TokenLogprobs]]]  # by choice

BLOCK_SIZE = 8
VOCAB_SIZE = TinyShape().vocab_size


@dataclass
class Stand:
    """A model, adapters in a store, and the engines that a test opens on them."""

    folder: Path
    kernels: Path
    digests: tuple[str, ...]
    hostile: str
    attention: BackendName = "torch"
    pools: list[Lora] = field(default_factory=list)
    oracles: dict[DType, Engine] = field(default_factory=dict)
    known: dict[tuple[DType, bytes], Said] = field(default_factory=dict)

    def open(self, dtype: DType, **settings: Any) -> Engine:
        """An engine of 40 blocks; `prefix_cache=False` for the oracle."""
        config = EngineConfig(
            model_dir=self.folder / "model",
            base_model="tiny",
            dtype=dtype,
            max_model_len=128,
            num_threads=1,
            block_size=BLOCK_SIZE,
            kv_watermark=0.0,
            speculative="off",
            **({"num_blocks": 40} | settings),
        )
        model, sizes = load_model(config)
        lora = open_lora(
            store_url=f"file://{self.folder}/store",
            shape=ModelShape.from_config_json(config.model_dir / "config.json"),
            cache_dir=self.kernels,
            max_loras=3,
            max_cpu_loras=3,
            dtype=model.dtype,
        )
        self.pools.append(lora)
        attention = open_attention(
            model.attention_shape,
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            cache_dir=self.kernels,
            num_threads=1,
            backend=self.attention,
        )
        runner = build_runner(
            config, model, sizes, attention=attention, lora=lora.backend, slots=lora.pool
        )
        # What is not written yet would show.
        for kv in runner.kv_layers:
            kv[: sizes.num_blocks * BLOCK_SIZE] = float("nan")
        cache = open_prefix_cache(
            config, sizes, model_fingerprint="m", kv_format="f", vocab_size=VOCAB_SIZE
        )
        core = build_core(
            config,
            sizes,
            runner,
            lora.pool,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({2}),
            prefix_cache=cache,
        )
        return Engine(core, runner, cache)


@dataclass
class Engine:
    core: EngineCore
    runner: ModelRunner
    cache: PrefixCache | None

    def run(
        self, *requests: Generate, each_step: Callable[[], None] | None = None
    ) -> list[Choices]:
        """All at once; what each said, in order."""
        for request in requests:
            self.core.add(request)
        collected = collect_choices(run_to_end(self.core, after_step=each_step))
        return [collected[request.request_id] for request in requests]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, tuple[str, ...], str]:
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "model").mkdir()
    write_tiny_model(folder / "model")
    shape = ModelShape.from_config_json(folder / "model" / "config.json")
    store = AdapterStore(f"file://{folder}/store")
    digests = []
    for name, rank, size in (("a", 5, 0.3), ("b", 16, 0.3), ("hostile", 4, 1e30)):
        source = folder / name
        adapter = make_adapter(source, shape, rank=rank, linears=ALL_LINEARS, size=size)
        store.put(source, adapter.digest)
        digests.append(adapter.digest)
    return folder, tuple(digests[:2]), digests[2]


@pytest.fixture(scope="module", params=["torch", "native"])
def stand(
    made: tuple[Path, tuple[str, ...], str], request: pytest.FixtureRequest
) -> Iterator[Stand]:
    stand = Stand(made[0], native_cache_dir(request.config), made[1], made[2], request.param)
    try:
        stand.oracles["float32"] = stand.open("float32", prefix_cache=False)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    stand.oracles["bfloat16"] = stand.open("bfloat16", prefix_cache=False)
    yield stand
    for lora in stand.pools:
        lora.pool.close()


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> DType:
    value: DType = request.param
    return value


def draw_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def make(
    name: str,
    prompt: list[int],
    adapter: str | None = None,
    *,
    tenant: str = "t",
    seed: int = 0,
    n: int = 1,
    max_tokens: int = 6,
) -> Generate:
    """Every other seed is greedy, unless there are choices."""
    return msgspec.structs.replace(
        make_request(name, prompt, tenant=tenant),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.9 if seed % 2 or n > 1 else 0.0,
            seed=seed,
            logprobs=2,
            ignore_eos=True,
            n=n,
        ),
        adapter_digest=adapter,
    )


def renamed(request: Generate, name: str) -> Generate:
    return msgspec.structs.replace(request, request_id=name)


def said(choices: Choices) -> Said:
    """Tokens, and their logprobs to the last bit."""
    return choices.tokens, choices.logprobs


def conversation(stand: Stand) -> list[Generate]:
    """A shared beginning with different ends, on base and adapters, greedy and sampled."""
    draw = random.Random(1)
    system = draw_prompt(draw, 43)
    return [
        make(f"r{index}", [*system, *draw_prompt(draw, 3 * index)], adapter, seed=index)
        for index, adapter in enumerate([None, *stand.digests] * 3)
    ]


def alone(stand: Stand, dtype: DType, requests: list[Generate]) -> list[Said]:
    """What each says when nothing was ever cached or shared."""
    oracle = stand.oracles[dtype]
    outputs = []
    for request in requests:
        key = (dtype, msgspec.msgpack.encode(renamed(request, "")))
        if key not in stand.known:
            unique = renamed(request, f"alone-{len(stand.known)}")
            stand.known[key] = said(oracle.run(unique)[0])
        outputs.append(stand.known[key])
    assert oracle.core.stats().prefix_cache_hit_tokens_total == 0
    return outputs


def test_warm_equals_cold_to_the_bit(stand: Stand, dtype: DType) -> None:
    """Faults 28 and 42."""
    requests = conversation(stand)
    expected = alone(stand, dtype, requests)
    engine = stand.open(dtype)

    cold = [engine.run(request)[0] for request in requests]
    warm = [engine.run(renamed(r, f"w{i}"))[0] for i, r in enumerate(requests)]

    assert [said(choices) for choices in cold] == expected
    assert [said(choices) for choices in warm] == expected
    # The first on each adapter found nothing of the others'; all others found the shared beginning.
    assert [choices.usage.cached_tokens for choices in cold] == [0, 0, 0, *[40] * 6]
    lengths = [len(request.prompt_token_ids) for request in requests]
    found = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths]
    assert [choices.usage.cached_tokens for choices in warm] == found
    assert all(choices.logprobs[0] for choices in warm)


def test_a_crowd_that_is_chunked_preempted_and_shares_says_what_each_says_alone(
    stand: Stand, dtype: DType
) -> None:
    requests = conversation(stand) + [
        make(f"t{index}", [*range(50, 80)], tenant=tenant, seed=index, max_tokens=18)
        for index, tenant in enumerate("abab")
    ]
    expected = alone(stand, dtype, requests)
    tight = stand.open(
        dtype, num_blocks=24, max_num_seqs=5, max_num_batched_tokens=13, policy="fcfs"
    )

    crowd = tight.run(*requests)

    assert [said(choices) for choices in crowd] == expected
    stats = tight.core.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hit_tokens_total > 100
    assert stats.mixed_steps_total > 0
    assert stats.kv_blocks_free == 24


def test_identical_prompts_together_are_computed_once(stand: Stand, dtype: DType) -> None:
    prompt = draw_prompt(random.Random(2), 60)
    requests = [make(f"r{index}", prompt, seed=index) for index in range(4)]
    expected = alone(stand, dtype, requests)
    engine = stand.open(dtype, max_num_batched_tokens=16, max_num_seqs=8)

    together = engine.run(*requests)

    assert [said(choices) for choices in together] == expected
    assert [choices.usage.cached_tokens for choices in together] == [0, 56, 56, 56]


def test_nobody_elses_blocks_are_found(stand: Stand) -> None:
    """Faults 33 and 34, paired with the proof that the same tenant does find its own."""
    draw = random.Random(3)
    prompt = draw_prompt(draw, 50)
    first, second = stand.digests
    engine = stand.open("float32")

    def cached(tenant: str, adapter: str | None) -> int:
        request = make(f"r{draw.random()}", prompt, adapter, tenant=tenant)
        return engine.run(request)[0].usage.cached_tokens

    owners = [("a", None), ("a", first), ("a", second), ("b", None), ("b", first)]
    assert [cached(*owner) for owner in owners] == [0] * 5
    assert [cached(*owner) for owner in owners] == [48] * 5


def test_each_choice_is_the_request_with_its_seed_to_the_bit(stand: Stand, dtype: DType) -> None:
    """Fault 38. Lengths around a block's end: nothing to copy, one token to copy, almost a block."""
    engine = stand.open(dtype, max_num_batched_tokens=11, max_num_seqs=8)
    for length in (1, 8, 9, 16, 37):
        prompt = draw_prompt(random.Random(length), length)
        request = make(f"r{length}", prompt, stand.digests[0], seed=5, n=3, max_tokens=4)
        expected = alone(stand, dtype, [single(request, index) for index in range(3)])

        (choices,) = engine.run(request)

        assert len({tuple(tokens) for tokens in choices.tokens.values()}) == 3
        for index, (tokens, logprobs) in enumerate(expected):
            assert choices.tokens[index] == tokens[0]
            assert choices.logprobs[index] == logprobs[0]
        assert choices.usage == Usage(prompt_tokens=length, completion_tokens=12)


# ------------------------------------------------------------------ what must never be kept


def test_blocks_of_a_row_that_is_not_finite_are_never_found(stand: Stand) -> None:
    """Fault 41, with an adapter that overflows: alone, beside others, whole and in chunks."""
    prompt = draw_prompt(random.Random(4), 60)
    good = [make("base", prompt), make("a", prompt, stand.digests[0], seed=1)]
    expected = alone(stand, "float32", good)
    engine = stand.open("float32", max_num_batched_tokens=24, max_num_seqs=8)
    assert engine.cache is not None

    bad = make("bad", prompt, stand.hostile)
    (ended,) = engine.run(bad)

    assert ended.terminal is not None
    assert ended.terminal.error_code == "non_finite_logits"
    assert ended.usage == Usage(prompt_tokens=24, completion_tokens=0)  # at the first chunk's end
    assert engine.cache.num_named == 0
    crowd = engine.run(*good, renamed(bad, "bad2"))
    assert [said(choices) for choices in crowd[:2]] == expected
    assert [choices.usage.cached_tokens for choices in crowd] == [0, 0, 0]
    again = engine.run(renamed(bad, "bad3"), *[renamed(r, f"{r.request_id}2") for r in good])
    assert [said(choices) for choices in again[1:]] == expected
    assert [choices.usage.cached_tokens for choices in again] == [0, 56, 56]


def test_everything_that_can_be_found_is_finite_and_written(stand: Stand) -> None:
    """Looked at after every step: no NaN (which is what unwritten slots hold here) has a name."""
    engine = stand.open("float32", num_blocks=24, max_num_seqs=5, max_num_batched_tokens=13)
    seen = 0

    def look() -> None:
        nonlocal seen
        assert engine.cache is not None
        blocks = torch.tensor(sorted(engine.cache._named), dtype=torch.int64)
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        seen += len(blocks)
        assert all(torch.isfinite(kv[slots]).all() for kv in engine.runner.kv_layers)

    bad = make("bad", draw_prompt(random.Random(5), 40), stand.hostile)
    engine.run(*conversation(stand), bad, each_step=look)

    assert seen > 100
