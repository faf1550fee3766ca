"""The Llama-family decoder: embed, N blocks of attention and gated MLP, final norm, lm_head.

Owns the arithmetic and nothing of batching: it sees T token rows with positions, an attention plan that
knows which sequences they belong to, and an optional LoRA batch. Everything runs in the model's dtype
with norms in fp32, in the order of operations of transformers' Llama.

The caller pads T to `rows_for(T)`, so that no row's bits depend on T (row rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loraplex_engine.attention.base import AttentionBackend, AttentionShape
from loraplex_engine.lora.seam import LoraBackend, LoraBatch
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.linear import ROW_MULTIPLE, Linear
from loraplex_engine.model.rope import RotaryTable

# Elementwise kernels work on vectors of at most this many numbers and finish the rest with scalar code
# whose exp differs in the last bit; torch hands a thread at least _GRAIN numbers.
_VECTOR = 32
_GRAIN = 32_768


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block's weights."""

    input_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


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
        linear_name: str,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.layers = layers
        self.lm_head = lm_head
        self.linear_name = linear_name
        self._embedding_VH = embedding_VH
        self._final_norm = final_norm
        self._rotary = rotary

    @property
    def attention_shape(self) -> AttentionShape:
        """What an attention backend must know."""
        config = self.config
        return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype)

    def rows_for(self, num_tokens: int) -> int:
        """The row count to pad `num_tokens` to."""
        return padded_rows(num_tokens, self.config.intermediate_size, torch.get_num_threads())

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
    ) -> Tensor:
        """Run all blocks; writes the step's keys and values.

        Args:
            token_T, position_T: int64, T = rows_for(number of tokens); padding may be any valid id.

        Returns:
            (T, hidden) before the final norm.
        """
        eps = self.config.rms_norm_eps
        cos, sin = self._rotary.gather(position_T)
        hidden = self._embedding_VH.index_select(0, token_T).to(self.dtype)
        if lora is not None and lora_batch is not None:
            lora.add_embedding(hidden, token_T, lora_batch)
        for index, layer in enumerate(self.layers):
            x = rms_norm(hidden, layer.input_norm, eps)
            qkv = layer.qkv(x)
            if lora is not None and lora_batch is not None:
                lora.add(qkv, x, index, "qkv", lora_batch)
            attention.rotate_and_write(qkv, cos, sin, kv_layers[index], plan)
            x = attention.forward(qkv, kv_layers[index], plan)
            y = layer.o(x)
            if lora is not None and lora_batch is not None:
                lora.add(y, x, index, "o", lora_batch)
            hidden += y

            x = rms_norm(hidden, layer.mlp_norm, eps)
            gate_up = layer.gate_up(x)
            if lora is not None and lora_batch is not None:
                lora.add(gate_up, x, index, "gate_up", lora_batch)
            x = gated(gate_up)
            y = layer.down(x)
            if lora is not None and lora_batch is not None:
                lora.add(y, x, index, "down", lora_batch)
            hidden += y
        return hidden

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
        missing = -num_rows % ROW_MULTIPLE
        if missing:
            row_R = torch.cat((row_R, row_R[-1:].expand(missing)))
        x = rms_norm(hidden_TH.index_select(0, row_R), self._final_norm, self.config.rms_norm_eps)
        logits_RV = self.lm_head(x)[:num_rows]
        if lora is not None and lora_batch is not None:
            lora.add_head(logits_RV, x[:num_rows], lora_batch)
        return logits_RV


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; in fp32 up to the multiplication by the weight."""
    x = x_TH.float()
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).to(x_TH.dtype).mul_(weight_H)


def gated(gate_up_TI: Tensor) -> Tensor:
    """silu(gate) * up for a merged (T, 2 * I) projection."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    width = gate.shape[1]
    missing = -width % _VECTOR
    if missing:
        gate = functional.pad(gate, (0, missing))
        return functional.silu(gate)[:, :width] * up
    return functional.silu(gate).mul_(up)


def padded_rows(num_tokens: int, width: int, num_threads: int) -> int:
    """Smallest multiple of ROW_MULTIPLE at which every thread's share of (rows, width) ends on a vector.

    A share that ends inside a vector is finished by scalar code, and which row that hits would depend
    on the number of rows.
    """
    rows = num_tokens + -num_tokens % ROW_MULTIPLE
    width += -width % _VECTOR
    while True:
        numbers = rows * width
        threads = min(num_threads, -(-numbers // _GRAIN))
        if threads <= 1 or -(-numbers // threads) % _VECTOR == 0:
            return rows
        rows += ROW_MULTIPLE
