"""Runs steps: keeps the rows' tokens and block tables, computes, samples. Decides nothing.

`ModelRunner` is the `Executor` of a single process. Rows persist between steps in numpy arrays, so a step
costs array operations, not Python per request; tensors and the KV cache are `forward_pass.py`'s.

R rows that sample, T tokens of the step, both in the step's batch order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loraplex_kernels.cpu.gumbel import GumbelSurvivors
from loraplex_kernels.cpu.scan import RowScan

from loraplex_engine.attention.base import AttentionBackend
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.device.graphs import DecodeGraphs
from loraplex_engine.device.inputs import HostInputs, Inputs
from loraplex_engine.device.landing import Landing
from loraplex_engine.errors import ConfigError
from loraplex_engine.forward_pass import ForwardPass, PassWork, SlotTable
from loraplex_engine.lora.seam import LoraBackend
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.model.loading import load_decoder, resolve_dtype
from loraplex_engine.model.native_linear import open_linear_method, tell_quantization
from loraplex_engine.model.native_ops import open_ops_kernel
from loraplex_engine.protocol import SamplingParams, TokenLogprobs
from loraplex_engine.sampling.device import DeviceSampler, StepSampler
from loraplex_engine.sampling.edits import NEUTRAL, RowRules
from loraplex_engine.sampling.rows import SampleBatch, SampleRow, is_greedy, is_plain
from loraplex_engine.sampling.sampler import Sampled
from loraplex_engine.step import BoolArray, NewRow, Step, StepResult, UInt32Array
from loraplex_engine.threads import usable_cpus

_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes of the persistent arrays; blocks are 0 .. num_blocks - 1."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int


class ModelRunner:
    """Executes steps in the calling thread.

    Args:
        inputs: how a step's index arrays reach the device; None: they are on it, as on a CPU.
        graphs: see `ForwardPass`.
        on_device, survivors, scan: see `StepSampler`.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend[Any, Any],
        limits: RunnerLimits,
        *,
        lora: LoraBackend | None = None,
        slots: SlotTable | None = None,
        survivors: GumbelSurvivors | None = None,
        scan: RowScan | None = None,
        inputs: Inputs | None = None,
        graphs: DecodeGraphs | None = None,
        on_device: DeviceSampler | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.limits = limits
        self.graphs = graphs
        # Seconds that the last step spent computing, for metrics.
        self.last_step_s = 0.0
        self.inputs = inputs or HostInputs()
        self.forward_pass = ForwardPass(
            model, attention, limits.num_blocks, self.inputs, lora=lora, slots=slots, graphs=graphs
        )
        self._sampler = StepSampler(
            self.inputs,
            Landing(model.device),
            on_device=on_device,
            survivors=survivors,
            scan=scan,
        )
        self._results: deque[StepResult] = deque()
        rows, blocks = limits.max_num_seqs, -(-limits.max_model_len // limits.block_size)
        # One place more than the context: the last sampled token is stored though never computed.
        self._token_ids = np.zeros((rows, limits.max_model_len + 1), np.int64)
        self._num_known = np.zeros(rows, np.int64)
        self._num_prompt = np.zeros(rows, np.int32)
        self._block_table = np.zeros((rows, blocks), np.int32)
        self._adapter_slot = np.full(rows, _NO_SLOT, np.int32)
        self._params: list[SamplingParams | None] = [None] * rows
        # Of the parameters, for the sampler.
        self._rules = [NEUTRAL] * rows
        self._is_greedy = np.zeros(rows, np.bool_)
        self._is_plain = np.zeros(rows, np.bool_)
        self._serial = np.zeros(rows, np.int64)
        self._num_filled = 0
        # One that the model cannot sample is nothing to ban.
        size = model.config.num_token_ids
        self._eos_token_ids = tuple(i for i in model.config.eos_token_ids if 0 <= i < size)

    @property
    def kv_layers(self) -> list[Any]:
        """The KV cache, a layer's each the attention backend's own kind of object."""
        return self.forward_pass.kv_layers

    def resize(self, *, num_blocks: int, max_model_len: int) -> None:
        """Make the KV cache anew, before the first request.

        Args:
            max_model_len: no longer than that of `limits`.
        """
        assert max_model_len <= self.limits.max_model_len
        self.limits = replace(self.limits, num_blocks=num_blocks, max_model_len=max_model_len)
        self.forward_pass.allocate_kv(num_blocks)

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
            self.forward_pass.copy_blocks(np.asarray(step.block_copies, np.int64))
        for new in step.new_rows:
            self._fill(new)
        for update in step.block_updates:
            stop = update.first_index + len(update.block_ids)
            self._block_table[update.row, update.first_index : stop] = update.block_ids
        for index, ids in step.drafts.items():
            row = step.rows_B[index]
            known = self._num_known[row]
            self._token_ids[row, known : known + len(ids)] = ids

    def _fill(self, new: NewRow) -> None:
        count = len(new.token_ids)
        self._token_ids[new.row, :count] = new.token_ids
        self._num_known[new.row] = count
        self._num_prompt[new.row] = new.num_prompt_tokens
        self._block_table[new.row, : len(new.block_ids)] = new.block_ids
        self._adapter_slot[new.row] = new.adapter_slot
        self._params[new.row] = new.sampling
        rules = RowRules.of(new.sampling, self._eos_token_ids)
        self._rules[new.row] = rules
        self._is_greedy[new.row] = is_greedy(new.sampling)
        self._is_plain[new.row] = is_plain(new.sampling, rules)
        self._num_filled += 1
        self._serial[new.row] = self._num_filled

    # ------------------------------------------------------------------ one step

    def _run(self, step: Step) -> StepResult:
        rows, scheduled, computed = step.rows_B, step.num_scheduled_B, step.num_computed_B
        entry_T = np.repeat(np.arange(len(rows)), scheduled)
        start_B = np.cumsum(scheduled) - scheduled
        last_B = start_B + scheduled - 1
        position_T = np.arange(step.num_tokens) - (start_B - computed)[entry_T]
        row_T = rows[entry_T]
        places = _Places.of(step, last_B)
        known_R = self._num_known[places.row_R] + places.place_R
        rows_R = self._sample_rows(step, places, known_R)
        self.inputs.wait()
        self.forward_pass.prepare(
            PassWork(
                token_T=self._token_ids[row_T, position_T],
                position_T=position_T,
                slot_T=self._adapter_slot[row_T],
                num_computed_B=computed,
                num_scheduled_B=scheduled,
                num_prompt_B=self._num_prompt[rows],
                block_table_BM=self._block_table[rows],
                sampled_R=places.token_R,
                unsampled_U=last_B[~step.samples_B].astype(np.int64),
            )
        )
        self._sampler.prepare(rows_R)
        self.inputs.flush()
        out = self.forward_pass.run()
        sampled, is_finite_U = self._sampler.finish(out.logits_RV, out.is_finite_U)
        # What earlier tokens left in the KV cache reaches every later one, so the last one's state
        # answers for a chunk of a prompt: only then may others find its blocks. Where a row samples, its
        # logits answer.
        is_finite_B = np.ones(len(rows), np.bool_)
        if is_finite_U is not None:
            is_finite_B[~step.samples_B] = is_finite_U
        if sampled is None:
            return StepResult(step.step_id, [()] * len(rows), is_finite_B)
        is_finite_B[places.entry_E] = sampled.is_finite_R[places.first_E]
        return self._store(step, places, known_R, sampled, is_finite_B)

    def _sample_rows(self, step: Step, places: _Places, known_R: np.ndarray) -> SampleBatch:
        row_R = places.row_R
        is_plain_R = self._is_plain[row_R]
        if step.token_masks:
            is_plain_R &= ~np.isin(places.entry_R, list(step.token_masks))

        def row(index: int) -> SampleRow:
            masks = step.token_masks.get(int(places.entry_R[index]))
            mask = None if masks is None else masks[places.place_R[index]]
            return self._sample_row(int(row_R[index]), int(known_R[index]), mask)

        return SampleBatch(
            position_R=known_R - self._num_prompt[row_R],
            is_greedy_R=self._is_greedy[row_R],
            is_plain_R=is_plain_R,
            row=row,
            serial_R=self._serial[row_R],
        )

    def _store(
        self,
        step: Step,
        places: _Places,
        known_R: np.ndarray,
        sampled: Sampled,
        is_finite_B: BoolArray,
    ) -> StepResult:
        """Append what was sampled to its rows, up to the first that is not its draft."""
        if not step.drafts:
            return self._store_one_each(step, places, known_R, sampled, is_finite_B)
        row_R, first_E, count_E = places.row_R, places.first_E, places.count_E
        # A draft stands where the token sampled in its place would be stored.
        is_met_R = self._token_ids[row_R, known_R] == sampled.token_ids_R
        is_met_R[first_E + count_E - 1] = False  # behind the last draft there is none
        kept_E = _count_kept(sampled, is_met_R, places)
        last_E = first_E + np.maximum(kept_E, 1) - 1
        row_E = step.rows_B[places.entry_E]
        self._token_ids[row_E, known_R[last_E]] = sampled.token_ids_R[last_E]
        self._num_known[row_E] += kept_E
        token_ids = sampled.token_ids_R.tolist()
        tokens: list[tuple[int, ...]] = [()] * len(step.rows_B)
        for entry, first, kept in zip(
            places.entry_E.tolist(), first_E.tolist(), kept_E.tolist(), strict=True
        ):
            tokens[entry] = tuple(token_ids[first : first + kept])
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if sampled.logprobs:
            is_kept_R = places.place_R < np.repeat(kept_E, count_E)
            for index, value in sampled.logprobs.items():
                if is_kept_R[index]:
                    logprobs.setdefault(int(places.entry_R[index]), []).append(value)
        stuck = places.entry_E[sampled.is_stuck_R[first_E]].tolist()
        return StepResult(step.step_id, tokens, is_finite_B, logprobs, stuck)

    def _store_one_each(
        self,
        step: Step,
        places: _Places,
        known_R: np.ndarray,
        sampled: Sampled,
        is_finite_B: BoolArray,
    ) -> StepResult:
        """As `_store`, of rows without drafts: each that samples gets a token, whatever it is worth."""
        self._token_ids[places.row_R, known_R] = sampled.token_ids_R
        self._num_known[places.row_R] += 1
        one_each: list[tuple[int, ...]] = list(zip(sampled.token_ids_R.tolist(), strict=True))
        tokens = one_each
        entries = places.entry_E
        if len(entries) < len(step.rows_B):
            tokens = [()] * len(step.rows_B)
            for entry, token in zip(entries.tolist(), one_each, strict=True):
                tokens[entry] = token
        logprobs = {int(entries[index]): [value] for index, value in sampled.logprobs.items()}
        return StepResult(
            step.step_id, tokens, is_finite_B, logprobs, entries[sampled.is_stuck_R].tolist()
        )

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


@dataclass(frozen=True, slots=True)
class _Places:
    """The R positions that a step samples: of E entries, the last known token and each draft."""

    entry_E: np.ndarray  # batch indexes
    count_E: np.ndarray  # positions of each
    first_E: np.ndarray  # its first among the R
    entry_R: np.ndarray
    row_R: np.ndarray
    place_R: (
        np.ndarray
    )  # 0: after the last known token; j: after j drafts, as if they were accepted
    token_R: np.ndarray  # which of the step's tokens; int64

    @classmethod
    def of(cls, step: Step, last_B: np.ndarray) -> _Places:
        """`last_B`: per entry of the step its last token."""
        entry_E = np.flatnonzero(step.samples_B)
        if not step.drafts:
            ones, order = np.ones(len(entry_E), np.int64), np.arange(len(entry_E))
            token_R = last_B[entry_E].astype(np.int64)
            row_R = step.rows_B[entry_E]
            return cls(entry_E, ones, order, entry_E, row_R, np.zeros_like(order), token_R)
        count_B = np.ones(len(step.rows_B), np.int64)
        for index, ids in step.drafts.items():
            count_B[index] += len(ids)
        count_E = count_B[entry_E]
        first_E = np.cumsum(count_E) - count_E
        place_R = np.arange(count_E.sum()) - np.repeat(first_E, count_E)
        entry_R = np.repeat(entry_E, count_E)
        token_R = np.repeat(last_B[entry_E] + 1 - count_E, count_E) + place_R
        return cls(
            entry_E,
            count_E,
            first_E,
            entry_R,
            step.rows_B[entry_R],
            place_R,
            token_R.astype(np.int64),
        )


def _count_kept(sampled: Sampled, is_met_R: np.ndarray, places: _Places) -> np.ndarray:
    """How many tokens each entry gets: up to and with the first that is not its draft.

    A draft's position may hold no token (logits not finite, nothing allowed) that a plain step would
    come to next: the tokens before it are kept, and the next step meets it as its first position. Only
    there it ends the row, unless drafts came with it: their NaN may have reached it (SDPA), so the row
    gets nothing and is asked again without them.
    """
    has_token_R = sampled.is_finite_R & ~sampled.is_stuck_R
    goes_on_R = is_met_R & has_token_R
    place_R, first_E = places.place_R, places.first_E
    kept_R = np.where(goes_on_R, len(place_R) + 1, place_R + has_token_R)
    kept_E = np.minimum.reduceat(kept_R, first_E)
    # A row that ends for want of a token is given one, so that its count goes on.
    ends_E = (places.count_E == 1) | sampled.is_stuck_R[first_E]
    return np.where(ends_E, np.maximum(kept_E, 1), kept_E)


def load_model(config: EngineConfig, *, cache: Path | None = None) -> tuple[Decoder, EngineSizes]:
    """Load the model of `config` and derive the sizes that follow from it; sets torch's threads.

    Args:
        cache: folder for compiled kernels; None: there are none, all is torch.

    Raises:
        ModelError, ConfigError: the folder or a setting is wrong.
        NativeBuildError: kernels that a setting asks for cannot be had here.
    """
    torch.set_num_threads(config.num_threads or usable_cpus())
    dtype = resolve_dtype(config.dtype)
    ops = None
    if cache is not None:
        ops = open_ops_kernel(
            dtype,
            cache_dir=cache,
            num_threads=torch.get_num_threads(),
            backend=config.ops_backend,
        )
    elif config.ops_backend == "native":
        raise ConfigError(
            "ops_backend is 'native', which needs a folder for what is compiled: use auto"
        )
    method = open_linear_method(
        dtype,
        cache_dir=cache,
        num_threads=torch.get_num_threads(),
        backend=config.linear_backend,
        quantization=config.quantization,
    )
    model = load_decoder(config.model_dir, dtype, method=method, ops=ops)
    tell_quantization(method)
    shape = model.config
    sizes = config.sizes(
        # A CPU's backends keep keys and values in the model's dtype.
        block_bytes=config.block_size
        * model.attention_shape.kv_bytes_per_token()
        * shape.num_layers,
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
    scan: RowScan | None = None,
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
    return ModelRunner(
        model, attention, limits, lora=lora, slots=slots, survivors=survivors, scan=scan
    )
