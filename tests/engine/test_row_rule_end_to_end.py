"""The row rule through the whole runner: a request's tokens, logprobs and KV bits never depend on company.

Whole = in chunks = batched = alone = preempted and resumed, bit for bit, with blocks in random places
and every block that nobody owns full of NaN.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import RunnerLimits

from tests.support.adapter_files import native_cache_dir
from tests.support.runner_cases import RunnerCase, open_case
from tests.support.step_driver import DrivenRequest, StepDriver, driven
from tests.support.tiny_model import TinyShape

LIMITS = RunnerLimits(num_blocks=256, block_size=16, max_num_seqs=24, max_model_len=1024)
SAMPLED = SamplingParams(max_tokens=99, temperature=0.8, seed=7, logprobs=3)


@dataclass(frozen=True)
class Trace:
    """Everything observable of one request, as bits."""

    output: tuple[int, ...]
    logprobs: tuple[object, ...]
    kv: bytes


HEAD64 = TinyShape(
    hidden_size=128, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=64
)
BIAS = TinyShape(kind="qwen2", num_heads=5, num_kv_heads=5, head_dim=16, num_layers=2)


@pytest.fixture(
    scope="module",
    params=[
        (TinyShape(), torch.float32, "torch"),
        (TinyShape(), torch.bfloat16, "torch"),
        (HEAD64, torch.float32, "torch"),
        (HEAD64, torch.float32, "native"),
        (BIAS, torch.bfloat16, "native"),
    ],
    ids=["fp32-odd-widths", "bf16-odd-widths", "fp32-head64", "fp32-native", "bf16-bias-native"],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunnerCase:
    shape, dtype, backend = request.param
    folder, cache_dir = tmp_path_factory.mktemp("tiny"), native_cache_dir(request.config)
    return open_case(folder, shape, dtype, backend, LIMITS, cache_dir=cache_dir)


def trace(driver: StepDriver, request: DrivenRequest) -> Trace:
    return Trace(tuple(request.output), tuple(request.logprobs), driver.kv_bytes(request))


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 131), k=length)


def alone(case: RunnerCase, tokens: list[int]) -> Trace:
    return _alone(case, tuple(tokens))


@functools.cache
def _alone(case: RunnerCase, tokens: tuple[int, ...]) -> Trace:
    driver, request = case.new_driver(), driven(tokens, SAMPLED)
    driver.prefill(request, len(tokens))
    driver.decode([request], 6)
    return trace(driver, request)


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(63, 1), (150, 1), (63, 7), (150, 7), (530, 7), (150, 100), (600, 100), (600, 333)],
)
def test_chunked_prefill_equals_whole_prefill(case: RunnerCase, length: int, chunk: int) -> None:
    tokens = prompt(length)
    driver, request = case.new_driver(seed=chunk), driven(tokens, SAMPLED)

    driver.prefill(request, chunk)
    driver.decode([request], 6)

    assert trace(driver, request) == alone(case, tokens)


@pytest.mark.parametrize("num_neighbours", [1, 2, 4, 15])
def test_batched_equals_alone(case: RunnerCase, num_neighbours: int) -> None:
    tokens = prompt(200)
    driver, request = case.new_driver(seed=num_neighbours), driven(tokens, SAMPLED)
    neighbours = [driven(prompt(31 * n % 400 + 1, seed=n)) for n in range(num_neighbours)]

    # Prefill of all in one step, the victim in the middle of it, then decodes in changing company.
    half = num_neighbours // 2
    order = [*neighbours[:half], request, *neighbours[half:]]
    driver.step([(r, len(r.token_ids)) for r in order])
    for count in range(6):
        driver.decode([request, *neighbours[count:]] if count % 2 else [*neighbours, request], 1)

    assert trace(driver, request) == alone(case, tokens)


def test_decode_beside_a_prefill_equals_alone(case: RunnerCase) -> None:
    tokens = prompt(90)
    driver, request = case.new_driver(), driven(tokens, SAMPLED)
    long = driven(prompt(900, seed=5))
    driver.prefill(request, 90)

    for count in (1, 2, 3, 130, 257, 300):
        driver.step([(long, count), (request, 1)])

    assert trace(driver, request) == alone(case, tokens)


def test_preempted_and_resumed_equals_undisturbed(case: RunnerCase) -> None:
    tokens = prompt(120)
    driver, request = case.new_driver(), driven(tokens, SAMPLED)
    driver.prefill(request, 64)
    driver.decode([request], 3)

    driver.release(request)
    thief = driven(prompt(300, seed=9))
    driver.prefill(thief, 128)
    driver.prefill(request, 50)
    driver.decode([request, thief], 2)

    assert trace(driver, request) == alone(case, tokens)


def test_a_neighbour_full_of_nan_changes_nothing(case: RunnerCase) -> None:
    tokens = prompt(40)
    driver, request = case.new_driver(), driven(tokens, SAMPLED)
    poisoned = driven(prompt(40, seed=3))
    driver.step([(poisoned, 40), (request, 40)])
    driver.poison(poisoned)

    driver.decode([poisoned, request], 6)

    assert not poisoned.is_finite
    assert request.is_finite
    assert trace(driver, request) == alone(case, tokens)


def test_results_are_finite_numbers(case: RunnerCase) -> None:
    """Guards the tests above: NaN equal to NaN would prove nothing."""
    result = alone(case, prompt(200))

    assert len(set(result.output)) > 1
    assert np.isfinite([p.logprob for p in result.logprobs]).all()
