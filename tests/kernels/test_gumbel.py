"""The native filter of draws: never loses the winner, and leaves hardly anyone else."""

from __future__ import annotations

import itertools
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.noise import gumbel, random_bits
from loraplex_engine.sampling.sampler import SampleRow, sample
from loraplex_engine.sampling.setup import open_survivors
from loraplex_kernels.cpu import build
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.gumbel import GumbelSurvivors

from tests.support.adapter_files import native_cache_dir


@pytest.fixture(scope="module")
def survivors(request: pytest.FixtureRequest) -> GumbelSurvivors:
    try:
        return GumbelSurvivors(native_cache_dir(request.config))
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")


def _scores(seed: int, vocab: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def _noise(seed: int, position: int, vocab: int) -> np.ndarray:
    zeros, ids = np.zeros(vocab, np.int64), np.arange(vocab)
    return gumbel(random_bits(np.asarray([seed], np.uint64), np.asarray([position]), zeros, ids))


@pytest.mark.parametrize("vocab", [1, 3, 4, 63, 64, 65, 131, 49_152])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 40.0])
def test_the_winner_survives_and_hardly_anyone_else(
    survivors: GumbelSurvivors, vocab: int, scale: float
) -> None:
    for seed, temperature in itertools.product((0, 7, 2**64 - 1), (1e-7, 0.7, 2.0)):
        position = 2**33 + seed % 5
        scores = _scores(seed % 97, vocab, scale)
        scores[:: max(2, vocab // 9)] = -np.inf
        if vocab == 1:
            scores[0] = 1.5
        best = int(scores.argmax())
        highest = float(scores[best])
        noise = _noise(seed, position, vocab)
        total = (scores.astype(np.float64) - highest) / temperature + noise

        ids = survivors(
            scores,
            highest=highest,
            temperature=temperature,
            seed=seed,
            position=position,
            floor=float(noise[best]),
        )

        assert ids is not None
        assert int(total.argmax()) in ids.tolist()
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert np.isfinite(scores[ids]).all()
        assert ids.size <= 60, "it filters nothing"


_FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.9},
    {"top_k": 5_000},
    {"top_p": 0.97},
    {"min_p": 1e-5},
    {"repetition_penalty": 1.4, "bad_words_token_ids": ((3,), (9,))},
]


@pytest.mark.parametrize("fields", _FIELDS, ids=str)
def test_every_draw_is_the_same_with_and_without(
    survivors: GumbelSurvivors, fields: dict[str, Any]
) -> None:
    count, vocab = 24, 20_000
    logits = np.stack([_scores(i, vocab, (0.1, 1.0, 4.0)[i % 3]) for i in range(count)])
    rows = [
        SampleRow(
            SamplingParams(**{"max_tokens": 9, "seed": 2**63 + i} | fields),
            i,
            np.arange(10 + i),
            10,
        )
        for i in range(count)
    ]
    calls = []

    class Counting:
        cut = survivors.cut

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return survivors(*args, **kwargs)

    native = sample(logits, rows, Counting())  # type: ignore[arg-type] # counts, then filters

    assert native.token_ids_R.tolist() == sample(logits, rows).token_ids_R.tolist()
    assert len(calls) > count / 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have a fused multiply-add")
def test_a_cpu_without_fma_draws_without_the_filter(
    survivors: GumbelSurvivors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That there is a compiler, the fixture says."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-march=x86-64"))
    with pytest.raises(NativeBuildError, match=r"failed on cut\.c"):
        GumbelSurvivors(tmp_path)

    assert open_survivors(tmp_path) is None
