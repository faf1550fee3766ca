"""Runs steps: keeps the rows' tokens and block tables, computes, samples. Decides nothing.

`ModelRunner` is the `Executor` of a single process. Rows persist between steps in numpy arrays, so a step
costs array operations, not Python per request; the KV cache lives here, one tensor per layer.

R rows that sample, T tokens of the step, both in the step's batch order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from loraplex_engine.attention.base import AttentionBackend, AttentionBatch
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.lora.seam import LoraBackend, LoraBatch
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import load_decoder, resolve_dtype
from loraplex_engine.protocol import SamplingParams
from loraplex_engine.sampling.edits import NEUTRAL, RowRules
from loraplex_engine.sampling.sampler import SampleRow, sample
from loraplex_engine.step import NewRow, Step, StepResult, UInt32Array
from loraplex_engine.threads import usable_cpus

_NO_SLOT = -1


class SlotTable(Protocol):
    """The adapter pool as the runner sees it."""

    @property
    def version(self) -> int:
        """Increases whenever the content of a slot changes."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes of the persistent arrays; blocks are 0 .. num_blocks - 1."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int


class ModelRunner:
    """Executes steps in the calling thread."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend[Any],
        limits: RunnerLimits,
        *,
        lora: LoraBackend | None = None,
        slots: SlotTable | None = None,
    ) -> None:
        assert (lora is None) == (slots is None), "a LoRA backend and its slots come together"
        self.model = model
        self.attention = attention
        self.limits = limits
        # Seconds that the last step spent computing, for metrics.
        self.last_step_s = 0.0
        self._lora = lora
        self._slots = slots
        self._results: deque[StepResult] = deque()
        rows, blocks = limits.max_num_seqs, -(-limits.max_model_len // limits.block_size)
        # One place more than the context: the last sampled token is stored though never computed.
        self._token_ids = np.zeros((rows, limits.max_model_len + 1), np.int64)
        self._num_known = np.zeros(rows, np.int64)
        self._num_prompt = np.zeros(rows, np.int64)
        self._block_table = np.zeros((rows, blocks), np.int32)
        self._adapter_slot = np.full(rows, _NO_SLOT, np.int32)
        self._params: list[SamplingParams | None] = [None] * rows
        self._rules = [NEUTRAL] * rows  # of the parameters, for the sampler
        # One that the model cannot sample is nothing to ban.
        size = model.config.num_token_ids
        self._eos_token_ids = tuple(i for i in model.config.eos_token_ids if 0 <= i < size)
        shape = attention.kv_shape(limits.num_blocks)
        # Not zeroed: pages that no block has used yet take no memory.
        self.kv_layers = [torch.empty(shape, dtype=model.dtype) for _ in model.layers]
        for kv in self.kv_layers:
            attention.reset_kv(kv)

    def launch(self, step: Step) -> None:
        """Compute `step` now; `collect` hands out the result."""
        started = time.perf_counter()
        self._apply(step)
        with torch.inference_mode():
            result = self._run(step)
        self.last_step_s = time.perf_counter() - started
        self._results.append(result)

    def collect(self) -> StepResult:
        return self._results.popleft()

    # ------------------------------------------------------------------ persistent rows

    def _apply(self, step: Step) -> None:
        for row in step.freed_rows:
            self._params[row] = None
            self._rules[row] = NEUTRAL
            self._num_known[row] = 0
            self._adapter_slot[row] = _NO_SLOT
        for new in step.new_rows:
            self._fill(new)
        for update in step.block_updates:
            stop = update.first_index + len(update.block_ids)
            self._block_table[update.row, update.first_index : stop] = update.block_ids

    def _fill(self, new: NewRow) -> None:
        count = len(new.token_ids)
        self._token_ids[new.row, :count] = new.token_ids
        self._num_known[new.row] = count
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._block_table[new.row, : len(new.block_ids)] = new.block_ids
        self._adapter_slot[new.row] = new.adapter_slot
        self._params[new.row] = new.sampling
        self._rules[new.row] = RowRules.of(new.sampling, self._eos_token_ids)

    # ------------------------------------------------------------------ one step

    def _run(self, step: Step) -> StepResult:
        rows, scheduled, computed = step.rows_B, step.num_scheduled_B, step.num_computed_B
        num_tokens = step.num_tokens
        num_rows = self.model.rows_for(num_tokens)
        entry_T = np.repeat(np.arange(len(rows)), scheduled)
        start_B = np.cumsum(scheduled) - scheduled
        position_T = np.zeros(num_rows, np.int64)
        position_T[:num_tokens] = np.arange(num_tokens) - (start_B - computed)[entry_T]
        token_T = np.zeros(num_rows, np.int64)
        token_T[:num_tokens] = self._token_ids[rows[entry_T], position_T[:num_tokens]]
        plan = self.attention.prepare(
            AttentionBatch(computed, scheduled, self._block_table[rows], num_rows)
        )
        hidden_TH = self.model.forward(
            torch.from_numpy(token_T),
            torch.from_numpy(position_T),
            kv_layers=self.kv_layers,
            attention=self.attention,
            plan=plan,
            lora=self._lora,
            lora_batch=self._prepare_lora(rows[entry_T], num_rows),
        )
        return self._sample(step, hidden_TH, (start_B + scheduled - 1)[step.samples_B])

    def _prepare_lora(self, row_T: np.ndarray, num_rows: int) -> LoraBatch | None:
        if self._lora is None or self._slots is None:
            return None
        slot_T = np.full(num_rows, _NO_SLOT, np.int32)
        slot_T[: len(row_T)] = self._adapter_slot[row_T]
        return self._lora.prepare(slot_T, self._slots.version)

    def _sample(self, step: Step, hidden_TH: Tensor, last_R: np.ndarray) -> StepResult:
        tokens: list[tuple[int, ...]] = [()] * len(step.rows_B)
        is_finite_B = np.ones(len(step.rows_B), np.bool_)
        entry_R = np.flatnonzero(step.samples_B)
        if not len(entry_R):
            return StepResult(step.step_id, tokens, is_finite_B)
        row_R = step.rows_B[entry_R]
        logits_RV = self.model.logits(hidden_TH, torch.from_numpy(last_R.astype(np.int64)))
        rows_R = []
        for entry, row in zip(entry_R.tolist(), row_R.tolist(), strict=True):
            mask = step.token_masks.get(entry)
            rows_R.append(
                self._sample_row(row, int(self._num_known[row]), None if mask is None else mask[0])
            )
        sampled = sample(logits_RV.float().numpy(), rows_R)
        known_R = self._num_known[row_R]
        self._token_ids[row_R, known_R] = sampled.token_ids_R
        self._num_known[row_R] = known_R + 1
        for entry, token_id in zip(entry_R.tolist(), sampled.token_ids_R.tolist(), strict=True):
            tokens[entry] = (token_id,)
        is_finite_B[entry_R] = sampled.is_finite_R
        logprobs = {int(entry_R[index]): (value,) for index, value in sampled.logprobs.items()}
        stuck = entry_R[sampled.is_stuck_R].tolist()
        return StepResult(step.step_id, tokens, is_finite_B, logprobs, stuck)

    def _sample_row(self, row: int, num_known: int, mask: UInt32Array | None) -> SampleRow:
        """The position after the first `num_known` tokens of a row; its history is a view."""
        params = self._params[row]
        assert params is not None, f"row {row} samples but holds no request"
        num_prompt = int(self._num_prompt[row])
        return SampleRow(
            params=params,
            position=num_known - num_prompt,
            token_ids=self._token_ids[row, :num_known],
            num_prompt_tokens=num_prompt,
            mask=mask,
            rules=self._rules[row],
        )


def load_model(config: EngineConfig) -> tuple[Decoder, EngineSizes]:
    """Load the model of `config` and derive the sizes that follow from it; sets torch's threads.

    Raises:
        ModelError, ConfigError: the folder or a setting is wrong.
    """
    torch.set_num_threads(config.num_threads or usable_cpus())
    dtype = resolve_dtype(config.dtype)
    model = load_decoder(config.model_dir, dtype)
    shape = model.config
    sizes = config.sizes(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=dtype.itemsize,
        max_position_embeddings=shape.max_position,
    )
    return model, sizes


def build_runner(
    config: EngineConfig,
    model: Decoder,
    sizes: EngineSizes,
    *,
    attention: AttentionBackend[Any] | None = None,
    lora: LoraBackend | None = None,
    slots: SlotTable | None = None,
) -> ModelRunner:
    """A runner with a KV cache of `sizes`.

    Args:
        attention: see `attention.setup.open_attention`; None: plain torch.
    """
    limits = RunnerLimits(
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=sizes.max_model_len,
    )
    if attention is None:
        attention = TorchAttention(
            model.attention_shape, num_blocks=limits.num_blocks, block_size=limits.block_size
        )
    return ModelRunner(model, attention, limits, lora=lora, slots=slots)
