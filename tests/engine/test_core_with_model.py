"""The core on the real runner and a tiny random model: what the scheduler decides never shows.

Alone with a roomy engine = in a crowd with too few rows, too few blocks and a budget of a few tokens:
the same tokens and the same bits of their logprobs, greedy and sampled.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent, TokenLogprobs
from loraplex_engine.runner import build_runner, load_model

from tests.support.engine_fakes import FakeAdapterPool, collect_outcomes, make_request
from tests.support.tiny_model import TinyShape, write_tiny_model

Output = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_core(model_dir: Path, **settings: Any) -> EngineCore:
    config = EngineConfig(
        model_dir=model_dir, base_model="tiny", max_model_len=96, num_threads=1, **settings
    )
    model, sizes = load_model(config)
    return build_core(
        config,
        sizes,
        build_runner(config, model, sizes),
        FakeAdapterPool(),
        vocab_size=TinyShape().vocab_size,
        eos_token_ids=frozenset({2}),
    )


def run(core: EngineCore, requests: list[Generate]) -> dict[str, Output]:
    for request in requests:
        core.add(request)
    events: list[TokenEvent] = []
    while core.has_work():
        events += core.step()
        core.check()
    logprobs: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for event in events:
        logprobs[event.request_id] += event.logprobs or []
    outcomes = collect_outcomes(events)
    return {name: (outcomes[name].token_ids, logprobs[name]) for name in logprobs}


def draw_requests() -> list[Generate]:
    draw = random.Random(5)
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
        )
        for index in range(10)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_crowd_short_of_everything_says_what_each_says_alone(
    model_dir: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    requests = draw_requests()
    roomy = make_core(model_dir, dtype=dtype, num_blocks=64, max_num_batched_tokens=512)
    alone: dict[str, Output] = {}
    for request in requests:
        alone |= run(roomy, [request])
    tight = make_core(
        model_dir,
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
    assert all(len(logprobs) == len(tokens) > 0 for tokens, logprobs in crowd.values())
