"""Rows that a device samples and rows that the host samples, in one step, with one wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from loraplex_engine.device.inputs import HostInputs, Inputs, StagedInputs
from loraplex_engine.device.landing import Landing
from loraplex_engine.device.staging import Staging
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.device import (
    DeviceSampled,
    DeviceSampler,
    GreedySampler,
    StepSampler,
)
from loraplex_engine.sampling.sampler import Sampled, SampleRow, sample
from loraplex_engine.step import BoolArray

CPU = torch.device("cpu")
VOCAB = 50
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def row(params: SamplingParams, position: int = 0, mask: np.ndarray | None = None) -> SampleRow:
    return SampleRow(params, position, np.arange(4), 4, mask)


def only(token: int) -> np.ndarray:
    mask = np.zeros(-(-VOCAB // 32), np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask


ROWS = [
    row(GREEDY),
    row(SamplingParams(max_tokens=9, temperature=0.8, seed=3), 2),
    row(GREEDY),
    row(SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)),
    row(SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 100.0})),
    row(GREEDY, mask=only(33)),
    row(GREEDY, mask=np.zeros(2, np.uint32)),
    row(GREEDY),
]


def draw_logits(num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((num_rows, VOCAB), generator=generator).to(torch.bfloat16)


def new_inputs(max_rows: int = 16) -> Inputs:
    staging = Staging(CPU)
    inputs = StagedInputs(staging, max_rows)
    staging.seal()
    return inputs


def run(
    rows: Sequence[SampleRow],
    logits_RV: torch.Tensor | None,
    on_device: DeviceSampler | None,
    is_finite_U: torch.Tensor | None = None,
) -> tuple[Sampled | None, BoolArray | None]:
    inputs = new_inputs()
    sampler = StepSampler(inputs, Landing(CPU), on_device=on_device)
    sampler.prepare(rows)
    inputs.flush()
    return sampler.finish(logits_RV, is_finite_U)


def assert_same(one: Sampled | None, other: Sampled) -> None:
    assert one is not None
    assert one.token_ids_R.tolist() == other.token_ids_R.tolist()
    assert one.is_finite_R.tolist() == other.is_finite_R.tolist()
    assert one.is_stuck_R.tolist() == other.is_stuck_R.tolist()
    assert one.logprobs == other.logprobs


@pytest.mark.parametrize("on_device", [None, GreedySampler()])
def test_a_mixed_step_is_what_the_host_alone_would_sample(on_device: DeviceSampler | None) -> None:
    logits = draw_logits(len(ROWS))
    logits[2, 17] = float("inf")
    logits[3, 1] = float("nan")

    sampled, flags = run(ROWS, logits, on_device, torch.tensor([True, False]))

    expected = sample(logits.float().numpy(), ROWS)
    assert_same(sampled, expected)
    assert flags is not None
    assert flags.tolist() == [True, False]
    assert expected.is_finite_R.tolist() == [True, True, False, False, True, True, True, True]
    assert expected.is_stuck_R[6]


def test_only_the_rows_that_the_device_cannot_do_come_to_the_host() -> None:
    class Watched(Landing):
        sizes: list[tuple[int, ...]]

        def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.sizes = [tuple(tensor.shape) for tensor in tensors]
            return super().fetch(tensors)

    inputs, landing = new_inputs(), Watched(CPU)
    sampler = StepSampler(inputs, landing, on_device=GreedySampler())

    sampler.prepare(ROWS)
    inputs.flush()
    sampler.finish(draw_logits(len(ROWS)), None)
    mixed = landing.sizes
    sampler.prepare([ROWS[0], ROWS[2]])
    inputs.flush()
    sampler.finish(draw_logits(2), None)

    assert mixed == [(8,), (8,), (5, VOCAB)]
    assert landing.sizes == [(2,), (2,)]


def test_of_equal_logits_the_lowest_id_wins_on_either_side() -> None:
    logits = torch.zeros((2, VOCAB), dtype=torch.bfloat16)
    logits[1, 9:] = 1.0
    rows = [ROWS[0], ROWS[0]]

    sampled, _ = run(rows, logits, GreedySampler())

    assert sampled is not None
    assert sampled.token_ids_R.tolist() == [0, 9]
    assert_same(sampled, sample(logits.float().numpy(), rows))


def test_a_step_that_samples_nothing_brings_its_flags() -> None:
    sampled, flags = run([], None, GreedySampler(), torch.tensor([False]))

    assert sampled is None
    assert flags is not None
    assert flags.tolist() == [False]


def test_every_token_of_the_device_s_rows_is_the_device_s_word() -> None:
    class Fixed:
        def prepare(self, rows_R: Sequence[SampleRow]) -> BoolArray:
            return np.asarray([True, False, True])

        def sample(self, logits_RV: torch.Tensor) -> DeviceSampled:
            return DeviceSampled(
                torch.tensor([41, 42, 43], dtype=torch.int32), torch.tensor([True, True, False])
            )

    logits = draw_logits(3)

    sampled, _ = run([ROWS[0]] * 3, logits, Fixed())

    assert sampled is not None
    assert sampled.token_ids_R.tolist() == [41, int(logits[1].argmax()), 0]
    assert sampled.is_finite_R.tolist() == [True, True, False]


def test_staged_inputs_arrive_with_the_flush_in_the_place_that_they_fit() -> None:
    staging = Staging(CPU)
    inputs = StagedInputs(staging, 4)
    table = staging.reserve("table", (100,), np.int32)
    inputs.reserve_large(9)
    staging.seal()

    few = inputs.put("token_T", np.arange(4))
    table.use(1)
    assert few.tolist() == [0] * 4
    num_few = staging.flush()
    many = inputs.put("token_T", np.arange(9))
    num_many = staging.flush()

    assert few.tolist() == [0, 1, 2, 3]
    assert many.tolist() == list(range(9))
    # Nothing of the large places travels with the small ones.
    assert num_few == table.begin_byte + 4
    assert num_many == 9 * 8
    with pytest.raises(ValueError, match="large token_T: 10 entries"):
        inputs.put("token_T", np.arange(10))
    assert HostInputs().put("token_T", np.arange(3)).tolist() == [0, 1, 2]
