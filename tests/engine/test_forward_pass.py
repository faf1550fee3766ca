"""Decoding by replayed recordings gives the bits of eager decoding, whatever changed since they were made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from loraplex_engine.device.graphs import DecodeGraphs, GraphBackend, row_buckets
from loraplex_engine.device.inputs import StagedInputs
from loraplex_engine.device.staging import Staging
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.linear import PlainMethod
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_engine.sampling.device import GreedySampler

from tests.support.recorded_graph import RecordingBackend
from tests.support.staged_backends import StagedAttention, StagedLora
from tests.support.step_driver import DrivenRequest, StepDriver, driven
from tests.support.tiny_model import TinyShape, write_tiny_model

LIMITS = RunnerLimits(num_blocks=80, block_size=4, max_num_seqs=6, max_model_len=48)
MAX_TOKENS = 40
NUM_SLOTS = 3
# Slot 1 adapts the head.
HEADS = (1,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("tiny"), TinyShape(vocab_size=67, num_layers=1)
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Packed weights cannot be seen by the recorder.
    yield load_decoder(folder, torch.float32, method=PlainMethod())
    torch.set_num_threads(num_threads)


@dataclass
class Slots:
    version: int = 0


@dataclass
class Stand:
    """A runner with what surrounds it; `swap` puts another adapter in a slot."""

    runner: ModelRunner
    lora: StagedLora
    slots: Slots
    graphs: DecodeGraphs
    driver: StepDriver = field(init=False)

    def __post_init__(self) -> None:
        self.driver = StepDriver(self.runner, seed=3)

    def swap(self, slot: int, number: float) -> None:
        self.lora.number_S[slot] = number
        self.slots.version += 1

    def capture(self) -> None:
        for key in self.graphs.keys:
            self.runner.forward_pass.capture(key)


def new_stand(model: Decoder, backend: GraphBackend | None, *, bakes_in: bool = False) -> Stand:
    staging = Staging(torch.device("cpu"))
    inputs = StagedInputs(staging, LIMITS.max_num_seqs)
    lora = StagedLora(staging, num_slots=NUM_SLOTS, max_tokens=MAX_TOKENS, heads=HEADS)
    attention = StagedAttention(
        model.attention_shape,
        staging,
        block_size=LIMITS.block_size,
        max_tokens=MAX_TOKENS,
        max_rows=LIMITS.max_num_seqs,
        max_blocks_per_row=LIMITS.max_model_len // LIMITS.block_size,
        bakes_in=bakes_in,
    )
    inputs.reserve_large(MAX_TOKENS)
    staging.seal()
    slots = Slots()
    graphs = DecodeGraphs(backend, row_buckets(LIMITS.max_num_seqs), lora.active_buckets)
    runner = ModelRunner(
        model,
        attention,
        LIMITS,
        lora=lora,
        slots=slots,
        inputs=inputs,
        graphs=graphs,
        on_device=GreedySampler(),
    )
    stand = Stand(runner, lora, slots, graphs)
    for slot in range(NUM_SLOTS):
        stand.swap(slot, 0.5 + slot)
    return stand


def params(rng: random.Random) -> SamplingParams:
    return rng.choice(
        [
            SamplingParams(max_tokens=99, temperature=0.0),
            SamplingParams(max_tokens=99, temperature=0.0, logprobs=3),
            SamplingParams(max_tokens=99, temperature=0.9, seed=rng.randrange(99)),
        ]
    )


def live_through(stand: Stand, num_steps: int) -> Iterator[list[DrivenRequest]]:
    """Rows come and go, grow and share steps with prefills and drafts; adapters are swapped."""
    rng = random.Random(7)
    running: list[DrivenRequest] = []
    for step in range(num_steps):
        if step % 5 == 4:
            stand.swap(rng.randrange(NUM_SLOTS), rng.random() * 3)
        if len(running) < LIMITS.max_num_seqs and rng.random() < 0.4:
            prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 9))]
            slot = rng.choice([-1, -1, 0, 1, 2])
            request = driven(prompt, params(rng), adapter_slot=slot)
            running.append(request)
            stand.driver.step(
                [
                    *((other, 1) for other in running[:-1]),
                    (request, len(prompt)),
                ]
            )
        elif running and rng.random() < 0.15:
            stand.driver.step([(one, 1) for one in running], drafts={0: (5, 6)})
        elif running:
            stand.driver.step([(one, 1) for one in running])
        for request in list(running):
            if len(request.token_ids) > 40 or rng.random() < 0.02:
                running.remove(request)
                yield [request]
                stand.driver.release(request)
    yield running


def trace(stand: Stand, num_steps: int) -> list[tuple[list[int], object, bytes]]:
    return [
        (request.output, request.logprobs, stand.driver.kv_bytes(request))
        for requests in live_through(stand, num_steps)
        for request in requests
    ]


def test_replayed_steps_have_the_bits_of_eager_ones_over_a_long_life(model: Decoder) -> None:
    eager, replayed = new_stand(model, None), new_stand(model, RecordingBackend())
    replayed.capture()

    expected, got = trace(eager, 100), trace(replayed, 100)

    assert got == expected
    assert len(expected) > 8
    assert replayed.graphs.replays_total > 50
    assert eager.graphs.replays_total == 0
    assert replayed.graphs.eager_total > 10
    assert replayed.graphs.replays_total + replayed.graphs.eager_total == eager.graphs.eager_total


def test_a_number_baked_into_a_recording_is_caught(model: Decoder) -> None:
    eager = new_stand(model, None, bakes_in=True)
    replayed = new_stand(model, RecordingBackend(), bakes_in=True)
    replayed.capture()

    assert trace(replayed, 30) != trace(eager, 30)


def test_decoding_by_buckets_is_decoding(model: Decoder, tmp_path: Path) -> None:
    """The same tokens as a runner without buckets, on the CPU's own attention."""
    from loraplex_engine.attention.key_lengths import KeyLengths
    from loraplex_engine.attention.torch_attention import TorchAttention

    stand = new_stand(model, RecordingBackend())
    stand.capture()
    attention = TorchAttention(
        model.attention_shape,
        num_blocks=LIMITS.num_blocks,
        block_size=LIMITS.block_size,
        key_lengths=KeyLengths(()),
    )
    plain = StepDriver(ModelRunner(model, attention, LIMITS))

    outputs = []
    for driver in (stand.driver, plain):
        requests = [driven([5, 6, 7, 8]), driven([9]), driven([10, 11])]
        driver.step([(request, len(request.token_ids)) for request in requests])
        driver.decode(requests, 20)
        outputs.append([request.output for request in requests])

    assert outputs[0] == outputs[1]
    assert stand.graphs.replays_total == 20


def test_recording_changes_nothing_that_a_sequence_can_read(model: Decoder) -> None:
    stand = new_stand(model, RecordingBackend())
    request = driven([5, 6, 7], adapter_slot=1)
    stand.driver.prefill(request, 3)
    before = stand.driver.kv_bytes(request)

    stand.capture()

    assert stand.driver.kv_bytes(request) == before


def test_a_new_cache_takes_the_recordings_along(model: Decoder) -> None:
    stand = new_stand(model, RecordingBackend())
    stand.capture()
    assert stand.graphs.num_captured == len(stand.graphs.keys) > 8

    stand.runner.resize(num_blocks=90, max_model_len=40)

    assert stand.graphs.num_captured == 0
    assert stand.runner.limits.num_blocks == 90
    assert len(stand.runner.kv_layers[0]) == 91 * LIMITS.block_size


def test_a_row_whose_numbers_are_not_finite_is_found_in_a_replay(model: Decoder) -> None:
    stand = new_stand(model, RecordingBackend())
    stand.capture()
    bad, good = driven([5, 6, 7]), driven([8, 9, 10])
    stand.driver.step([(bad, 3), (good, 3)])
    stand.driver.poison(bad)

    stand.driver.decode([bad, good], 3)

    assert not bad.is_finite
    assert good.is_finite
    assert bad.output[1:] == [0, 0, 0]
