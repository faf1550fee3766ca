"""Speculative = plain through core, runner and a tiny random model: the same tokens, the same log-probability bits.

Each request runs alone without drafts, and in a crowd that is short of rows, blocks and budget with them:
preempted, beside chunked prefills, on several adapters. An oracle that knows what plain decoding said
proposes drafts and lies about one in five, so that blocks of drafts end in every way. Outputs that are told
beforehand (`forced_token_ids`) go the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from loraplex_engine.artifact import AdapterStore, ModelShape
from loraplex_engine.core import EngineCore
from loraplex_engine.protocol import Generate, Grammar, TokenLogprobs
from loraplex_engine.runner import ModelRunner
from loraplex_engine.speculative import Ask
from loraplex_engine.step import UInt32Array
from loraplex_engine.structured.meter import GrammarMeter
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.adapter_files import ALL_LINEARS, make_adapter, native_cache_dir
from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import collect_outcomes, make_request
from tests.support.model_stand import EOS, ModelStand
from tests.support.tiny_model import TinyShape, load_oracle, write_tiny_model

Output = tuple[list[int], list[TokenLogprobs], str | None]

VOCAB = TinyShape().vocab_size


@dataclass(frozen=True)
class Stand:
    """A model with adapters, and what computes them."""

    engines: ModelStand
    digests: tuple[str, ...]

    def core(self, **settings: Any) -> EngineCore:
        return self.engines.core(max_model_len=128, **settings)


@dataclass
class Turning:
    """A grammar without a text: what it allows turns with each token, and some tokens complete it."""

    consumed: list[int] = field(default_factory=list)

    is_done, error, meter = True, None, GrammarMeter()

    @property
    def is_complete(self) -> bool:
        return len(self.consumed) > 4 and self.consumed[-1] % 8 == 0

    def request(self, grammar: Grammar, tenant_id: str) -> Turning:
        return self

    def matcher(self) -> Turning:
        return Turning()

    def fork(self) -> Turning:
        return Turning(list(self.consumed))

    def advance(self, token_id: int) -> None:
        assert not self.is_complete
        assert self._is_allowed(token_id), "sampled against the mask"
        self.consumed.append(token_id)

    def validate_drafts(self, drafts: Sequence[int]) -> int:
        ahead = self.fork()
        for count, token_id in enumerate(drafts):
            if ahead.is_complete or not ahead._is_allowed(token_id):
                return count
            ahead.consumed.append(token_id)
        return len(drafts)

    def masks_for(self, drafts: Sequence[int] = ()) -> UInt32Array:
        masks = np.full((1 + len(drafts), -(-VOCAB // 32)), 0xFFFF_FFFF, np.uint32)
        ahead = self.fork()
        for place in range(1 + len(drafts)):
            if not ahead.is_complete:
                for token_id in range(VOCAB):
                    if not ahead._is_allowed(token_id):
                        masks[place, token_id // 32] &= np.uint32(0xFFFF_FFFF ^ 1 << token_id % 32)
            ahead.consumed += drafts[place : place + 1]
        return masks

    def _is_allowed(self, token_id: int) -> bool:
        return (token_id + len(self.consumed)) % 3 != 0


@dataclass
class Oracle:
    """Knows what each request will say, by its key: its place in the order of arrival."""

    truths: list[list[int]] = field(default_factory=list)  # prompt and output
    draw: random.Random = field(default_factory=lambda: random.Random(8))

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        return [
            [
                (token_id + 1) % VOCAB if self.draw.random() < 0.2 else token_id
                for token_id in self.truths[ask.key][len(ask.token_ids) :][: ask.max_drafts]
            ]
            for ask in asks
        ]

    def forget(self, key: int) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stand")
    (root / "model").mkdir()
    write_tiny_model(root / "model")
    return root


@pytest.fixture(scope="module")
def digests(folder: Path) -> tuple[str, ...]:
    shape = ModelShape.from_config_json(folder / "model" / "config.json")
    store = AdapterStore(f"file://{folder}/store")
    made = []
    for rank, linears in ((5, ALL_LINEARS), (16, ("q_proj", "down_proj"))):
        source = folder / f"adapter-{rank}"
        adapter = make_adapter(source, shape, rank=rank, linears=linears, size=0.3)
        store.put(source, adapter.digest)
        made.append(adapter.digest)
    return tuple(made)


STANDS = [
    ("native", "float32"),
    ("torch", "bfloat16"),
    ("native", "bfloat16"),
    ("torch", "float32"),
]
# Where what is tested lies above the arithmetic.
on_two_stands = pytest.mark.parametrize("stand", STANDS[:2], ids="-".join, indirect=True)


@pytest.fixture(params=STANDS, ids="-".join)
def stand(
    request: pytest.FixtureRequest, folder: Path, digests: tuple[str, ...]
) -> Iterator[Stand]:
    backend, dtype = request.param
    kernels = native_cache_dir(request.config)
    made = Stand(ModelStand(folder, len(digests), backend, dtype, kernels, VOCAB), digests)
    try:
        made.core(num_blocks=8)
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    yield made
    made.engines.close()


def run(core: EngineCore, requests: list[Generate]) -> dict[str, Output]:
    for request in requests:
        core.add(request)
    events = run_to_end(core)
    logprobs: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for event in events:
        logprobs[event.request_id] += event.logprobs or []
    outputs = {}
    for name, outcome in collect_outcomes(events).items():
        assert outcome.terminal is not None
        outputs[name] = (outcome.token_ids, logprobs[name], outcome.terminal.finish_reason)
    return outputs


def sampled(request: Generate, **sampling: Any) -> Generate:
    return msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, **sampling)
    )


def draw_requests(stand: Stand) -> list[Generate]:
    """Everything that a position's token may depend on, for the base and both adapters."""
    draw = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 0},
        {
            "temperature": 0.8,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
            "logprobs": 3,
        },
        {
            "temperature": 1.2,
            "top_k": 50,
            "min_p": 0.02,
            "min_tokens": 9,
            "stop_token_ids": tuple(range(0, VOCAB, 3)),
            "bad_words_token_ids": ((7, 8), (9,)),
            "ignore_eos": False,
            "logprobs": 1,
        },
    ]
    requests = []
    for index in range(9):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 50))]
        request = make_request(f"r{index}", prompt, seed=index)
        requests.append(
            msgspec.structs.replace(
                sampled(request, max_tokens=draw.randrange(12, 25), **kinds[index % len(kinds)]),
                adapter_digest=[None, *stand.digests][index % 3],
            )
        )
    return requests


def plain_outputs(stand: Stand, requests: list[Generate]) -> dict[str, Output]:
    core = stand.core(speculative="off", num_blocks=64, prefix_cache=False)
    outputs: dict[str, Output] = {}
    for request in requests:
        outputs |= run(core, [request])
    assert core.stats().spec_draft_tokens_total == 0
    return outputs


def truths_of(requests: list[Generate], outputs: dict[str, Output]) -> list[list[int]]:
    return [[*r.prompt_token_ids, *outputs[r.request_id][0]] for r in requests]


def test_a_crowd_with_drafts_says_what_each_says_alone_without(stand: Stand) -> None:
    requests = draw_requests(stand)
    alone = plain_outputs(stand, requests)
    # A stop token in the middle of what was said: blocks of drafts reach beyond it.
    stopped = [
        msgspec.structs.replace(
            sampled(r, stop_token_ids=(alone[r.request_id][0][6],)), request_id=f"stop-{n}"
        )
        for n, r in enumerate(requests[:3])
    ]
    expected = alone | plain_outputs(stand, stopped)
    assert {expected[r.request_id][2] for r in stopped} == {"stop"}
    everyone = [*requests, *stopped]
    truths = truths_of(
        everyone, alone | {r.request_id: alone[f"r{n}"] for n, r in enumerate(stopped)}
    )
    tight = stand.core(
        proposer=Oracle(truths),
        speculative="ngram",
        num_speculative_tokens=5,
        block_size=8,
        num_blocks=26,
        max_num_seqs=5,
        max_num_batched_tokens=26,
        long_prefill_token_threshold=7,
        kv_watermark=0.0,
        prefix_cache=False,
    )

    crowd = run(tight, everyone)

    stats = tight.stats()
    assert stats.num_preemptions_total >= 2
    assert (stats.max_adapters_in_step, stats.mixed_steps_total > 0) == (2, True)
    assert stats.spec_accepted_tokens_total > 40
    assert stats.spec_draft_tokens_total - stats.spec_accepted_tokens_total > 20
    assert (stats.kv_blocks_free, stats.num_running) == (26, 0)
    assert crowd == expected
    generated = sum(len(tokens) for tokens, _, _ in expected.values())
    assert stats.generation_tokens_total == generated


@on_two_stands
def test_what_drafts_filled_is_found_again_and_is_right(stand: Stand) -> None:
    """Blocks that later requests find hold accepted tokens only: a conversation goes on as if computed."""
    first = [
        msgspec.structs.replace(
            sampled(r, max_tokens=30, ignore_eos=True, min_tokens=30),
            prompt_token_ids=r.prompt_token_ids[:20],
        )
        for r in draw_requests(stand)[:4]
    ]
    alone = plain_outputs(stand, first)
    second = [
        msgspec.structs.replace(
            r,
            request_id=f"again-{r.request_id}",
            prompt_token_ids=[*r.prompt_token_ids, *alone[r.request_id][0]],
        )
        for r in first
    ]
    expected = alone | plain_outputs(stand, second)
    truths = truths_of([*first, *second], expected)
    core = stand.core(
        proposer=Oracle(truths),
        speculative="ngram",
        num_speculative_tokens=6,
        block_size=8,
        num_blocks=128,
    )

    outputs = run(core, first)
    accepted = core.stats().spec_accepted_tokens_total
    assert 0 < accepted < core.stats().spec_draft_tokens_total
    outputs |= run(core, second)

    # All full blocks of the first answers, prompts included, but perhaps the last of each: one that an
    # answer's last step filled with drafts is not kept.
    full = sum((len(r.prompt_token_ids) - 1) // 8 * 8 for r in second)
    assert full - 8 * len(second) <= core.stats().prefix_cache_hit_tokens_total <= full
    assert core.stats().spec_accepted_tokens_total > accepted
    assert outputs == expected


@on_two_stands
def test_a_grammar_masks_each_position_and_ends_inside_a_block(stand: Stand) -> None:
    requests = [
        sampled(request, grammar=Grammar(kind="regex", value="any"), stop_token_ids=())
        for request in draw_requests(stand)[:6]
    ]
    plain = stand.core(speculative="off", num_blocks=64, grammars=Turning())
    alone: dict[str, Output] = {}
    for request in requests:
        alone |= run(plain, [request])
    assert {reason for _, _, reason in alone.values()} == {"stop", "length"}
    # Behind the end of a text the oracle goes on as nobody would.
    truths = [[*truth, *range(20)] for truth in truths_of(requests, alone)]
    core = stand.core(
        proposer=Oracle(truths), speculative="ngram", num_blocks=64, grammars=Turning()
    )

    assert run(core, requests) == alone
    stats = core.stats()
    assert 10 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total


@on_two_stands
def test_prompt_lookup_finds_what_a_tiny_model_repeats(stand: Stand) -> None:
    """The n-gram proposer itself, on texts that cycle; settings as a user gives them."""
    draw = random.Random(2)
    requests = []
    for index in range(4):
        cycle = [draw.randrange(3, VOCAB) for _ in range(3 + index)]
        request = sampled(
            make_request(f"r{index}", cycle * 4, seed=index),
            temperature=[0.0, 0.4][index % 2],
            max_tokens=30,
            logprobs=1,
        )
        requests.append(
            msgspec.structs.replace(request, adapter_digest=[None, *stand.digests][index % 3])
        )
    alone = plain_outputs(stand, requests)

    for settings in ({"speculative": "ngram", "ngram_min": 1}, {"speculative": "auto"}):
        core = stand.core(**settings, num_blocks=64)
        assert run(core, requests) == alone
        stats = core.stats()
        if settings["speculative"] == "ngram":
            assert 0 < stats.spec_accepted_tokens_total < stats.spec_draft_tokens_total
            assert stats.steps_total < sum(len(tokens) for tokens, _, _ in alone.values())


def forced(request: Generate, output: Output, **sampling: Any) -> Generate:
    """Asks how likely that output is."""
    ids = tuple(output[0])
    settings = {"stop_token_ids": (), "min_tokens": 0, "forced_token_ids": ids, **sampling}
    return sampled(request, max_tokens=len(ids), **settings)


def test_what_was_said_is_as_likely_told_beforehand_as_when_it_was_sampled(stand: Stand) -> None:
    requests = draw_requests(stand)
    alone = plain_outputs(stand, requests)
    told = [
        msgspec.structs.replace(forced(r, alone[r.request_id]), request_id=f"told-{r.request_id}")
        for r in requests
    ]
    core = stand.core(
        block_size=8,
        num_blocks=26,
        max_num_seqs=5,
        max_num_batched_tokens=26,
        long_prefill_token_threshold=7,
        kv_watermark=0.0,
    )

    crowd = run(core, [request for pair in zip(told, requests, strict=True) for request in pair])

    assert core.stats().num_preemptions_total > 0
    assert {r: crowd[r] for r in alone} == alone
    for request in requests:
        tokens, logprobs, _ = alone[request.request_id]
        assert crowd[f"told-{request.request_id}"] == (tokens, logprobs, "length")


@on_two_stands
def test_told_tokens_take_few_steps_whether_drafting_is_on_or_not(stand: Stand) -> None:
    prompt, ids = [5, 6, 7], tuple(index % VOCAB for index in range(100))
    request = sampled(
        make_request("told", prompt), forced_token_ids=ids, max_tokens=100, logprobs=0
    )
    outputs = []
    for speculative in ("off", "ngram"):
        core = stand.core(speculative=speculative, num_blocks=64, max_num_seqs=40)
        outputs.append(run(core, [request]))
        assert core.stats().steps_total == 4  # the prompt and one, then 33 at a time
        assert (
            core.stats().spec_draft_tokens_total == 0
        )  # no guesses, so none of the guesses' counts
    assert outputs[0] == outputs[1]
    assert outputs[0]["told"][0] == list(ids)


@pytest.mark.parametrize("stand", [STANDS[0], STANDS[3]], ids="-".join, indirect=True)
def test_likelihoods_of_told_tokens_are_those_of_transformers(stand: Stand, folder: Path) -> None:
    draw = random.Random(12)
    prompt = [draw.randrange(3, VOCAB) for _ in range(20)]
    ids = [draw.randrange(VOCAB) for _ in range(40)]
    ids[7] = EOS  # which ends nothing here
    request = sampled(
        make_request("told", prompt, ignore_eos=False),
        forced_token_ids=tuple(ids),
        max_tokens=len(ids),
        logprobs=0,
    )
    core = stand.core(num_blocks=64)

    tokens, logprobs, finish_reason = run(core, [request])["told"]

    assert (tokens, finish_reason) == (ids, "length")
    oracle = load_oracle(folder / "model", torch.float32)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    expected = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
    ours = torch.tensor([entry.logprob for entry in logprobs], dtype=torch.float32)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert float(expected.std()) > 0.1  # they differ, and so would mistaken positions


@on_two_stands
def test_told_tokens_that_are_not_numbers_end_the_request_at_the_first(stand: Stand) -> None:
    def poison(runner: ModelRunner) -> None:
        with torch.inference_mode():
            runner.model._embedding_VH[9] = float("nan")

    core = stand.core(num_blocks=64, max_num_seqs=40, prepare=poison)
    ids = (3, 4, 5, 9, 6, 7)
    request = sampled(
        make_request("told", [5, 6, 7]), forced_token_ids=ids, max_tokens=6, logprobs=0
    )

    core.add(request)
    [outcome] = collect_outcomes(run_to_end(core, max_steps=20)).values()

    assert outcome.terminal is not None
    assert outcome.terminal.error_code == "non_finite_logits"
    assert outcome.token_ids == list(ids[: len(outcome.token_ids)])
    assert len(outcome.token_ids) <= 4
