"""Our engine beside transformers on one tiny model: the same tokens under every edit, the same logprobs.

`-s` prints the parity table: each feature, its oracle and the worst difference seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_engine.sampling.edits import RowRules, edited
from safetensors.torch import load_file, save_file
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.support.step_driver import StepDriver, driven
from tests.support.tiny_model import TinyShape, load_oracle, write_tiny_model

VOCAB = TinyShape().vocab_size
EOS = 2
NUM_OUTPUT = 24
PROMPT = [int(t) for t in np.random.default_rng(0).integers(3, VOCAB, 25)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    model = load_decoder(model_dir, torch.float32)
    limits = RunnerLimits(num_blocks=16, block_size=8, max_num_seqs=4, max_model_len=128)
    attention = TorchAttention(model.attention_shape, num_blocks=16, block_size=8)
    return ModelRunner(model, attention, limits)


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> PreTrainedModel:
    return load_oracle(model_dir, torch.float32)


class _OpenAiPenalties:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, over the output; written out in fp64."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=VOCAB).double()
        return scores - counts * self._frequency - (counts > 0) * self._presence


def _logits(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0, -1]


def _oracle_greedy(oracle: PreTrainedModel, processors: list[Any]) -> list[int]:
    ids = list(PROMPT)
    chain = LogitsProcessorList(processors)
    while len(ids) < len(PROMPT) + NUM_OUTPUT:
        scores = chain(torch.tensor([ids]), _logits(oracle, ids)[None].double())
        ids.append(int(scores[0].argmax()))
    return ids[len(PROMPT) :]


def _generate(runner: ModelRunner, sampling: SamplingParams) -> Any:
    driver = StepDriver(runner)
    request = driven(PROMPT, sampling)
    while len(request.output) < NUM_OUTPUT:
        driver.step([(request, len(request.token_ids) - request.num_computed)])
    driver.release(request)
    return request


@pytest.fixture(scope="module")
def plain(oracle: PreTrainedModel) -> list[int]:
    """What the model says when nothing is edited."""
    return _oracle_greedy(oracle, [])


def _case(name: str, plain: list[int]) -> tuple[dict[str, Any], list[Any]]:
    """Parameters that change what the model says, and transformers' processors for them."""
    biases = {5: 2.5, 90: -4.0, plain[2]: -3.0}
    words = [[plain[3]], [plain[5], plain[6]], [plain[0], plain[1], 9]]
    stops = [EOS, plain[1], plain[7]]
    cases: dict[str, tuple[dict[str, Any], list[Any]]] = {
        "base": ({}, []),
        "repetition penalty": (
            {"repetition_penalty": 1.3},
            [RepetitionPenaltyLogitsProcessor(1.3)],
        ),
        "presence, frequency penalty": (
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            [_OpenAiPenalties(0.7, 0.4)],
        ),
        "logit bias": (
            {"logit_bias": biases},
            [SequenceBiasLogitsProcessor({(i,): b for i, b in biases.items()})],
        ),
        "bad words": (
            {"bad_words_token_ids": tuple(map(tuple, words))},
            [NoBadWordsLogitsProcessor(words, eos_token_id=None)],
        ),
        "min tokens": (
            {"min_tokens": 15, "stop_token_ids": tuple(stops)},
            [MinNewTokensLengthLogitsProcessor(len(PROMPT), 15, stops)],
        ),
    }
    cases["all of them"] = (
        {key: value for fields, _ in cases.values() for key, value in fields.items()},
        [processor for _, processors in cases.values() for processor in processors],
    )
    return cases[name]


_NAMES = [
    "base",
    "repetition penalty",
    "presence, frequency penalty",
    "logit bias",
    "bad words",
    "min tokens",
    "all of them",
]


@pytest.mark.parametrize("name", _NAMES)
def test_the_text_and_the_edited_logits_equal_the_oracle_s(
    runner: ModelRunner, oracle: PreTrainedModel, plain: list[int], name: str
) -> None:
    fields, processors = _case(name, plain)
    sampling = SamplingParams(max_tokens=999, temperature=0.0, logprobs=20, **fields)

    request = _generate(runner, sampling)

    expected = _oracle_greedy(oracle, processors)
    assert request.output == expected
    assert (expected == plain) == (name == "base"), "the feature did nothing"
    worst = worst_logprob = 0.0
    rules = RowRules.of(sampling, (EOS,))
    for position in range(NUM_OUTPUT):
        ids = PROMPT + expected[:position]
        raw = _logits(oracle, ids)
        ours = edited(raw.numpy(), rules, np.asarray(ids), len(PROMPT), None)
        theirs = LogitsProcessorList(processors)(torch.tensor([ids]), raw[None].double())[0].numpy()
        is_banned = np.isneginf(theirs)
        assert (np.isneginf(ours) == is_banned).all()
        worst = max(worst, float(np.abs(ours[~is_banned] - theirs[~is_banned]).max()))
        log_softmax = torch.log_softmax(raw.double(), -1).numpy()
        values = request.logprobs[position]
        differences = np.abs(np.asarray(values.top_logprobs) - log_softmax[values.top_ids])
        own = abs(values.logprob - log_softmax[expected[position]])
        worst_logprob = max(worst_logprob, float(differences.max()), float(own))
    print(f"parity | {name} | edited logits {worst:.1e} | logprobs {worst_logprob:.1e}")
    assert worst < 5e-6
    assert worst_logprob < 5e-5


def test_ids_that_the_tokenizer_lacks_are_never_sampled(model_dir: Path, tmp_path: Path) -> None:
    """The checkpoint's rows beyond the tokenizer are padding, whatever they hold."""
    padded = tmp_path / "padded"
    shutil.copytree(model_dir, padded)
    num_known = 100
    vocab = {f"t{i}": i for i in range(num_known)}
    (padded / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    tensors = load_file(padded / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors[name][num_known:] = 50 * tensors[name][num_known - 31 : num_known]
    save_file(tensors, padded / "model.safetensors", metadata={"format": "pt"})
    model = load_decoder(padded, torch.float32)
    limits = RunnerLimits(num_blocks=16, block_size=8, max_num_seqs=4, max_model_len=128)
    attention = TorchAttention(model.attention_shape, num_blocks=16, block_size=8)
    runner = ModelRunner(model, attention, limits)
    prompt = [id_ % num_known for id_ in PROMPT]
    theirs = _logits(load_oracle(padded, torch.float32), prompt)
    assert int(theirs.argmax()) >= num_known, "nothing to keep out"

    for sampling in (
        SamplingParams(max_tokens=99, temperature=0.0, logprobs=20),
        SamplingParams(max_tokens=99, temperature=2.0, seed=1, logprobs=20),
        SamplingParams(max_tokens=99, seed=1, top_p=0.9, repetition_penalty=1.2, logprobs=20),
    ):
        driver = StepDriver(runner)
        request = driven(prompt, sampling)
        while len(request.output) < NUM_OUTPUT:
            driver.step([(request, len(request.token_ids) - request.num_computed)])
        driver.release(request)

        assert max(request.output) < num_known
        assert max(id_ for values in request.logprobs for id_ in values.top_ids) < num_known
    first = torch.log_softmax(theirs[:num_known].double(), -1)
    values = request.logprobs[0]
    assert values.logprob == pytest.approx(float(first[request.output[0]]), abs=1e-4)
