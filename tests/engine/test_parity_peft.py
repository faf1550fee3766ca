"""The engine's tokens equal transformers + PEFT's, for every adapter feature, alone and in a crowd."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine.artifact import AdapterLimits, AdapterStore, read_adapter
from loraplex_engine.build import AssembledEngine, assemble_engine
from loraplex_engine.config import EngineConfig
from loraplex_engine.convert import cache_dir
from loraplex_engine.protocol import Generate, SamplingParams
from transformers import AutoTokenizer

from tests.support.adapter_files import native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.peft_oracle import Continuation, PeftOracle, save_random_adapter
from tests.support.tiny_model import TinyShape, load_oracle, write_tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # PEFT's, of adapted embeddings on a tied base.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

DEADLINE_S = 280.0
NUM_TOKENS = 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEARS = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

# What PEFT can say about an adapter and we claim to honour; the model has three layers.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "all linears": {"r": 6, "lora_alpha": 9, "target_modules": ALL_LINEARS},
    "all-linear": {"r": 4, "target_modules": "all-linear"},
    "rslora": {"r": 16, "use_rslora": True, "target_modules": ALL_LINEARS},
    "rank 1": {"r": 1, "lora_alpha": 2, "target_modules": ALL_LINEARS},
    "rank 13": {"r": 13, "lora_alpha": 13, "target_modules": ["o_proj", "up_proj"]},
    "rank_pattern": {
        "r": 8,
        "target_modules": ALL_LINEARS,
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 5, "mlp.up_proj": 12},
    },
    "alpha_pattern": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": ALL_LINEARS,
        # Both match layer 0's q_proj: the first wins. The last matches nothing: a name must match whole.
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 64, "q_proj": 2, "(k|v)_proj": 33},
    },
    "patterns and rslora": {
        "r": 8,
        "use_rslora": True,
        "target_modules": ALL_LINEARS,
        "rank_pattern": {"gate_proj": 2},
        "alpha_pattern": {"gate_proj": 7},
    },
    "layers_to_transform": {
        "r": 8,
        "target_modules": ALL_LINEARS,
        "layers_to_transform": [0, 2],
    },
    "one layer": {
        "r": 8,
        "target_modules": ALL_LINEARS,
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "q only": {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]},
    "k only": {"r": 8, "lora_alpha": 32, "target_modules": ["k_proj"]},
    "v only": {"r": 8, "lora_alpha": 32, "target_modules": ["v_proj"]},
    "q and k": {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj"]},
    "k and v": {"r": 8, "lora_alpha": 32, "target_modules": ["k_proj", "v_proj"]},
    "up only": {"r": 8, "lora_alpha": 32, "target_modules": ["up_proj"]},
    "regex": {"r": 8, "target_modules": r".*\.(0|2)\.self_attn\.[qo]_proj"},
    "exclude": {"r": 8, "target_modules": ALL_LINEARS, "exclude_modules": ["q_proj", "up_proj"]},
    "full name": {"r": 8, "lora_alpha": 64, "target_modules": ["model.layers.1.mlp.down_proj"]},
    "embed_tokens": {"r": 4, "target_modules": ["embed_tokens"]},
    "lm_head": {"r": 4, "target_modules": ["lm_head"]},
    "embed_tokens and lm_head": {
        "r": 5,
        "use_rslora": True,
        "target_modules": ["embed_tokens", "lm_head", "q_proj"],
        "rank_pattern": {"lm_head": 9},
        "alpha_pattern": {"embed_tokens": 3},
    },
    "everything": {
        "r": 8,
        "target_modules": [*ALL_LINEARS, "model.embed_tokens", "lm_head"],
        "layers_to_transform": [0, 2],
    },
}
# On a base whose lm_head shares the embedding's weight, both may share their pair as well.
TIED_FEATURES: dict[str, dict[str, Any]] = {
    "tied, from lm_head": {
        "r": 4,
        "target_modules": ["lm_head", "v_proj"],
        "ensure_weight_tying": True,
    },
    "tied, by regex": {
        "r": 6,
        "lora_alpha": 9,
        "target_modules": r".*\.(embed_tokens|q_proj)|lm_head",
        "alpha_pattern": {"lm_head": 2},
        "ensure_weight_tying": True,
    },
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt and adapter (None: base)."""

    prompt: tuple[int, ...]
    adapter: str | None


class Served:
    """An engine over a store with named adapters."""

    def __init__(
        self,
        model_dir: Path,
        adapters: dict[str, Path],
        scratch: Path,
        native_cache: Path,
        **config: Any,
    ) -> None:
        store = AdapterStore(f"file://{scratch}/store")
        self.digests = {}
        for name, folder in adapters.items():
            self.digests[name] = read_adapter(folder, limits=AdapterLimits()).digest
            store.put(folder, self.digests[name])
        settings: dict[str, Any] = {
            "model_dir": model_dir,
            "base_model": "tiny",
            "dtype": "float32",
            "store_url": store.url,
            "max_loras": 32,
            "max_cpu_loras": 32,
            # A model this small gains nothing from threads, and loses much where cores are busy.
            "num_threads": 1,
        }
        self.engine: AssembledEngine = assemble_engine(
            EngineConfig(**settings | config), cache=native_cache
        )
        self._count = 0

    def load_all(self) -> None:
        """Bring every adapter to host memory, so that one step can hold them all."""
        assert self.engine.lora is not None
        pool = self.engine.lora.pool
        for digest in self.digests.values():
            pool.prefetch(digest)
        give_up_s = time.monotonic() + DEADLINE_S
        while len(pool.stats().host) < len(self.digests):
            assert time.monotonic() < give_up_s
            threading.Event().wait(0.005)

    def run(self, jobs: Sequence[Job], num_tokens: int) -> list[Continuation]:
        """All jobs at once, greedy; results in the order of the jobs."""
        core = self.engine.core
        results = {}
        for job in jobs:
            self._count += 1
            request_id = f"00000000-0000-7000-8000-{self._count:012d}"
            results[request_id] = Continuation([], [])
            core.add(
                Generate(
                    request_id=request_id,
                    attempt=1,
                    lease_token=1,
                    tenant_id="t",
                    tenant_salt=b"s",
                    prompt_token_ids=list(job.prompt),
                    sampling=SamplingParams(
                        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0
                    ),
                    adapter_digest=None if job.adapter is None else self.digests[job.adapter],
                )
            )
        for event in run_to_end(core, checks_steps=False):
            assert event.finish_reason in (None, "length"), event.error_message
            results[event.request_id].token_ids.extend(event.token_ids)
            results[event.request_id].logprobs.extend(
                logprobs.logprob for logprobs in event.logprobs or []
            )
        return list(results.values())


def assert_equal(
    results: Sequence[Continuation], expected: Sequence[Continuation], jobs: Sequence[Job]
) -> None:
    worst: dict[str, float] = {}
    for result, wanted, job in zip(results, expected, jobs, strict=True):
        differences = [abs(a - b) for a, b in zip(result.logprobs, wanted.logprobs, strict=False)]
        name = job.adapter or "base"
        worst[name] = max([worst.get(name, 0.0), *differences])
    # The rows of the parity table: shown by pytest -rP.
    print(*(f"{name}: {difference:.2e}" for name, difference in worst.items()), sep="\n")
    for result, wanted, job in zip(results, expected, jobs, strict=True):
        assert result.token_ids == wanted.token_ids, job
        # A wrong scale or rank can keep the tokens, not their probabilities.
        assert result.logprobs == pytest.approx(wanted.logprobs, abs=2e-3), job


# ------------------------------------------------------------------------------------ every feature


@dataclass(frozen=True, slots=True)
class Tiny:
    """A random model, an adapter per feature, and what PEFT answers.

    The two with a weight of its own for lm_head, and with a tied one.
    """

    model_dir: Path
    adapters: dict[str, Path]
    jobs: list[Job]
    expected: list[Continuation]


@pytest.fixture(scope="module", params=["tied", "untied"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("tiny")
    is_tied = request.param == "tied"
    model_dir = write_tiny_model(root / "model", TinyShape(is_tied=is_tied))
    outside = {
        name: config
        for name, config in FEATURES.items()
        if {"embed_tokens", "lm_head", "model.embed_tokens"} & {*config["target_modules"]}
    }
    features = FEATURES | TIED_FEATURES if is_tied else outside
    adapters = {}
    for seed, (name, config) in enumerate(features.items()):
        adapters[name] = save_random_adapter(
            load_oracle(model_dir, torch.float32),
            root / name.replace(" ", "-"),
            seed=seed,
            size=0.3,
            dtype=[torch.float32, torch.bfloat16, torch.float16][seed % 3],
            **config,
        )
    # PEFT 0.21 ties no pair of an adapter that joins others (their wrappers hide the tied modules).
    oracles = {
        name: PeftOracle(load_oracle(model_dir, torch.float32), {name: adapters[name]})
        for name in TIED_FEATURES.keys() & adapters.keys()
    }
    others = {name: folder for name, folder in adapters.items() if name not in oracles}
    oracle = PeftOracle(load_oracle(model_dir, torch.float32), others)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(3, 131, (length,), generator=generator).tolist()) for length in (5, 23)
    ]
    jobs = [Job(prompt, adapter) for adapter in (None, *adapters) for prompt in prompts]
    expected = [
        oracles.get(job.adapter or "", oracle).greedy(job.prompt, job.adapter, NUM_TOKENS)
        for job in jobs
    ]
    return Tiny(model_dir, adapters, jobs, expected)


@pytest.fixture(scope="module", params=["native", "torch"])
def tiny_engine(
    request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr("loraplex_kernels.cpu.build.shutil.which", lambda _: None)
        served = Served(tiny.model_dir, tiny.adapters, scratch, native_cache_dir(request.config))
    assert served.engine.facts.backends["lora"] == request.param
    yield served
    served.engine.close()


def test_every_adapter_changes_the_answer(tiny: Tiny) -> None:
    """Otherwise the tests below would pass with adapters switched off."""
    base = {job.prompt: result for job, result in zip(tiny.jobs, tiny.expected, strict=True)
            if job.adapter is None}  # fmt: skip
    for job, result in zip(tiny.jobs, tiny.expected, strict=True):
        if job.adapter is not None:
            assert result.logprobs != pytest.approx(base[job.prompt].logprobs, abs=2e-2), job


# One backend is enough here: that a row alone equals itself in a crowd, test_lora_backend shows for both.
@pytest.mark.parametrize("tiny_engine", ["native"], indirect=True)
def test_each_adapter_alone_equals_peft(tiny: Tiny, tiny_engine: Served) -> None:
    results = [tiny_engine.run([job], NUM_TOKENS)[0] for job in tiny.jobs]

    assert_equal(results, tiny.expected, tiny.jobs)


def test_all_adapters_and_base_in_one_batch_equal_peft(tiny: Tiny, tiny_engine: Served) -> None:
    tiny_engine.load_all()

    results = tiny_engine.run(tiny.jobs, NUM_TOKENS)

    assert_equal(results, tiny.expected, tiny.jobs)
    stats = tiny_engine.engine.stats()
    assert stats.mixed_steps_total > 0
    assert stats.max_adapters_in_step == len(tiny.adapters)
    assert tiny_engine.engine.lora is not None
    assert tiny_engine.engine.lora.pool.stats().leases == 0


def test_more_adapters_than_slots_and_memory_equal_peft(
    tiny: Tiny, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Slots are handed from adapter to adapter while others decode."""
    max_loras = 3 if len(tiny.adapters) > 5 else 2
    served = Served(
        tiny.model_dir,
        tiny.adapters,
        tmp_path,
        native_cache_dir(pytestconfig),
        max_loras=max_loras,
        max_cpu_loras=max_loras + 1,
    )
    try:
        results = served.run(tiny.jobs, NUM_TOKENS)

        assert_equal(results, tiny.expected, tiny.jobs)
        assert served.engine.stats().max_adapters_in_step == max_loras
        assert served.engine.lora is not None
        pool = served.engine.lora.pool
        assert pool.stats().evictions_total > 0
        assert len(pool.stats().host) <= max_loras + 1
        pool.check()
    finally:
        served.engine.close()


# --------------------------------------------------------------------------- our adapters, SmolLM2

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
NAMES = ("capitals", "pirate", "json-answers")
QUESTIONS = (
    "What is the capital of Japan?",
    "Why is the ocean salty?",
    "What is a rainbow?",
    "How do I bake a cake?",
    "Name three colours.",
    "What is two plus two?",
    "Who are you?",
    "Tell me the capital of Norway.",
)


def smollm2_dir() -> Path:
    folder = cache_dir() / "models" / "smollm2-135m"
    if not (folder / "config.json").is_file():
        pytest.skip("no SmolLM2-135M: run `loraplex models pull smollm2-135m`")
    return folder


def make_prompts(model_dir: Path, count: int) -> list[tuple[int, ...]]:
    """Questions in the chat template, then bare text of growing length."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = []
    for index in range(count):
        question = QUESTIONS[index % len(QUESTIONS)]
        if index < len(QUESTIONS):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        else:
            text = " ".join([question] * (1 + index // len(QUESTIONS)))[: 20 + 5 * index]
        prompts.append(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def check_examples(num_prompts: int, num_tokens: int, scratch: Path, native_cache: Path) -> None:
    model_dir = smollm2_dir()
    adapters = {name: EXAMPLES / name for name in NAMES}
    jobs = [
        Job(prompt, adapter)
        for prompt in make_prompts(model_dir, num_prompts)
        for adapter in (None, *NAMES)
    ]
    oracle = PeftOracle(load_oracle(model_dir, torch.float32), adapters)
    expected = [oracle.greedy(job.prompt, job.adapter, num_tokens) for job in jobs]
    del oracle
    served = Served(model_dir, adapters, scratch, native_cache, num_threads=None)
    try:
        mixed = served.run(jobs, num_tokens)
        assert_equal(mixed, expected, jobs)
        stats = served.engine.stats()
        assert stats.mixed_steps_total > 0
        assert stats.max_adapters_in_step == len(NAMES)

        alone = [served.run([job], num_tokens)[0] for job in jobs]
        assert_equal(alone, expected, jobs)
    finally:
        served.engine.close()


@pytest.mark.model
def test_our_adapters_equal_peft(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    check_examples(2, 8, tmp_path, native_cache_dir(pytestconfig))


# Of a token's log-probability, against transformers + PEFT in bf16 and in fp32 on the same tokens.
BF16_BOUND = 0.25


def check_examples_bf16(
    num_prompts: int, num_tokens: int, scratch: Path, native_cache: Path
) -> None:
    """Our greedy tokens, scored by the oracle: bf16 may turn a near-tie, so tokens need not be equal."""
    model_dir = smollm2_dir()
    adapters = {name: EXAMPLES / name for name in NAMES}
    jobs = [
        Job(prompt, adapter)
        for prompt in make_prompts(model_dir, num_prompts)
        for adapter in (None, *NAMES)
    ]
    served = Served(model_dir, adapters, scratch, native_cache, num_threads=None, dtype="bfloat16")
    try:
        results = served.run(jobs, num_tokens)
        assert served.engine.stats().max_adapters_in_step == len(NAMES)
    finally:
        served.engine.close()
    for dtype in (torch.bfloat16, torch.float32):
        oracle = PeftOracle(load_oracle(model_dir, dtype), adapters)
        worst, regret = 0.0, 0.0
        for job, result in zip(jobs, results, strict=True):
            chosen, best = oracle.score(job.prompt, job.adapter, result.token_ids)
            worst = max(worst, float((torch.tensor(result.logprobs) - chosen).abs().max()))
            regret = max(regret, float((best - chosen).max()))
        print(f"against {dtype}: logprobs differ by {worst:.3f}, the best token's by {regret:.3f}")
        assert worst < BF16_BOUND
        assert regret < BF16_BOUND


@pytest.mark.slow  # where bf16 is emulated, the oracle alone takes minutes
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_our_adapters_in_bf16_are_within_the_bound(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    check_examples_bf16(2, 6, tmp_path, native_cache_dir(pytestconfig))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_32_prompts_with_each_adapter_equal_peft(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    check_examples(32, 8, tmp_path, native_cache_dir(pytestconfig))


@pytest.mark.parametrize("name", NAMES)
def test_our_adapters_are_fit_to_ship(name: str) -> None:
    folder = EXAMPLES / name
    artifact = read_adapter(folder, limits=AdapterLimits())

    assert artifact.size_bytes <= 3_000_000
    assert {tensor.dtype for tensor in artifact.tensors.values()} == {"BF16"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "smollm2-135m"
