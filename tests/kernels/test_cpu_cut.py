"""The native cut of top-k and top-p: the ids of the reference in its order, or no answer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.filters import kept_ids
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.cut import LikelyCut

from tests.support.adapter_files import native_cache_dir


@pytest.fixture(scope="module")
def cut(request: pytest.FixtureRequest) -> LikelyCut:
    try:
        return LikelyCut(native_cache_dir(request.config))
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")


def draw(seed: int, vocab: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def asked(cut: LikelyCut, scores_V: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    return cut(
        scores_V,
        highest=float(scores_V.max()),
        temperature=max(params.temperature, 1e-7),
        top_k=params.top_k if 0 < params.top_k < scores_V.size else 0,
        top_p=params.top_p,
    )


@pytest.mark.parametrize("vocab", [2, 7, 33, 1000, 49_152])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_what_it_keeps_is_what_the_reference_keeps(
    cut: LikelyCut, vocab: int, scale: float, is_coarse: bool
) -> None:
    num_said = 0
    for seed, temperature, top_k, top_p in itertools.product(
        range(3), (1e-9, 0.3, 1.0, 3.0), (0, 1, 5, 300), (0.0, 0.3, 0.9, 0.999, 1.0)
    ):
        if not 0 < top_k < vocab and top_p >= 1.0:
            continue
        scores = draw(seed, vocab, scale)
        if is_coarse:  # many that are equal, zeros of both signs among them
            scores = np.round(scores)
        if seed == 2:
            scores[:: max(2, vocab // 9)] = -np.inf
        params = SamplingParams(
            max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=0
        )

        found = asked(cut, scores, params)

        expected = kept_ids(scores, params)
        assert expected is not None
        if found is not None:
            num_said += 1
            assert found.tolist() == expected.tolist()
    # All of a large vocabulary equal: too many whatever is asked.
    assert num_said > 0 or (scale == 0.0 and vocab == 49_152)


def test_it_answers_nearly_always_where_a_model_is_sure_of_something(cut: LikelyCut) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, seed=0)
    scores = [draw(seed, 49_152, 2.0) for seed in range(40)]
    for each in scores:
        each[:30] += 10

    answers = [asked(cut, each, params) for each in scores]

    assert sum(answer is not None for answer in answers) >= 38


def test_a_sum_that_may_be_either_side_of_p_is_not_decided(cut: LikelyCut) -> None:
    scores = np.zeros(8, np.float32)

    at = asked(cut, scores, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5, seed=0))
    beside = asked(cut, scores, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.51, seed=0))

    assert at is None
    assert beside is not None
    assert beside.tolist() == [0, 1, 2, 3, 4]


def test_too_many_are_left_to_the_reference(cut: LikelyCut) -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0)

    assert asked(cut, draw(0, 49_152, 0.1), params) is None


def test_scores_that_it_cannot_read_are_refused(cut: LikelyCut) -> None:
    with pytest.raises(ValueError, match="contiguous float32"):
        cut(np.zeros(4), highest=0.0, temperature=1.0, top_k=1, top_p=1.0)
