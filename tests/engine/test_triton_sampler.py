"""The sampler on the device beside the host's: the same tokens, whoever draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from loraplex_engine.device.inputs import StagedInputs
from loraplex_engine.device.landing import Landing
from loraplex_engine.device.staging import Staging
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.device import StepSampler
from loraplex_engine.sampling.sampler import Sampled, SampleRow, sample
from loraplex_engine.sampling.triton_sampler import TritonSampler
from loraplex_kernels.plans import open_plans

CPU = torch.device("cpu")
VOCAB = 331
MAX_ROWS, MAX_TOKENS = 8, 12


def row(position: int = 0, mask: np.ndarray | None = None, **fields: object) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=9, **fields), position, np.arange(4), 4, mask)


def only(token: int) -> np.ndarray:
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask


DEVICE_ROWS = [
    row(temperature=0.0, top_p=0.1),
    row(3, temperature=0.8, seed=2**64 - 1),
    row(2**33, top_k=1, seed=4),
    row(4, top_k=7, top_p=0.7, min_p=0.02, temperature=1.4, seed=5),
]
HOST_ROWS = [
    row(temperature=0.0, logprobs=2),
    row(1, seed=5, logit_bias={7: 100.0}),
    row(2, seed=6, mask=only(33)),
    row(temperature=0.0, mask=np.zeros(11, np.uint32)),
]
MIX = [row for pair in zip(DEVICE_ROWS, HOST_ROWS, strict=True) for row in pair]


class Stand:
    """A step's sampler over a staging of its own."""

    def __init__(self) -> None:
        staging = Staging(CPU)
        self.inputs = StagedInputs(staging, MAX_ROWS)
        self.on_device = TritonSampler(staging, open_plans("sm_90", "fast"), MAX_ROWS)
        self.on_device.reserve_large(MAX_TOKENS)
        self.inputs.reserve_large(MAX_TOKENS)
        staging.seal()
        self.sampler = StepSampler(self.inputs, Landing(CPU), on_device=self.on_device)

    def run(self, rows: Sequence[SampleRow], logits_RV: torch.Tensor) -> Sampled:
        self.sampler.prepare(rows)
        self.inputs.flush()
        sampled = self.sampler.finish(logits_RV, None).sampled
        assert sampled is not None
        return sampled


def logits_of(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return (3 * torch.randn((num_rows, VOCAB), generator=generator)).to(torch.bfloat16)


def assert_same(one: Sampled, other: Sampled) -> None:
    assert one.token_ids_R.tolist() == other.token_ids_R.tolist()
    assert one.is_finite_R.tolist() == other.is_finite_R.tolist()
    assert one.is_stuck_R.tolist() == other.is_stuck_R.tolist()
    assert one.logprobs == other.logprobs


def test_a_mixed_step_is_what_the_host_alone_would_sample() -> None:
    logits = logits_of(len(MIX))
    logits[2, 17] = float("nan")
    logits[5, 1] = float("inf")

    sampled = Stand().run(MIX, logits)

    assert_same(sampled, sample(logits.float().numpy(), MIX))
    assert sampled.is_finite_R.tolist() == [True, True, False, True, True, False, True, True]


def test_it_takes_the_rows_that_ask_for_nothing_else() -> None:
    stand = Stand()

    assert stand.on_device.prepare(MIX).tolist() == [True, False] * 4


def test_a_step_s_parameters_are_its_own() -> None:
    """Filters on in one step and off in the next, rows fewer and more: nothing is left over."""
    stand = Stand()
    logits = logits_of(MAX_TOKENS)
    steps = [DEVICE_ROWS, [row(seed=8), row(temperature=0.0)], [DEVICE_ROWS[3]]]

    for rows in steps:
        sampled = stand.run(rows, logits[: len(rows)])

        assert_same(sampled, sample(logits[: len(rows)].float().numpy(), rows))


def test_the_same_rows_one_position_on_and_other_rows_in_their_place() -> None:
    stand = Stand()
    params = [row.params for row in DEVICE_ROWS]
    others = [SamplingParams(max_tokens=9, seed=1), *params[1:]]
    mask = only(33)

    for step, asked in enumerate([params, params, others, params]):
        rows = [SampleRow(p, step, np.arange(4), 4) for p in asked]
        if step == 1:
            # Of the same request: a grammar may leave a step without a mask.
            rows[1] = SampleRow(params[1], step, np.arange(4), 4, mask)
        logits = logits_of(len(rows))

        sampled = stand.run(rows, logits)

        assert_same(sampled, sample(logits.float().numpy(), rows))


def test_drafts_make_more_rows_than_sequences() -> None:
    stand = Stand()
    rows = [row(position, seed=3) for position in range(MAX_TOKENS)]
    logits = logits_of(MAX_TOKENS)

    sampled = stand.run(rows, logits)

    assert_same(sampled, sample(logits.float().numpy(), rows))
    with pytest.raises(ValueError, match="large sample_RF: 78 entries"):
        stand.on_device.prepare([*rows, rows[0]])
