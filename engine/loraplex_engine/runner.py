"""Runs steps: keeps the rows' tokens and block tables, computes, samples. Decides nothing.

`ModelRunner` is the `Executor` of a single process. Rows persist between steps in numpy arrays, so a step
costs array operations, not Python per request; the KV cache lives here, one of the attention backend's
objects per layer.

R rows that sample, T tokens of the step, both in the step's batch order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from loraplex_kernels.cpu.gumbel import GumbelSurvivors
from torch import Tensor

from loraplex_engine.attention.base import AttentionBackend, AttentionBatch
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.lora.seam import LoraBackend, LoraBatch
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import load_decoder, resolve_dtype
from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.sampling.edits import NEUTRAL, RowRules
from loraplex_engine.sampling.sampler import Sampled, SampleRow, sample
from loraplex_engine.step import BoolArray, NewRow, Step, StepResult, UInt32Array
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
        attention: AttentionBackend[Any, Any],
        limits: RunnerLimits,
        *,
        lora: LoraBackend | None = None,
        slots: SlotTable | None = None,
        survivors: GumbelSurvivors | None = None,
    ) -> None:
        assert (lora is None) == (slots is None), "a LoRA backend and its slots come together"
        self.model = model
        self.attention = attention
        self.limits = limits
        # Seconds that the last step spent computing, for metrics.
        self.last_step_s = 0.0
        self._lora = lora
        self._slots = slots
        self._survivors = survivors
        self._step_lora: LoraBatch | None = None  # of all rows of the step
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
        self.kv_layers = [attention.allocate_kv(limits.num_blocks) for _ in model.layers]

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
        if step.block_copies:
            self._copy_blocks(step.block_copies)
        for new in step.new_rows:
            self._fill(new)
        for update in step.block_updates:
            stop = update.first_index + len(update.block_ids)
            self._block_table[update.row, update.first_index : stop] = update.block_ids
        for index, ids in step.drafts.items():
            row = step.rows_B[index]
            known = self._num_known[row]
            self._token_ids[row, known : known + len(ids)] = ids

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers; every source is read as it was before the step."""
        source, target = torch.tensor(copies, dtype=torch.int64).t().contiguous().unbind(0)
        for kv in self.kv_layers:
            self.attention.copy_blocks(kv, source, target)

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
        self._step_lora = self._prepare_lora(rows[entry_T], num_rows)
        hidden_TH = self.model.forward(
            torch.from_numpy(token_T),
            torch.from_numpy(position_T),
            kv_layers=self.kv_layers,
            attention=self.attention,
            plan=plan,
            lora=self._lora,
            lora_batch=self._step_lora,
        )
        return self._sample(step, hidden_TH, start_B + scheduled - 1)

    def _prepare_lora(self, row_T: np.ndarray, num_rows: int) -> LoraBatch | None:
        if self._lora is None or self._slots is None:
            return None
        slot_T = np.full(num_rows, _NO_SLOT, np.int32)
        slot_T[: len(row_T)] = self._adapter_slot[row_T]
        return self._lora.prepare(slot_T, self._slots.version)

    def _logits(self, hidden_TH: Tensor, token_R: np.ndarray, row_R: np.ndarray) -> Tensor:
        """Scores after the step's tokens `token_R`, which are of the persistent rows `row_R`."""
        # A batch of its own: these are not the step's rows. Not built where no adapter adapts the head.
        batch, lora = None, self._lora
        if lora is not None and self._step_lora is not None and lora.adapts_head(self._step_lora):
            batch = self._prepare_lora(row_R, len(row_R))
        return self.model.logits(
            hidden_TH,
            torch.from_numpy(token_R.astype(np.int64)),
            lora=lora,
            lora_batch=batch,
        )

    def _sample(self, step: Step, hidden_TH: Tensor, last_B: np.ndarray) -> StepResult:
        """Sample E entries at their last known token and, where they have drafts, at each of those.

        Args:
            last_B: per entry of the step its last token, a row of `hidden_TH`.
        """
        tokens: list[tuple[int, ...]] = [()] * len(step.rows_B)
        is_finite_B = _are_finite(hidden_TH, last_B, step.samples_B)
        entry_E = np.flatnonzero(step.samples_B)
        if not len(entry_E):
            return StepResult(step.step_id, tokens, is_finite_B)
        row_E = step.rows_B[entry_E]
        count_B = np.ones(len(step.rows_B), np.int64)
        for index, ids in step.drafts.items():
            count_B[index] += len(ids)
        count_E = count_B[entry_E]
        first_E = np.cumsum(count_E) - count_E  # an entry's first among the sampled positions R
        # 0: after the last known token; j: after j drafts, as if they had been accepted.
        place_R = np.arange(count_E.sum()) - np.repeat(first_E, count_E)
        entry_R = np.repeat(entry_E, count_E)
        row_R = step.rows_B[entry_R]
        known_R = self._num_known[row_R] + place_R
        token_R = np.repeat(last_B[entry_E] + 1 - count_E, count_E) + place_R
        logits_RV = self._logits(hidden_TH, token_R, row_R)
        rows_R = [
            self._sample_row(row, known, None if masks is None else masks[place])
            for row, known, place, masks in zip(
                row_R.tolist(),
                known_R.tolist(),
                place_R.tolist(),
                map(step.token_masks.get, entry_R.tolist()),
                strict=True,
            )
        ]
        sampled = sample(logits_RV.float().numpy(), rows_R, self._survivors)

        # A draft stands where the token sampled in its place would be stored.
        is_met_R = self._token_ids[row_R, known_R] == sampled.token_ids_R
        is_met_R[first_E + count_E - 1] = False  # behind the last draft there is none
        kept_E = _count_kept(sampled, is_met_R, place_R, first_E, count_E)
        last_E = first_E + np.maximum(kept_E, 1) - 1
        self._token_ids[row_E, known_R[last_E]] = sampled.token_ids_R[last_E]
        self._num_known[row_E] += kept_E
        token_ids = sampled.token_ids_R.tolist()
        for entry, first, kept in zip(
            entry_E.tolist(), first_E.tolist(), kept_E.tolist(), strict=True
        ):
            tokens[entry] = tuple(token_ids[first : first + kept])
        is_finite_B[entry_E] = sampled.is_finite_R[first_E]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if sampled.logprobs:
            is_kept_R = place_R < np.repeat(kept_E, count_E)
            for index, value in sampled.logprobs.items():
                if is_kept_R[index]:
                    logprobs.setdefault(int(entry_R[index]), []).append(value)
        stuck = entry_E[sampled.is_stuck_R[first_E]].tolist()
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


def _count_kept(
    sampled: Sampled,
    is_met_R: np.ndarray,
    place_R: np.ndarray,
    first_E: np.ndarray,
    count_E: np.ndarray,
) -> np.ndarray:
    """How many tokens each entry gets: up to and with the first that is not its draft.

    A draft's position may hold no token (logits not finite, nothing allowed) that a plain step would
    come to next: the tokens before it are kept, and the next step meets it as its first position. Only
    there it ends the row, unless drafts came with it: their NaN may have reached it (SDPA), so the row
    gets nothing and is asked again without them.
    """
    has_token_R = sampled.is_finite_R & ~sampled.is_stuck_R
    goes_on_R = is_met_R & has_token_R
    kept_R = np.where(goes_on_R, len(place_R) + 1, place_R + has_token_R)
    kept_E = np.minimum.reduceat(kept_R, first_E)
    # A row that ends for want of a token is given one, so that its count goes on.
    ends_E = (count_E == 1) | sampled.is_stuck_R[first_E]
    return np.where(ends_E, np.maximum(kept_E, 1), kept_E)


def _are_finite(hidden_TH: Tensor, last_B: np.ndarray, samples_B: BoolArray) -> BoolArray:
    """Whether the last tokens of the rows that do not sample are; the others' logits will tell.

    What earlier tokens left in the KV cache reaches every later one, so the last one's state answers for
    a chunk of a prompt: only then may others find its blocks.
    """
    is_finite_B = np.ones(len(last_B), np.bool_)
    index_U = np.flatnonzero(~samples_B)
    if len(index_U):
        hidden_UH = hidden_TH[torch.from_numpy(last_B[index_U].astype(np.int64))]
        is_finite_B[index_U] = torch.isfinite(hidden_UH).all(dim=1).numpy()
    return is_finite_B


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
    attention: AttentionBackend[Any, Any] | None = None,
    lora: LoraBackend | None = None,
    slots: SlotTable | None = None,
    survivors: GumbelSurvivors | None = None,
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
    return ModelRunner(model, attention, limits, lora=lora, slots=slots, survivors=survivors)
