"""Whatever passes `check_request` runs: no value of any field raises in the engine's loop.

Hostile numbers go in; each request is either refused by name or generates to its end on a real runner
with a tiny random model, and leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loraplex_engine.config import EngineConfig
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.errors import RequestRejectedError
from loraplex_engine.protocol import (
    Generate,
    SamplingParams,
    TokenEvent,
    decode_from_gateway,
    encode,
)
from loraplex_engine.runner import build_runner, load_model

from tests.support.core_driver import run_to_end
from tests.support.engine_fakes import FakeAdapterPool
from tests.support.tiny_model import TinyShape, write_tiny_model

VOCAB = TinyShape().vocab_size


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyShape(num_layers=1))


def _core(folder: Path) -> EngineCore:
    config = EngineConfig(
        model_dir=folder,
        base_model="tiny",
        max_model_len=64,
        num_threads=1,
        block_size=8,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    model, sizes = load_model(config)
    return build_core(
        config,
        sizes,
        build_runner(config, model, sizes),
        FakeAdapterPool(),
        vocab_size=VOCAB,
        eos_token_ids=frozenset({2}),
    )


_IDS = st.integers(0, VOCAB - 1)
_FEW_IDS = st.lists(_IDS | st.integers(0, 5), max_size=6).map(tuple)
_GOOD = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12)},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(0, 200),
        "min_p": st.floats(0, 1),
        "seed": st.integers(0, 2**64 - 1),
        "stop_token_ids": _FEW_IDS,
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(_IDS, st.floats(-100, 100), max_size=5),
        "min_tokens": st.integers(0, 1),
        "bad_words_token_ids": st.lists(
            st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=6
        ).map(tuple),
        "allowed_token_ids": st.lists(st.integers(0, 5), max_size=3).map(tuple) | _FEW_IDS,
        "n": st.integers(1, 3),
        "logprobs": st.integers(0, 20),
    },
)
_BAD_FLOATS = (float("nan"), float("inf"), float("-inf"), -1e300, 1e300)
_BAD_COUNTS = (-1, 2**31, 2**63 - 1, -(2**63))
_BAD_IDS = (-1, VOCAB, 2**31, 2**63 - 1, -(2**63))
_BAD: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        for value in _BAD_FLOATS
    ),
    *(("repetition_penalty", value) for value in (0.0, -0.0, 5e-324, *_BAD_FLOATS)),
    *(("logit_bias", {1: value}) for value in _BAD_FLOATS),
    *(("logit_bias", {id_: 1.0}) for id_ in _BAD_IDS),
    *(
        (name, value)
        for name in ("top_k", "min_tokens", "n", "logprobs", "max_tokens")
        for value in _BAD_COUNTS
    ),
    *((name, (1, id_)) for name in ("stop_token_ids", "allowed_token_ids") for id_ in _BAD_IDS),
    *(("bad_words_token_ids", ((3, id_),)) for id_ in _BAD_IDS),
    ("bad_words_token_ids", ((),)),
    ("seed", -1),
    ("n", 0),
    ("max_tokens", 0),
]
# A good request, with one bad value in a third of them.
_SAMPLING = st.builds(
    lambda good, bad: good if bad is None else good | dict([bad]),
    _GOOD,
    st.none() | st.none() | st.sampled_from(_BAD),
)
_PROMPTS = st.lists(_IDS, min_size=1, max_size=20) | st.lists(
    st.sampled_from([*_BAD_IDS, 1, 2, 3]), max_size=3
)


# Its first token is 3, and then nothing is left.
_STUCK: dict[str, Any] = {
    "max_tokens": 4,
    "allowed_token_ids": (3,),
    "bad_words_token_ids": ((3, 3),),
    "ignore_eos": True,
}


def test_what_is_admitted_never_raises_in_the_loop(model_dir: Path) -> None:
    seen: Counter[str] = Counter()
    core = _core(model_dir)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(prompt=_PROMPTS, both=st.tuples(_SAMPLING, _SAMPLING))
    @example(prompt=[1], both=(_STUCK, {"max_tokens": 4}))
    def run_two(prompt: list[int], both: tuple[dict[str, Any], ...]) -> None:
        admitted: dict[str, Generate] = {}
        for fields in both:
            request = Generate(
                request_id=f"r{seen['made']}",
                attempt=1,
                lease_token=1,
                tenant_id="t",
                tenant_salt=b"s",
                prompt_token_ids=prompt,
                sampling=SamplingParams(**fields),
            )
            seen["made"] += 1
            # As it arrives: a number that no frame can hold is not what this is about.
            assert decode_from_gateway(encode(request)) == request or _has_nan(fields)
            try:
                core.add(request)
            except RequestRejectedError as error:
                seen["refused"] += 1
                refusal = str(error)
                assert len(refusal) < 300, refusal
            else:
                admitted[request.request_id] = request
        events = run_to_end(core)
        _check(events, admitted)
        seen["admitted"] += len(admitted)
        seen["stuck"] += sum(event.error_code == "no_token_allowed" for event in events)
        assert core.stats().num_running == 0

    run_two()
    print("admission fuzz |", dict(seen))

    assert seen["admitted"] > 60
    assert seen["refused"] > 30
    assert seen["stuck"] > 0


def _has_nan(fields: dict[str, Any]) -> bool:
    biases = fields.get("logit_bias", {}).values()
    return any(value != value for value in (*fields.values(), *biases))


def _check(events: list[TokenEvent], admitted: dict[str, Generate]) -> None:
    """Each request ended once, in a way that it can have asked for, with ids that it allowed."""
    ended = [event for event in events if event.usage is not None]
    assert sorted(event.request_id for event in ended) == sorted(admitted)
    for event in ended:
        assert event.finish_reason in ("stop", "length") or event.error_code == "no_token_allowed"
    for event in events:
        sampling = admitted[event.request_id].sampling
        allowed = sampling.allowed_token_ids
        assert all(0 <= id_ < VOCAB for id_ in event.token_ids)
        assert not allowed or set(event.token_ids) <= set(allowed)
        assert not {(id_,) for id_ in event.token_ids} & set(sampling.bad_words_token_ids)
        for values in event.logprobs or []:
            assert -1e6 < values.logprob <= 1e-9
