"""The exactness matrix: whatever an engine does to be fast, a request's tokens and logprobs keep their bits.

Every request of `CASES` runs alone on an engine with nothing switched on. Then all of them run through
each column of the matrix (crowds, hostile neighbours, found prefixes, small chunks, preemption, drafts,
other blocks, and all of it at once), in float32 and bfloat16, on the native and the torch backends. Each
column says what must have happened, so that none passes by doing nothing.

The draw takes other ways through a large vocabulary; its rows are `WIDE_CASES`, of flat distributions
over 2,177 ids and 127 more that no token has, drawn with and without the native filter.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.core import EngineCore
from loraplex_engine.protocol import Generate, SamplingParams
from loraplex_engine.runner import ModelRunner
from loraplex_engine.sampling import filters as filters_module
from loraplex_engine.sampling.sampler import GumbelSurvivors
from loraplex_engine.speculative import Ask
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.adapter_files import ALL_LINEARS, OUTSIDE, make_adapter, native_cache_dir
from tests.support.choice_outcomes import collect_choices
from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import make_request
from tests.support.model_stand import ModelStand
from tests.support.tiny_model import TinyShape, write_tiny_model

VOCAB = TinyShape().vocab_size

GREEDY = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(
    max_tokens=18, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True, logprobs=0
)
EDITED = SamplingParams(
    max_tokens=22,
    temperature=1.1,
    top_k=60,
    min_p=0.01,
    seed=12,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.6,
    logit_bias={5: 1.5, 9: -3.0},
    min_tokens=8,
    stop_token_ids=tuple(range(0, VOCAB, 5)),
    bad_words_token_ids=((7, 8), (13,)),
    logprobs=3,
)
THREE = msgspec.structs.replace(SEEDED, n=3, max_tokens=9)

# Name -> (sampling, adapter, prompt tokens). "inner" and "outer": see `digests`.
CASES: dict[str, tuple[SamplingParams, str | None, int]] = {
    "greedy-base": (GREEDY, None, 61),
    "seeded-base": (SEEDED, None, 16),
    "greedy-inner": (GREEDY, "inner", 45),
    "seeded-outer": (SEEDED, "outer", 33),
    "edited-base": (EDITED, None, 7),
    "edited-outer": (EDITED, "outer", 80),
    "three-inner": (THREE, "inner", 37),
}

WIDE_TOKENS, WIDE_PADDING = 2_177, 127
# The model's logits lie far apart; so warm, more than 512 ids may still win, and a nucleus of 0.9 has more
# than the 1,024 that it is looked for among first.
FLAT = SamplingParams(max_tokens=8, temperature=60.0, seed=13, ignore_eos=True, logprobs=2)
WIDE_CASES: dict[str, tuple[SamplingParams, str | None, int]] = {
    "flat": (FLAT, None, 20),
    "flat-three": (msgspec.structs.replace(FLAT, n=3), None, 9),
    "nucleus": (msgspec.structs.replace(FLAT, top_p=0.9), None, 17),
    "top-k": (msgspec.structs.replace(FLAT, top_k=1_500, top_p=0.95, min_p=0.01), None, 5),
    "edited": (
        msgspec.structs.replace(
            FLAT, presence_penalty=1.5, logit_bias={5: 9.0, 2_100: -9.0}, min_tokens=4
        ),
        None,
        12,
    ),
    "warm": (msgspec.structs.replace(FLAT, temperature=1.0, top_p=0.9), None, 33),
}

Answer = dict[int, tuple[list[int], list[Any], str]]  # by choice


@dataclass(frozen=True)
class Stand:
    """A model, its adapters by name, and the cases that run on it."""

    engines: ModelStand
    digests: dict[str, str]
    cases: dict[str, tuple[SamplingParams, str | None, int]] = field(default_factory=lambda: CASES)

    @property
    def vocab_size(self) -> int:
        return self.engines.vocab_size

    def core(self, *, churn: bool = False, **settings: Any) -> EngineCore:
        plain: dict[str, Any] = {
            "max_model_len": 160,
            "speculative": "off",
            "prefix_cache": False,
            "num_blocks": 192,
        }
        if churn:
            plain["prepare"] = _poison
        return self.engines.core(**plain | settings)

    def requests(self, suffix: str = "") -> list[Generate]:
        """One per case, prompts of their own."""
        made = []
        for index, (name, (sampling, adapter, length)) in enumerate(self.cases.items()):
            draw = random.Random(index)
            prompt = [draw.randrange(3, self.vocab_size) for _ in range(length)]
            made.append(
                msgspec.structs.replace(
                    make_request(name + suffix, prompt),
                    sampling=sampling,
                    adapter_digest=None if adapter is None else self.digests[adapter],
                )
            )
        return made

    def neighbours(self, count: int) -> list[Generate]:
        """Strangers of all lengths, on every adapter there is, the hostile one among them."""
        draw = random.Random(count)
        adapters = [None, *self.digests.values()]
        return [
            msgspec.structs.replace(
                make_request(
                    f"n{index}",
                    [draw.randrange(3, self.vocab_size) for _ in range(draw.randrange(1, 90))],
                    max_tokens=draw.randrange(1, 20),
                    seed=index,
                    tenant=f"tenant {index % 5}",
                ),
                adapter_digest=adapters[index % len(adapters)],
            )
            for index in range(count)
        ]


def _poison(runner: ModelRunner) -> None:
    """Whatever no request has written is not a number."""
    for kv in runner.kv_layers:
        kv[:-1] = float("nan")  # the last slot may be the backend's own


@dataclass
class LyingOracle:
    """Drafts what plain decoding said, one in five wrong, for requests whose answer it knows."""

    truths: dict[tuple[int, ...], list[int]]  # prompt -> prompt and answer of choice 0
    vocab_size: int = VOCAB
    draw: random.Random = field(default_factory=lambda: random.Random(8))

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> list[int]:
        known = list(ask.token_ids)
        for truth in self.truths.values():
            if truth[: len(known)] == known:
                ahead = truth[len(known) :][: ask.max_drafts]
                return [(t + 1) % self.vocab_size if self.draw.random() < 0.2 else t for t in ahead]
        return []

    def forget(self, key: int) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exact")
    (root / "model").mkdir()
    write_tiny_model(root / "model")
    return root


@pytest.fixture(scope="module")
def digests(folder: Path) -> dict[str, str]:
    """inner: every linear of a layer; outer: embedding and head too; hostile: finite, and overflows."""
    shape = ModelShape.from_config_json(folder / "model" / "config.json")
    store = AdapterStore(f"file://{folder}/store")
    made = {}
    for name, rank, linears, size in (
        ("inner", 5, ALL_LINEARS, 0.3),
        ("outer", 16, ("q_proj", "down_proj", *OUTSIDE), 0.3),
        ("hostile", 8, ALL_LINEARS, 1e18),
    ):
        adapter = make_adapter(
            folder / name, shape, rank=rank, linears=linears, size=size, dtype="F32"
        )
        store.put(folder / name, adapter.digest)
        made[name] = adapter.digest
    return made


@pytest.fixture(
    scope="module",
    params=[
        ("native", "float32"),
        pytest.param(("native", "bfloat16"), marks=pytest.mark.slow),
        pytest.param(("torch", "float32"), marks=pytest.mark.slow),
        ("torch", "bfloat16"),
    ],
    ids="-".join,
)
def stand(request: pytest.FixtureRequest, folder: Path, digests: dict[str, str]) -> Iterator[Stand]:
    backend, dtype = request.param
    kernels = native_cache_dir(request.config)
    made = Stand(ModelStand(folder, len(digests), backend, dtype, kernels, VOCAB), digests)
    try:
        made.core(num_blocks=10)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    yield made
    made.engines.close()


@pytest.fixture(scope="module")
def alone(stand: Stand) -> dict[str, Answer]:
    """Each request by itself, with everything off."""
    core = stand.core(max_num_batched_tokens=512)
    answers = {}
    for request in stand.requests():
        answers |= run(core, [request])
    stats = core.stats()
    assert stats.num_preemptions_total == 0
    assert stats.prefix_cache_hit_tokens_total == 0
    assert stats.spec_draft_tokens_total == 0
    return answers


def run(core: EngineCore, requests: Sequence[Generate]) -> dict[str, Answer]:
    """All at once; answers by name, without the suffix behind "#"."""
    for request in requests:
        core.add(request)
    events = run_to_end(core, checks_steps=False)
    answers: dict[str, Answer] = {}
    for request_id, choices in collect_choices(events).items():
        answers[request_id.partition("#")[0]] = {
            index: (tokens, choices.logprobs[index], choices.reasons[index])
            for index, tokens in choices.tokens.items()
        }
    return answers


def check(answers: dict[str, Answer], alone: dict[str, Answer]) -> None:
    for name, expected in alone.items():
        # Python's == on floats is bitwise but for signs of zero and NaN, which no logprob is.
        assert answers[name] == expected, name


def test_the_cases_say_something(alone: dict[str, Answer]) -> None:
    """Guards the matrix: equal nonsense would pass it."""
    assert set(alone) == set(CASES)
    for name, answer in alone.items():
        for tokens, logprobs, reason in answer.values():
            assert len(set(tokens)) > 1, name
            assert len(logprobs) == len(tokens)
            assert reason in ("stop", "length")
    assert len({tuple(tokens) for tokens, _, _ in alone["three-inner"].values()}) == 3
    assert alone["edited-base"] != alone["edited-outer"]


@pytest.mark.parametrize("count", [1, 7, 63])
def test_among_neighbours(stand: Stand, alone: dict[str, Answer], count: int) -> None:
    core = stand.core(max_num_seqs=64 if count == 63 else 16, max_num_batched_tokens=512)
    strangers = stand.neighbours(count)
    half = count // 2

    answers = run(core, [*strangers[:half], *stand.requests(), *strangers[half:]])

    check(answers, alone)
    stats = core.stats()
    assert stats.max_adapters_in_step >= (2 if count == 1 else len(stand.digests))
    if count > 1:
        # The hostile adapter overflows in its own rows, or the test is none.
        assert stats.requests_finished_total["error"] > 0


def test_found_prefix(stand: Stand, alone: dict[str, Answer]) -> None:
    core = stand.core(prefix_cache=True)
    check(run(core, stand.requests("#cold")), alone)
    cold = core.stats().prefix_cache_hit_tokens_total

    answers = run(core, stand.requests("#warm"))

    check(answers, alone)
    warm = core.stats().prefix_cache_hit_tokens_total - cold
    # Every whole block of every prompt of more than one.
    assert warm >= sum(length // 16 * 16 for _, _, length in CASES.values() if length > 16) - 16


@pytest.mark.parametrize("budget", [4, 7, 33])
def test_in_chunks(stand: Stand, alone: dict[str, Answer], budget: int) -> None:
    core = stand.core(max_num_seqs=4, max_num_batched_tokens=budget)

    check(run(core, stand.requests()), alone)

    num_prompt = sum(length for _, _, length in CASES.values())
    assert core.stats().steps_total > num_prompt / budget


def test_preempted(stand: Stand, alone: dict[str, Answer]) -> None:
    core = stand.core(num_blocks=14, kv_watermark=0.0, max_num_seqs=8)

    check(run(core, stand.requests()), alone)

    assert core.stats().num_preemptions_total > 0


def test_with_drafts(stand: Stand, alone: dict[str, Answer]) -> None:
    core = stand.core(speculative="ngram", proposer=oracle(stand, alone))

    check(run(core, stand.requests()), alone)

    stats = core.stats()
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total


def test_in_other_blocks_among_not_a_number(stand: Stand, alone: dict[str, Answer]) -> None:
    core = stand.core(churn=True)
    run(core, stand.neighbours(23))  # leaves the free list in another order

    check(run(core, stand.requests()), alone)


def test_all_at_once(stand: Stand, alone: dict[str, Answer]) -> None:
    core = stand.core(
        prefix_cache=True,
        churn=True,
        num_blocks=22,
        kv_watermark=0.0,
        max_num_seqs=12,
        max_num_batched_tokens=29,
        speculative="ngram",
        proposer=oracle(stand, alone),
    )
    strangers = stand.neighbours(20)

    # Adapters load beside the first steps: only then does it not depend on that who meets whom.
    check(run(core, stand.requests("#0")), alone)
    check(run(core, [*strangers, *stand.requests("#1")]), alone)
    check(run(core, stand.requests("#2")), alone)

    stats = core.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hit_tokens_total > 0
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total
    assert stats.max_adapters_in_step == len(stand.digests)


@dataclass
class CountingSurvivors:
    """The native filters: how often few were found where there were many, and the most that a cut left."""

    native: GumbelSurvivors
    num_helped: int = 0
    most_kept: int = 0

    def cut(self, scores_V: Any, **how: Any) -> Any:
        kept = self.native.cut(scores_V, **how)
        self.most_kept = max(self.most_kept, 0 if kept is None else kept.size)
        return kept

    def __call__(self, scores_V: Any, **how: Any) -> Any:
        found = self.native(scores_V, **how)
        self.num_helped += found is not None and found.size < 512
        return found


def test_draws_from_many_ids(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_model(
        tmp_path / "model",
        TinyShape(vocab_size=WIDE_TOKENS + WIDE_PADDING, num_layers=1),
    )
    vocab = {f"token {index}": index for index in range(WIDE_TOKENS)}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    kernels = native_cache_dir(pytestconfig)
    try:
        survivors = CountingSurvivors(GumbelSurvivors(kernels))
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    engines = ModelStand(tmp_path, 1, "native", "float32", kernels, WIDE_TOKENS)
    stand = Stand(engines, {}, WIDE_CASES)
    asked: list[int] = []
    most_likely = filters_module.most_likely

    def counted(logits_V: Any, count: int) -> Any:
        asked.append(count)
        return most_likely(logits_V, count)

    monkeypatch.setattr(filters_module, "most_likely", counted)
    core, alone = stand.core(max_num_batched_tokens=512), {}
    for request in stand.requests():
        alone |= run(core, [request])
    assert max(asked) > filters_module._NUCLEUS_GUESS  # a nucleus was looked for further
    assert max(token for choices in alone.values() for token in choices[0][0]) > 1_024
    asked.clear()

    core = stand.core(
        prefix_cache=True,
        churn=True,
        max_num_seqs=12,
        max_num_batched_tokens=29,
        speculative="ngram",
        proposer=oracle(stand, alone),
        survivors=survivors,
    )
    check(run(core, [*stand.neighbours(6), *stand.requests("#1")]), alone)
    check(run(core, stand.requests("#2")), alone)

    stats = core.stats()
    # Five of the six cases, but where the best id's own noise left few in the running.
    num_drawn = 2 * sum(c.n * c.max_tokens for c, _, _ in WIDE_CASES.values() if c.temperature > 1)
    assert survivors.num_helped > num_drawn // 2
    assert survivors.most_kept > filters_module._NUCLEUS_GUESS
    assert stats.prefix_cache_hit_tokens_total > 0
    assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total
    engines.close()


def oracle(stand: Stand, alone: dict[str, Answer]) -> LyingOracle:
    return LyingOracle(
        {
            tuple(request.prompt_token_ids): [
                *request.prompt_token_ids,
                *alone[request.request_id][0][0],
            ]
            for request in stand.requests()
        },
        stand.vocab_size,
    )
