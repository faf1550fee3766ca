"""One step's tensors: from token ids and block tables to logits, eagerly or by replaying a recording.

Stands between the runner, which keeps rows in numpy and decides nothing, and the model, which knows no steps.
Used in two halves, so that all that a step tells the device goes up in one copy: `prepare` writes it down,
`run` computes once the caller has flushed the inputs.

With `DecodeGraphs`, steps that compute one token of each row and sample it go another way: padded to a bucket,
into outputs at fixed addresses, recorded where a recording was made. Replayed or not, they launch the same.

T tokens of the step, R sampled positions, U rows that do not sample, V vocabulary ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from loraplex_engine.attention.base import AttentionBackend, AttentionBatch
from loraplex_engine.device.graphs import DecodeGraphs, GraphKey
from loraplex_engine.device.inputs import Inputs, Int64Array
from loraplex_engine.lora.seam import CapturableLora, LoraBackend, LoraBatch
from loraplex_engine.model.decoder import Decoder
from loraplex_engine.step import Int32Array

_NO_SLOT = -1
_NOBODY = np.empty(0, np.int32)


class SlotTable(Protocol):
    """The adapter pool as the runner sees it."""

    @property
    def version(self) -> int:
        """Increases whenever the content of a slot changes."""
        ...


@dataclass(frozen=True, slots=True)
class PassWork:
    """What to compute; B sequences, their tokens one after the other."""

    token_T: Int64Array
    position_T: Int64Array
    slot_T: Int32Array  # adapter slot; -1: base
    num_computed_B: Int32Array
    num_scheduled_B: Int32Array
    num_prompt_B: Int32Array
    block_table_BM: Int32Array
    sampled_R: Int64Array  # which tokens are sampled
    unsampled_U: Int64Array  # the last tokens of sequences that are not

    @property
    def is_one_each(self) -> bool:
        """Whether every sequence has one token."""
        return len(self.token_T) == len(self.num_scheduled_B)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one token, and samples it."""
        return self.is_one_each and len(self.token_T) == len(self.sampled_R)

    @property
    def is_past_prompts(self) -> bool:
        """Whether every token was sampled, or guessed."""
        return bool((self.num_computed_B >= self.num_prompt_B).all())


class PassOutput(NamedTuple):
    """What came out, on the device; the next step may overwrite it."""

    logits_RV: Tensor | None  # model dtype; None: nothing is sampled
    is_finite_U: (
        Tensor | None
    )  # bool; whether the last hidden state is; None: every sequence samples


class _Prepared(NamedTuple):
    work: PassWork
    num_rows: int
    plan: Any
    lora_batch: LoraBatch | None
    head_batch: LoraBatch | None  # of the R rows; None: no adapter of theirs adapts the head
    token_T: Tensor
    position_T: Tensor
    token_R: Tensor | None
    token_U: Tensor | None
    key: GraphKey | None  # None: not a decoding step, or too large a one


class ForwardPass:
    """Computes steps, one at a time, in the calling thread; owns the KV cache.

    Args:
        graphs: None: there is no other way for decoding steps, as on a CPU.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend[Any, Any],
        num_blocks: int,
        inputs: Inputs,
        *,
        lora: LoraBackend | None = None,
        slots: SlotTable | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        assert (lora is None) == (slots is None), "a LoRA backend and its slots come together"
        assert graphs is None or lora is None or isinstance(lora, CapturableLora), (
            "decode graphs need a LoRA backend that can be recorded"
        )
        self.model = model
        self.attention = attention
        self.graphs = graphs
        self._inputs = inputs
        self._lora = lora
        self._slots = slots
        self._prepared: _Prepared | None = None
        # A layer's is the attention backend's own kind of object.
        self.kv_layers: list[Any] = []
        self.allocate_kv(num_blocks)
        if graphs is not None:
            max_rows, config, device = graphs.max_rows, model.config, model.device
            self._row_R = torch.arange(max_rows, device=device)
            self._x_RH = torch.zeros(max_rows, config.hidden_size, dtype=model.dtype, device=device)
            self._logits_RV = torch.zeros(
                max_rows, config.num_token_ids, dtype=model.dtype, device=device
            )

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the KV cache, in place of the one there is; recordings of that one are dropped."""
        if self.graphs is not None:
            self.graphs.forget()
        self.kv_layers.clear()
        self.kv_layers += [self.attention.allocate_kv(num_blocks) for _ in self.model.layers]

    def copy_blocks(self, copies: Int64Array) -> None:
        """Copy whole blocks in all layers; every source is read as it was.

        Args:
            copies: (N, 2), from and to.
        """
        source, target = torch.from_numpy(copies.T.copy()).to(self.model.device).unbind(0)
        for kv in self.kv_layers:
            self.attention.copy_blocks(kv, source, target)

    def prepare(self, work: PassWork) -> None:
        """Write down what the step takes; `Inputs.wait` comes before, `Inputs.flush` after."""
        num_tokens = len(work.token_T)
        bucket = None
        # The end of a prompt may come as one token, too; recordings do not have a prompt's routine.
        has_prompt = self.attention.splits_prompts and not work.is_past_prompts
        if self.graphs is not None and work.is_decode and not has_prompt:
            bucket = self.graphs.pad(num_tokens)
        num_rows = bucket or self.model.rows_for(num_tokens)
        plan = self.attention.prepare(
            AttentionBatch(
                work.num_computed_B,
                work.num_scheduled_B,
                work.block_table_BM,
                num_rows,
                work.num_prompt_B,
            )
        )
        lora_batch = self._prepare_lora(work.slot_T, num_rows)
        key = None if bucket is None else GraphKey(bucket, self._active_bucket(lora_batch))
        self._prepared = _Prepared(
            work,
            num_rows,
            plan,
            lora_batch,
            self._prepare_head(work, lora_batch, is_whole=key is not None),
            self._inputs.put("token_T", _padded(work.token_T, num_rows)),
            self._inputs.put("position_T", _padded(work.position_T, num_rows)),
            self._put_rows("token_R", work.sampled_R if key is None else _NO_ROWS),
            self._put_rows("token_U", work.unsampled_U),
            key,
        )

    def run(self) -> PassOutput:
        """Compute what was prepared; under `torch.inference_mode`."""
        step = self._prepared
        assert step is not None, "run without prepare"
        self._prepared = None
        if step.key is not None:
            return self._decode(step, step.key)
        if self.graphs is not None:
            self.graphs.eager_total += 1
        hidden_TH = self._forward(step)
        logits_RV = None
        if step.token_R is not None:
            logits_RV = self.model.logits(
                hidden_TH, step.token_R, lora=self._lora, lora_batch=step.head_batch
            )
        is_finite_U = None
        if step.token_U is not None:
            is_finite_U = torch.isfinite(hidden_TH.index_select(0, step.token_U)).all(dim=1)
        return PassOutput(logits_RV, is_finite_U)

    def capture(self, key: GraphKey) -> float:
        """Record decoding steps of `key`; returns the seconds it took. No request may be under way."""
        assert self.graphs is not None
        step = self._stand_in(key)
        with torch.inference_mode():
            return self.graphs.capture(key, lambda: self._run_decode(step))

    def run_stand_in(self, key: GraphKey) -> None:
        """Compute a decoding step of `key` without any sequence: nothing is written to the cache."""
        step = self._stand_in(key)
        with torch.inference_mode():
            self._run_decode(step)

    # ------------------------------------------------------------------ decoding by buckets

    def _decode(self, step: _Prepared, key: GraphKey) -> PassOutput:
        assert self.graphs is not None
        if not self.graphs.replay(key):
            self.graphs.eager_total += 1
            self._run_decode(step)
        if step.head_batch is not None:
            # Not in the recording: few adapters adapt the head, and this way their number of recordings
            # does not double.
            assert self._lora is not None
            self._lora.add_head(
                self._logits_RV[: step.num_rows], self._x_RH[: step.num_rows], step.head_batch
            )
        return PassOutput(self._logits_RV[: len(step.work.token_T)], None)

    def _run_decode(self, step: _Prepared) -> None:
        """What is recorded: reads and writes fixed addresses alone."""
        num_rows = step.num_rows
        hidden_TH = self._forward(step)
        x_RH = self.model.head_input(hidden_TH, self._row_R[:num_rows])
        self._x_RH[:num_rows].copy_(x_RH[:num_rows])
        # Copied, as what a recording allocates belongs to the next one too; it is a few per mille of
        # what the step reads.
        self._logits_RV[:num_rows].copy_(self.model.score(x_RH)[:num_rows])

    def _stand_in(self, key: GraphKey) -> _Prepared:
        """A step of padding rows alone, its metadata on the device."""
        num_rows = key.num_rows
        self._inputs.wait()
        no_table = np.empty((0, 1), np.int32)
        plan = self.attention.prepare(AttentionBatch(_NOBODY, _NOBODY, no_table, num_rows))
        lora_batch = None
        if key.num_adapters:
            assert isinstance(self._lora, CapturableLora)
            lora_batch = self._lora.capture_batch(num_rows, key.num_adapters)
        zeros = np.zeros(num_rows, np.int64)
        nobody = PassWork(
            token_T=_NO_ROWS,
            position_T=_NO_ROWS,
            slot_T=_NOBODY,
            num_computed_B=_NOBODY,
            num_scheduled_B=_NOBODY,
            num_prompt_B=_NOBODY,
            block_table_BM=no_table,
            sampled_R=_NO_ROWS,
            unsampled_U=_NO_ROWS,
        )
        step = _Prepared(
            nobody,
            num_rows,
            plan,
            lora_batch,
            None,
            self._inputs.put("token_T", zeros),
            self._inputs.put("position_T", zeros),
            None,
            None,
            key,
        )
        self._inputs.flush()
        return step

    # ------------------------------------------------------------------ parts

    def _forward(self, step: _Prepared) -> Tensor:
        return self.model.forward(
            step.token_T,
            step.position_T,
            kv_layers=self.kv_layers,
            attention=self.attention,
            plan=step.plan,
            lora=self._lora,
            lora_batch=step.lora_batch,
            phase="decode" if step.work.is_one_each else "prefill",
        )

    def _prepare_lora(self, slot_T: Int32Array, num_rows: int) -> LoraBatch | None:
        if self._lora is None or self._slots is None:
            return None
        padded_T = np.full(num_rows, _NO_SLOT, np.int32)
        padded_T[: len(slot_T)] = slot_T
        return self._lora.prepare(padded_T, self._slots.version)

    def _prepare_head(
        self, work: PassWork, lora_batch: LoraBatch | None, *, is_whole: bool
    ) -> LoraBatch | None:
        """The batch of the sampled rows, where an adapter adapts the head.

        Args:
            is_whole: the head runs on all rows of the step, as they are.
        """
        if self._lora is None or self._slots is None or lora_batch is None:
            return None
        if not len(work.sampled_R) or not self._lora.adapts_head(lora_batch):
            return None
        if is_whole:
            return lora_batch
        return self._lora.prepare(work.slot_T[work.sampled_R], self._slots.version, of_head=True)

    def _active_bucket(self, lora_batch: LoraBatch | None) -> int:
        if lora_batch is None:
            return 0
        assert isinstance(self._lora, CapturableLora)
        return self._lora.active_bucket(lora_batch)

    def _put_rows(self, name: Any, rows: Int64Array) -> Tensor | None:  # noqa: ANN401 -- InputName
        return self._inputs.put(name, rows) if len(rows) else None


_NO_ROWS = np.empty(0, np.int64)


def _padded(values: Int64Array, num_rows: int) -> Int64Array:
    padded = np.zeros(num_rows, np.int64)
    padded[: len(values)] = values
    return padded
