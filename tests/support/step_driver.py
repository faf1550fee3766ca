"""Builds `Step`s by hand and runs them on a `ModelRunner`: chunks, blocks and batches as a test says.

It plays the scheduler without its decisions, so that a test controls exactly which tokens are computed
together and where their keys and values lie.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.runner import ModelRunner
from loraplex_engine.step import BlockUpdate, NewRow, Step, StepResult, UInt32Array

GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0)


@dataclass
class DrivenRequest:
    """A sequence in the runner."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams = GREEDY
    adapter_slot: int = -1
    row: int = -1
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_finite: bool = True

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def driven(
    prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, adapter_slot: int = -1
) -> DrivenRequest:
    return DrivenRequest(list(prompt), len(prompt), sampling, adapter_slot)


class StepDriver:
    """Hands out rows and blocks (in random order) and applies results."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self._runner = runner
        self._block_size = runner.limits.block_size
        self._free_rows = list(range(runner.limits.max_num_seqs))
        self._free_blocks = list(range(runner.limits.num_blocks))
        random.Random(seed).shuffle(self._free_blocks)
        self._freed_rows: list[int] = []
        self._step_id = 0

    @property
    def free_blocks(self) -> list[int]:
        return list(self._free_blocks)

    def release(self, request: DrivenRequest) -> None:
        """Take row and blocks away, as preemption and finishing do; it may be run again."""
        self._free_rows.append(request.row)
        self._freed_rows.append(request.row)
        self._free_blocks.extend(request.block_ids)
        request.row, request.num_computed, request.block_ids = -1, 0, []

    def step(
        self,
        work: Sequence[tuple[DrivenRequest, int]],
        *,
        drafts: Mapping[int, tuple[int, ...]] | None = None,
        token_masks: Mapping[int, UInt32Array] | None = None,
    ) -> StepResult:
        """Compute `count` tokens of each request in one step; sample where all are known then.

        Args:
            drafts: by index in `work`, computed on top of its `count`, which must reach the last token.
        """
        new_rows, updates = [], []
        drafts = drafts or {}
        num_drafts = [len(drafts.get(index, ())) for index in range(len(work))]
        for (request, count), extra in zip(work, num_drafts, strict=True):
            needed = -(-(request.num_computed + count + extra) // self._block_size)
            fresh = [self._free_blocks.pop() for _ in range(needed - len(request.block_ids))]
            first = len(request.block_ids)
            request.block_ids.extend(fresh)
            if request.row < 0:
                request.row = self._free_rows.pop(0)
                new_rows.append(
                    NewRow(
                        row=request.row,
                        token_ids=tuple(request.token_ids),
                        num_prompt_tokens=request.num_prompt_tokens,
                        block_ids=tuple(request.block_ids),
                        adapter_slot=request.adapter_slot,
                        sampling=request.sampling,
                    )
                )
            elif fresh:
                updates.append(BlockUpdate(request.row, first, tuple(fresh)))
        step = Step(
            step_id=self._step_id,
            freed_rows=tuple(self._freed_rows),
            new_rows=tuple(new_rows),
            block_updates=tuple(updates),
            rows_B=np.asarray([r.row for r, _ in work], np.int32),
            num_computed_B=np.asarray([r.num_computed for r, _ in work], np.int32),
            num_scheduled_B=np.asarray([count for _, count in work], np.int32)
            + np.asarray(num_drafts, np.int32),
            samples_B=np.asarray(
                [r.num_computed + count == len(r.token_ids) for r, count in work], np.bool_
            ),
            drafts=drafts,
            token_masks=token_masks or {},
        )
        self._step_id += 1
        self._freed_rows = []
        self._runner.launch(step)
        result = self._runner.collect()
        assert result.step_id == step.step_id
        for index, (request, count) in enumerate(work):
            request.num_computed += count
            request.is_finite &= bool(result.is_finite_B[index])
            if step.samples_B[index]:
                request.token_ids += result.tokens[index]
                if num_drafts[index]:
                    request.num_computed = len(request.token_ids) - 1
                if index in result.logprobs:
                    request.logprobs += result.logprobs[index]
            else:
                assert not result.tokens[index]
        return result

    def prefill(self, request: DrivenRequest, chunk: int) -> None:
        """Compute all known tokens, `chunk` at a time; ends with one sampled token."""
        target = len(request.token_ids)
        while request.num_computed < target:
            self.step([(request, min(chunk, target - request.num_computed))])

    def decode(self, requests: Sequence[DrivenRequest], num_steps: int) -> None:
        """One token per request and step."""
        for _ in range(num_steps):
            self.step([(request, 1) for request in requests])

    def kv_bytes(self, request: DrivenRequest) -> bytes:
        """The bits of every key and value the request has computed, in position order."""
        slots = self._slots(request)
        layers = [kv[slots] for kv in self._runner.kv_layers]
        return torch.stack(layers).view(torch.uint8).numpy().tobytes()

    def poison(self, request: DrivenRequest) -> None:
        """Overwrite what the request has computed with NaN."""
        slots = self._slots(request)
        for kv in self._runner.kv_layers:
            kv[slots] = float("nan")

    def _slots(self, request: DrivenRequest) -> torch.Tensor:
        position = torch.arange(request.num_computed)
        block = torch.tensor(request.block_ids)[position // self._block_size]
        return block * self._block_size + position % self._block_size
