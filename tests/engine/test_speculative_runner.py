"""The runner on drafts: tokens, log-probabilities and the cache's bits are those of one token at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_engine.step import NewRow, Step

from tests.support.adapter_files import native_cache_dir
from tests.support.runner_cases import RunnerCase, open_case
from tests.support.step_driver import GREEDY, DrivenRequest, driven
from tests.support.tiny_model import TinyShape

LIMITS = RunnerLimits(num_blocks=64, block_size=8, max_num_seqs=8, max_model_len=256)
SHAPE = TinyShape(is_tied=False)  # an embedding can be poisoned without its head
VOCAB = SHAPE.vocab_size
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=99, temperature=0.9, seed=7, top_p=0.95, logprobs=3),
    "penalties": SamplingParams(
        max_tokens=99,
        temperature=0.7,
        seed=2**64 - 1,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logit_bias={5: 2.0, 9: -3.0},
        logprobs=0,
    ),
    "bans": SamplingParams(
        max_tokens=99,
        temperature=1.5,
        seed=11,
        min_tokens=12,
        stop_token_ids=tuple(range(0, VOCAB, 3))[:64],
        bad_words_token_ids=((5, 6), (7,), tuple(range(20, 24))),
        min_p=0.01,
        top_k=40,
        logprobs=1,
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, "torch"),
        (torch.bfloat16, "torch"),
        (torch.float32, "native"),
        (torch.bfloat16, "native"),
    ],
    ids=["fp32-torch", "bf16-torch", "fp32-native", "bf16-native"],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunnerCase:
    dtype, backend = request.param
    folder, cache_dir = tmp_path_factory.mktemp("tiny"), native_cache_dir(request.config)
    return open_case(folder, SHAPE, dtype, backend, LIMITS, cache_dir=cache_dir)


@contextmanager
def poisoned(model: Decoder, token_id: int) -> Iterator[None]:
    """Whoever computes this token gets NaN for logits."""
    with torch.inference_mode():
        kept = model._embedding_VH[token_id].clone()
        model._embedding_VH[token_id] = float("nan")
    yield
    with torch.inference_mode():
        model._embedding_VH[token_id] = kept


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB), k=length)


def plain(
    case: RunnerCase, sampling: SamplingParams, num_output: int
) -> tuple[DrivenRequest, bytes]:
    driver, request = case.new_driver(), driven(prompt(21), sampling)
    driver.prefill(request, 21)
    driver.decode([request], num_output - 1)
    return request, driver.kv_bytes(request)


def with_lies(draw: random.Random, truth: list[int], known: int, count: int) -> tuple[int, ...]:
    """`count` drafts behind `known` output tokens; one in four is wrong."""
    return tuple(
        (token_id + 1) % VOCAB if draw.random() < 0.25 else token_id
        for token_id in truth[known : known + count]
    )


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_with_drafts_and_without_every_bit_is_the_same(case: RunnerCase, kind: str) -> None:
    sampling = SAMPLINGS[kind]
    alone, kv = plain(case, sampling, 40)
    driver, request = case.new_driver(seed=3), driven(prompt(21), sampling)
    neighbour = driven(prompt(90))
    draw = random.Random(kind)
    driver.prefill(request, 21)
    accepted = rejected = 0
    while (known := len(request.output)) < 40:
        room = 40 - known - 1
        drafts = with_lies(draw, alone.output, known, min(room, draw.randrange(8)))
        work = [(request, 1)]
        if neighbour.num_computed < 80:
            work.insert(draw.randrange(2), (neighbour, draw.randrange(1, 9)))

        driver.step(work, drafts={work.index((request, 1)): drafts} if drafts else None)

        accepted += len(request.output) - known - 1
        rejected += len(drafts) - (len(request.output) - known - 1)

    assert request.output == alone.output
    assert request.logprobs == alone.logprobs
    assert driver.kv_bytes(request) == kv
    assert accepted > 0
    assert rejected > 0


def test_rows_with_and_without_drafts_share_a_step(case: RunnerCase) -> None:
    alone = {kind: plain(case, sampling, 12)[0] for kind, sampling in SAMPLINGS.items()}
    driver = case.new_driver()
    rows = [driven(prompt(21), sampling) for sampling in SAMPLINGS.values()]
    driver.step([(row, 21) for row in rows])

    truths = [alone[kind].output for kind in SAMPLINGS]
    driver.step(
        [(row, 1) for row in rows],
        drafts={
            0: tuple(truths[0][1:5]),
            2: (truths[2][1], (truths[2][2] + 1) % VOCAB, truths[2][3]),
            3: ((truths[3][1] + 1) % VOCAB,),
        },
    )

    assert [len(row.output) for row in rows] == [6, 2, 3, 2]
    for row, kind in zip(rows, SAMPLINGS, strict=True):
        assert row.output == alone[kind].output[: len(row.output)]
        assert row.logprobs == alone[kind].logprobs[: len(row.logprobs)]
        assert len(row.logprobs) == (0 if row.sampling.logprobs is None else len(row.output))


def test_each_position_has_its_own_mask(case: RunnerCase) -> None:
    """An id that the second position alone forbids: the first may sample it, the second does not."""
    truth = plain(case, GREEDY, 6)[0].output
    driver, request = case.new_driver(), driven(prompt(21))
    driver.prefill(request, 21)
    masks = np.full((3, -(-VOCAB // 32)), 0xFFFF_FFFF, np.uint32)
    forbidden = truth[2]
    masks[1, forbidden // 32] &= np.uint32(0xFFFF_FFFF ^ (1 << forbidden % 32))

    driver.step([(request, 1)], drafts={0: tuple(truth[1:3])}, token_masks={0: masks})

    assert request.output[:2] == truth[:2]
    assert len(request.output) == 3
    assert request.output[2] != forbidden


def test_a_draft_behind_which_nothing_may_come_ends_the_row_one_step_later_as_without(
    case: RunnerCase,
) -> None:
    truth = plain(case, GREEDY, 6)[0].output
    driver, request = case.new_driver(), driven(prompt(21))
    driver.prefill(request, 21)
    masks = np.full((4, -(-VOCAB // 32)), 0xFFFF_FFFF, np.uint32)
    masks[2] = 0

    result = driver.step([(request, 1)], drafts={0: tuple(truth[1:4])}, token_masks={0: masks})

    assert list(result.stuck) == []
    assert request.output == truth[:3]

    result = driver.step([(request, 1)], token_masks={0: masks[2:3]})

    assert list(result.stuck) == [0]


def test_a_rejected_draft_with_nan_logits_harms_nobody(case: RunnerCase) -> None:
    """Logits behind a wrong draft are of a text that never was: they must not end the row."""
    truth = plain(case, GREEDY, 6)[0].output
    wrong = next(i for i in range(VOCAB) if i not in truth[1:])
    driver, request = case.new_driver(), driven(prompt(21))
    driver.prefill(request, 21)
    with poisoned(case.model, wrong):
        result = driver.step([(request, 1)], drafts={0: (truth[1], wrong, wrong)})

    # Where NaN reaches the positions before it (SDPA), the row is as it was: it is asked again.
    is_finite = bool(result.is_finite_B[0])
    assert request.output == truth[: 3 if is_finite else 1]

    driver.decode([request], 6 - len(request.output))

    assert request.output == truth


def test_an_accepted_draft_with_nan_logits_ends_the_row_where_it_ends_without(
    case: RunnerCase,
) -> None:
    truth = plain(case, GREEDY, 6)[0].output
    assert truth[2] not in truth[:2]
    driver, request = case.new_driver(), driven(prompt(21))
    driver.prefill(request, 21)
    with poisoned(case.model, truth[2]):
        result = driver.step([(request, 1)], drafts={0: tuple(truth[1:4])})
        assert request.output == truth[: 3 if result.is_finite_B[0] else 1]
        driver.decode([request], 3 - len(request.output))
        assert request.output == truth[:3]

        result = driver.step([(request, 1)])

    assert not result.is_finite_B[0]


def test_copied_blocks_hold_what_the_originals_held(case: RunnerCase) -> None:
    runner = ModelRunner(case.model, case.attention, LIMITS)
    tokens = prompt(21)

    def step(step_id: int, row: int, blocks: tuple[int, ...], **fields: Any) -> int:
        runner.launch(
            Step(
                step_id=step_id,
                freed_rows=(),
                new_rows=(NewRow(row, tuple(tokens), 21, blocks, -1, GREEDY),),
                block_updates=(),
                rows_B=np.asarray([row], np.int32),
                samples_B=np.asarray([True]),
                **fields,
            )
        )
        return runner.collect().tokens[0][0]

    def span(start: int, count: int) -> dict[str, Any]:
        return {
            "num_computed_B": np.asarray([start], np.int32),
            "num_scheduled_B": np.asarray([count], np.int32),
        }

    first = step(0, 0, (5, 9, 2), **span(0, 21))
    copies = ((5, 30), (9, 5), (2, 31))  # a source that is a target too is read as it was
    second = step(1, 1, (30, 5, 31), block_copies=copies, **span(20, 1))

    assert first == second
    for kv in runner.kv_layers:
        assert torch.equal(kv[5 * 8 : 6 * 8], kv[9 * 8 : 10 * 8])
