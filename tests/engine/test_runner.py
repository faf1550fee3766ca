"""The runner's own duties: rows persist, results land where they belong, adapters are offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.attention.key_lengths import KeyLengths
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.lora.seam import LoraSite
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import load_decoder
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_engine.step import Int32Array, NewRow, Step

from tests.support.step_driver import GREEDY, StepDriver, driven
from tests.support.tiny_model import TinyShape, write_tiny_model

LIMITS = RunnerLimits(num_blocks=32, block_size=4, max_num_seqs=4, max_model_len=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(write_tiny_model(tmp_path_factory.mktemp("tiny")), torch.float32)


def new_runner(model: Decoder, **lora: Any) -> ModelRunner:
    attention = TorchAttention(
        model.attention_shape, num_blocks=32, block_size=4, key_lengths=KeyLengths(())
    )
    return ModelRunner(model, attention, LIMITS, **lora)


class FakeSlots:
    version = 7


class FakeBackend:
    """Records what it is offered; adds 1 to every output of rows with an adapter."""

    def __init__(self, *, adapts_head: bool = False) -> None:
        self.prepared: list[tuple[list[int], int]] = []
        self.added: list[tuple[int, LoraSite, int, int]] = []
        self.embedded: list[list[int]] = []
        self.heads: list[list[int]] = []  # slots
        self._adapts_head = adapts_head

    def prepare(
        self, slot_T: Int32Array, pool_version: int, *, of_head: bool = False
    ) -> Int32Array | None:
        self.prepared.append((slot_T.tolist(), pool_version))
        return slot_T if (slot_T >= 0).any() else None

    def add(
        self, y_TN: torch.Tensor, x_TK: torch.Tensor, layer: int, site: LoraSite, batch: Int32Array
    ) -> None:
        assert y_TN.is_contiguous()
        assert x_TK.is_contiguous()
        assert len(batch) == len(y_TN) == len(x_TK)
        self.added.append((layer, site, x_TK.shape[1], y_TN.shape[1]))
        y_TN[torch.from_numpy(batch >= 0)] += 1

    def add_embedding(self, y_TH: torch.Tensor, token_T: torch.Tensor, batch: Int32Array) -> None:
        assert len(batch) == len(y_TH) == len(token_T)
        self.embedded.append(token_T.tolist())

    def adapts_head(self, batch: Int32Array) -> bool:
        return self._adapts_head

    def add_head(self, y_RV: torch.Tensor, x_RH: torch.Tensor, batch: Int32Array) -> None:
        assert y_RV.is_contiguous()
        assert x_RH.is_contiguous()
        assert len(batch) == len(y_RV) == len(x_RH)
        self.heads.append(batch.tolist())


def test_the_backend_is_offered_every_site_of_every_layer_with_padded_slots(model: Decoder) -> None:
    backend = FakeBackend()
    driver = StepDriver(new_runner(model, lora=backend, slots=FakeSlots()))

    driver.step([(driven([5, 6, 7], adapter_slot=2), 3), (driven([9, 9]), 2)])

    # Five tokens are computed as eight rows.
    assert backend.prepared == [([2, 2, 2, -1, -1, -1, -1, -1], 7)]
    sites = [("qkv", 48, 80), ("o", 48, 48), ("gate_up", 48, 200), ("down", 100, 48)]
    assert backend.added == [(layer, *site) for layer in range(3) for site in sites]
    assert backend.embedded == [[5, 6, 7, 9, 9, 0, 0, 0]]
    assert backend.heads == []


def test_the_head_is_offered_each_sampled_position_with_its_row_s_slot(model: Decoder) -> None:
    backend = FakeBackend(adapts_head=True)
    driver = StepDriver(new_runner(model, lora=backend, slots=FakeSlots()))
    adapted, base, unfinished = driven([5, 6, 7], adapter_slot=2), driven([9, 9]), driven([4, 4])

    driver.step([(adapted, 3), (unfinished, 1), (base, 2)])
    driver.step([(adapted, 1), (unfinished, 1), (base, 1)], drafts={0: (8, 8), 2: (3,)})

    assert backend.heads == [[2, -1], [2, 2, 2, -1, -1, -1]]


def test_a_step_of_base_rows_never_calls_the_backend(model: Decoder) -> None:
    backend = FakeBackend()
    driver = StepDriver(new_runner(model, lora=backend, slots=FakeSlots()))

    driver.step([(driven([5, 6, 7]), 3)])

    assert backend.added == []


def test_an_adapter_changes_its_own_row_and_no_other(model: Decoder) -> None:
    plain, other = driven([5, 6, 7]), driven([5, 6, 7], adapter_slot=0)
    runner = new_runner(model, lora=FakeBackend(), slots=FakeSlots())
    driver = StepDriver(runner)
    driver.step([(plain, 3), (other, 3)])
    driver.decode([other, plain], 5)

    lone = driven([5, 6, 7])
    alone = StepDriver(new_runner(model))
    alone.prefill(lone, 3)
    alone.decode([lone], 5)

    assert plain.output == lone.output
    assert driver.kv_bytes(plain) == alone.kv_bytes(lone)
    assert driver.kv_bytes(other) != alone.kv_bytes(lone)


def test_rows_that_do_not_sample_answer_minus_one_and_keep_their_tokens(model: Decoder) -> None:
    runner = new_runner(model)
    new = NewRow(1, (5, 6, 7, 8), 4, (3,), -1, GREEDY)

    def step(step_id: int, new_rows: tuple[NewRow, ...], computed: int, samples: bool) -> Step:
        return Step(
            step_id=step_id,
            freed_rows=(),
            new_rows=new_rows,
            block_updates=(),
            rows_B=np.asarray([1], np.int32),
            num_computed_B=np.asarray([computed], np.int32),
            num_scheduled_B=np.asarray([2], np.int32),
            samples_B=np.asarray([samples]),
        )

    runner.launch(step(4, (new,), 0, samples=False))
    runner.launch(step(5, (), 2, samples=True))
    first, second = runner.collect(), runner.collect()

    assert (first.step_id, list(first.tokens)) == (4, [()])
    assert second.step_id == 5
    assert second.tokens[0][0] >= 0
    assert first.is_finite_B.all()
    assert second.is_finite_B.all()


def test_logprobs_are_keyed_by_the_place_in_the_batch(model: Decoder) -> None:
    asks = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)
    unfinished, silent, asking = driven([5, 6, 7]), driven([8, 9]), driven([8, 9], asks)

    StepDriver(new_runner(model)).step([(unfinished, 1), (silent, 2), (asking, 2)])

    assert silent.logprobs == []
    assert len(asking.logprobs) == 1
    assert asking.logprobs[0].top_ids[0] == asking.output[0] == silent.output[0]
    assert asking.logprobs[0].logprob == asking.logprobs[0].top_logprobs[0]


def test_a_row_is_forgotten_when_freed(model: Decoder) -> None:
    sampled = SamplingParams(max_tokens=9, seed=3)
    driver = StepDriver(new_runner(model))
    first = driven([5, 6, 7, 8, 9, 10, 11], sampled)
    driver.prefill(first, 7)
    driver.release(first)
    second = driven([12, 13], sampled)
    driver.prefill(second, 2)
    driver.decode([second], 3)

    fresh = driven([12, 13], sampled)
    other = StepDriver(new_runner(model))
    other.prefill(fresh, 2)
    other.decode([fresh], 3)

    assert second.output == fresh.output


def test_a_row_with_nan_keys_is_reported_and_the_runner_goes_on(model: Decoder) -> None:
    driver = StepDriver(new_runner(model))
    bad, good = driven([5, 6, 7]), driven([8, 9, 10])
    driver.step([(bad, 3), (good, 3)])
    driver.poison(bad)

    driver.decode([bad, good], 3)

    assert not bad.is_finite
    assert good.is_finite
    assert bad.output[1:] == [0, 0, 0]


def test_an_untouched_cache_costs_no_memory(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    tiny = load_decoder(write_tiny_model(tmp_path, TinyShape(num_layers=2)), torch.float32)
    limits = RunnerLimits(num_blocks=100_000, block_size=16, max_num_seqs=2, max_model_len=64)
    attention = TorchAttention(
        tiny.attention_shape, num_blocks=100_000, block_size=16, key_lengths=KeyLengths(())
    )
    before = psutil.Process().memory_info().rss

    runner = ModelRunner(tiny, attention, limits)

    reserved = sum(kv.numel() * kv.element_size() for kv in runner.kv_layers)
    assert reserved > 400_000_000
    assert psutil.Process().memory_info().rss - before < 20_000_000
