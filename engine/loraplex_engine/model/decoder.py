"""The Llama-family decoder: embed, N blocks of attention and gated MLP, final norm, lm_head.

Owns the arithmetic and nothing of batching: it sees T token rows with positions, an attention plan that
knows which sequences they belong to, and an optional LoRA batch. Everything runs in the model's dtype
with norms in fp32, in the order of operations of transformers' Llama.

The caller pads T to `rows_for(T)`, so that no row's bits depend on T (row rule). What runs on which device
is the business of its parts: linears, `ModelOps`, attention and LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from loraplex_kernels.plans import Phase
from torch import Tensor

from loraplex_engine.attention.base import AttentionBackend, AttentionShape
from loraplex_engine.lora.seam import LoraBackend, LoraBatch
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.linear import Linear
from loraplex_engine.model.ops import ModelOps
from loraplex_engine.model.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block's weights."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LayerCall(Protocol):
    """Computes all layers at once, where it knows all of their parts."""

    @property
    def has_run(self) -> bool:
        """Whether any step was computed this way."""
        ...

    def forward(
        self,
        hidden_TH: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        *,
        layers: Sequence[DecoderLayer],
        kv_layers: Sequence[Any],
        attention: AttentionBackend[Any, Any],
        plan: Any,  # noqa: ANN401 -- made by `attention.prepare`
        lora: LoraBackend | None,
        lora_batch: LoraBatch | None,
    ) -> Tensor | None:
        """Run the layers on embedded tokens, in place, with the bits of the decoder's own loop.

        Returns:
            (T, hidden) what is still to be added, which the next call overwrites. None: it does not know one of
            these parts, and nothing was done.
        """
        ...


class Decoder:
    """A loaded model."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        embedding_VH: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
        rotary: RotaryTable,
        ops: ModelOps,
        linear_name: str,
        layer_call: LayerCall | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.layers = layers
        self.lm_head = lm_head
        self.ops = ops
        self.linear_name = linear_name
        self._embedding_VH = embedding_VH
        self._final_norm = final_norm
        self._rotary = rotary
        self._layer_call = layer_call

    @property
    def has_fused_layers(self) -> bool:
        """Whether a step's layers were computed in one call; see `LayerCall`."""
        return self._layer_call is not None and self._layer_call.has_run

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where every input must be."""
        return self._embedding_VH.device

    @property
    def attention_shape(self) -> AttentionShape:
        """What an attention backend must know."""
        config = self.config
        return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype)

    def rows_for(self, num_tokens: int) -> int:
        """The row count to pad `num_tokens` to."""
        return self.ops.rows_for(num_tokens, self.config.intermediate_size)

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        *,
        kv_layers: list[Any],
        attention: AttentionBackend[Any, Any],
        plan: Any,  # noqa: ANN401 -- made by `attention.prepare`, opaque here
        lora: LoraBackend | None,
        lora_batch: LoraBatch | None,
        phase: Phase = "prefill",
    ) -> Tensor:
        """Run all blocks; writes the step's keys and values.

        Args:
            token_T, position_T: int64, T = rows_for(number of tokens); padding may be any valid id.
            phase: decode where every sequence has one token, else prefill; picks launch plans on a GPU.

        Returns:
            (T, hidden) before the final norm.
        """
        cos, sin = self._rotary.gather(position_T)
        hidden = self._embedding_VH.index_select(0, token_T).to(self.dtype)
        if lora is not None and lora_batch is not None:
            lora.add_embedding(hidden, token_T, lora_batch)
        below = None  # what the last layer has yet to add
        if self._layer_call is not None:
            below = self._layer_call.forward(
                hidden,
                cos,
                sin,
                layers=self.layers,
                kv_layers=kv_layers,
                attention=attention,
                plan=plan,
                lora=lora,
                lora_batch=lora_batch,
            )
        if below is None:
            below = self._run_layers(
                hidden, cos, sin, kv_layers, attention, plan, lora, lora_batch, phase
            )
        if below is not None:
            hidden += below
        return hidden

    def _run_layers(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_layers: list[Any],
        attention: AttentionBackend[Any, Any],
        plan: Any,  # noqa: ANN401 -- see `forward`
        lora: LoraBackend | None,
        lora_batch: LoraBatch | None,
        phase: Phase,
    ) -> Tensor | None:
        """All layers, part by part; what the last one has yet to add."""
        ops, below, eps = self.ops, None, self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            if below is None:
                x = ops.rms_norm(hidden, layer.input_norm, eps)
            else:
                x = ops.add_rms_norm(hidden, below, layer.input_norm, eps)
            qkv = layer.qkv(x, phase)
            if lora is not None and lora_batch is not None:
                lora.add(qkv, x, index, "qkv", lora_batch)
            attention.rotate_and_write(qkv, cos, sin, kv_layers[index], plan)
            x = attention.forward(qkv, kv_layers[index], plan)
            y = layer.o(x, phase)
            if lora is not None and lora_batch is not None:
                lora.add(y, x, index, "o", lora_batch)

            x = ops.add_rms_norm(hidden, y, layer.mlp_norm, eps)
            gate_up = layer.gate_up(x, phase)
            if lora is not None and lora_batch is not None:
                lora.add(gate_up, x, index, "gate_up", lora_batch)
            x = ops.gated(gate_up, phase)
            below = layer.down(x, phase)
            if lora is not None and lora_batch is not None:
                lora.add(below, x, index, "down", lora_batch)
        return below

    def logits(
        self,
        hidden_TH: Tensor,
        row_R: Tensor,
        *,
        lora: LoraBackend | None = None,
        lora_batch: LoraBatch | None = None,
    ) -> Tensor:
        """Scores of the rows `row_R` only: (R, num_token_ids), model dtype.

        Args:
            lora_batch: of these R rows; None: none of them has an adapter on lm_head.
        """
        num_rows = row_R.numel()
        x_RH = self.head_input(hidden_TH, row_R)
        logits_RV = self.score(x_RH)[:num_rows]
        if lora is not None and lora_batch is not None:
            lora.add_head(logits_RV, x_RH[:num_rows], lora_batch)
        return logits_RV

    def head_input(self, hidden_TH: Tensor, row_R: Tensor) -> Tensor:
        """What the head reads of the rows `row_R`, the last one repeated up to the row multiple."""
        missing = self.ops.head_rows_for(row_R.numel()) - row_R.numel()
        if missing:
            row_R = torch.cat((row_R, row_R[-1:].expand(missing)))
        return self.ops.rms_norm_of(hidden_TH, row_R, self._final_norm, self.config.rms_norm_eps)

    def score(self, x_RH: Tensor) -> Tensor:
        """Scores of `head_input`'s rows, without adapters: (R, num_token_ids), model dtype."""
        # Few rows whatever the step, and so one plan: their bits do not depend on the step's phase.
        return self.lm_head(x_RH, "decode")
