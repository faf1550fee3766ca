"""Part `parity`: the engine on its kernels beside plain torch in fp32; graphs beside eager; rows beside rows alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.linear import PlainMethod
from loraplex_engine.model.loading import build_decoder
from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.runner import ModelRunner, RunnerLimits
from loraplex_kernels.plans import Column, open_plans
from torch import Tensor

from bench.gpu_check.adapters import PlainLora, SlotPool, random_adapter
from bench.gpu_check.figures import Recorder
from bench.gpu_check.machine import Machine
from bench.gpu_check.sizes import RandomWeights, Sizes, shape_of
from bench.gpu_check.stand import BLOCK_SIZE, GREEDY, Room, Rows, Stand, blocks_for

# What a log-probability may differ by: fp32 sums in another order; bf16 rounds at every layer.
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.3}
_CPU = torch.device("cpu")
# Log-probabilities are computed on the host: logits come down as they are and show every bit.
_WATCHED: SamplingParams = msgspec.structs.replace(GREEDY, logprobs=5)
# Of a row, step by step: the token and its log-probability, with the most likely ones.
_Trace = list[tuple[int, TokenLogprobs]]


def run(machine: Machine, sizes: Sizes, record: Recorder) -> None:
    """Tiny and SmolLM2-shaped models, base rows and rows with adapters in one batch."""
    for name, (config, dtype) in sizes.parity_models.items():
        case = _Case(machine, sizes, config, dtype)
        label = f"{name} {str(dtype).removeprefix('torch.')}"
        case.compare_with_torch(record, label)
        case.compare_graphs(record, label)
        case.compare_alone(record, label)


class _Case:
    """One model in one dtype; its weights are the same wherever it runs."""

    def __init__(
        self, machine: Machine, sizes: Sizes, config: ModelConfig, dtype: torch.dtype
    ) -> None:
        self._machine = machine
        self._steps = sizes.parity_steps
        self._config = config
        self._dtype = dtype
        rng = np.random.default_rng(1)
        lengths = (3, 5) if machine.is_rehearsal else (5, 16, 33, 100)
        self._prompts = [rng.integers(3, config.vocab_size, n).tolist() for n in lengths]
        self._slots = [-1, 0] if machine.is_rehearsal else [-1, 0, 1, 0]
        self._everyone = range(len(lengths))
        self._room = Room(
            max_rows=4,
            max_tokens=256,
            max_len=256,
            num_blocks=blocks_for(4, 160),
            num_slots=2,
            max_rank=16,
        )
        # Three, for two slots: the last one comes when the others are at work.
        self._adapters = [
            random_adapter(shape_of(config), rank, dtype, pin=not machine.is_rehearsal, seed=rank)
            for rank in (8, 16, 12)
        ]

    def compare_with_torch(self, record: Recorder, label: str) -> None:
        """The engine's fast column beside plain torch in fp32 on the CPU."""
        expected = self._run(self._reference(), self._everyone)
        got = self._run(self._stand("fast"), self._everyone)
        worst, num_same, count = 0.0, 0, 0
        for got_row, expected_row in zip(got, expected, strict=True):
            for (token, logprobs), (right, right_logprobs) in zip(
                got_row, expected_row, strict=True
            ):
                count += 1
                # The most likely ids of both, wherever they stand; behind the first other token the texts differ.
                worst = max(worst, _distance(logprobs, right_logprobs))
                if token != right:
                    break
                num_same += 1
        tolerance = _TOLERANCES[self._dtype]
        record.add(f"{label}: log-probability off by", worst, "nat", at_most=tolerance)
        record.add(f"{label}: tokens as in torch", num_same, f"of {count}")

    def compare_graphs(self, record: Recorder, label: str) -> None:
        """Replayed decoding beside eager decoding, with an adapter swapped on the way, bit for bit."""
        stand = self._stand("fast")
        eager = self._run(stand, self._everyone, swaps=True)
        assert stand.graphs.replays_total == 0
        for num_adapters in (0, 1, 2):
            stand.capture(len(self._prompts), num_adapters)
        self._fill(stand.pool)
        replayed = self._run(stand, self._everyone, swaps=True)
        record.add(f"{label}: graph replays", stand.graphs.replays_total, "", at_least=self._steps)
        num_different = sum(a != b for a, b in zip(eager, replayed, strict=True))
        record.add(f"{label}: rows unlike eager", num_different, "", at_most=0)

    def compare_alone(self, record: Recorder, label: str) -> None:
        """Each row alone beside all together under `invariant`, bit for bit."""
        stand = self._stand("invariant")
        together = self._run(stand, self._everyone)
        alone = [self._run(stand, [row])[0] for row in self._everyone]
        num_different = sum(a != b for a, b in zip(together, alone, strict=True))
        record.add(f"{label}: invariant rows unlike alone", num_different, "", at_most=0)

    def _run(
        self, where: _Reference | Stand, which: Sequence[int], *, swaps: bool = False
    ) -> list[_Trace]:
        """A prefill and decoding steps; traces by row."""
        rows = Rows(
            where.runner,
            [self._prompts[row] for row in which],
            [self._slots[row] for row in which],
            num_new=self._steps + 1,
            sampling=_WATCHED,
        )
        for step in range(self._steps + 1):
            if swaps and step == self._steps // 2 + 1:
                where.pool.put(0, self._adapters[2])
            rows.step()
        return [
            [(result.tokens[place][0], result.logprobs[place][0]) for result in rows.results]
            for place in range(len(which))
        ]

    def _fill(self, pool: SlotPool) -> None:
        for slot in range(2):
            pool.put(slot, self._adapters[slot])

    def _stand(self, column: Column) -> Stand:
        plans = open_plans(self._machine.support.name, column)
        model = build_decoder(
            self._config,
            self._dtype,
            self._weights(self._dtype),
            device=self._machine.device,
            plans=plans,
        )
        stand = Stand(self._machine, model, column, self._room)
        self._fill(stand.pool)
        return stand

    def _reference(self) -> _Reference:
        model = build_decoder(
            self._config,
            torch.float32,
            self._weights(torch.float32),
            method=PlainMethod(),
        )
        pool = SlotPool()
        self._fill(pool)
        return _Reference(model, pool, self._config, self._room)

    def _weights(self, dtype: torch.dtype) -> _Widened:
        # Rounded as the model under test is, then widened where the reference is wider.
        drawn = RandomWeights(_CPU, self._dtype, has_head=not self._config.is_tied)
        return _Widened(drawn, dtype)


class _Reference:
    """A runner in plain torch, fp32, on the CPU."""

    def __init__(self, model: Decoder, pool: SlotPool, config: ModelConfig, room: Room) -> None:
        self.pool = pool
        self.runner = ModelRunner(
            model,
            TorchAttention(
                model.attention_shape, num_blocks=room.num_blocks, block_size=BLOCK_SIZE
            ),
            RunnerLimits(room.num_blocks, BLOCK_SIZE, room.max_rows, room.max_len),
            lora=PlainLora(pool, shape_of(config)),
            slots=pool,
        )


class _Widened:
    """Weights in another dtype."""

    def __init__(self, weights: RandomWeights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `WeightSource`."""
        return self._weights.take(name, shape).to(self._dtype)

    def check_all_taken(self) -> None:
        """See `WeightSource`."""


def _distance(one: TokenLogprobs, other: TokenLogprobs) -> float:
    """Largest difference over the ids that both name; infinite if there are none."""
    ones = dict(zip(one.top_ids, one.top_logprobs, strict=True))
    others = dict(zip(other.top_ids, other.top_logprobs, strict=True))
    shared = ones.keys() & others.keys()
    if not shared:
        return float("inf")
    return max(abs(ones[token] - others[token]) for token in shared)
