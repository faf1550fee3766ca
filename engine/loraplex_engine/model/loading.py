"""Builds a `Decoder` from a Hugging Face folder, one merged weight at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from loraplex_engine.errors import ModelError
from loraplex_engine.model.config import ModelConfig
from loraplex_engine.model.decoder import Decoder, DecoderLayer
from loraplex_engine.model.linear import Linear, LinearMethod, choose_method, has_fast_bf16
from loraplex_engine.model.rope import RotaryTable
from loraplex_engine.model.weights import WeightReader, open_weights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(name: str) -> torch.dtype:
    """`auto` is bf16 where the CPU computes it fast, else fp32 (which is then the faster one)."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16() else torch.float32
    return _DTYPES[name]


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    *,
    max_position: int | None = None,
    method: LinearMethod | None = None,
) -> Decoder:
    """Read, merge and pack the weights of `folder`.

    Args:
        max_position: longest sequence that will be run; None: what the model allows.
        method: how linears are stored; None: the fastest for this CPU.

    Raises:
        ModelError: the folder is not a complete model of a supported kind.
    """
    config = ModelConfig.from_folder(folder)
    method = method or choose_method(dtype)
    with torch.inference_mode(), open_weights(folder) as reader:
        builder = _Builder(config, dtype, method, reader)
        embedding = reader.take(
            "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        )
        lm_head = builder.lm_head(embedding)
        layers = [builder.layer(index) for index in range(config.num_layers)]
        final_norm = reader.take("model.norm.weight", (config.hidden_size,)).to(dtype)
        reader.check_all_taken()
        return Decoder(
            config,
            dtype,
            # Kept in the checkpoint's dtype (copied out of the mapped file): looking up a row and then
            # widening it is exact, and half the memory when bf16 runs as fp32.
            embedding_VH=_narrower(embedding, dtype).clone(),
            layers=layers,
            final_norm=final_norm.clone(),
            lm_head=lm_head,
            rotary=RotaryTable(
                config.head_dim, max_position or config.max_position, config.rope_theta, dtype
            ),
            linear_name=method.name,
        )


class _Builder:
    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, method: LinearMethod, reader: WeightReader
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._method = method
        self._reader = reader

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            qkv=self._merged(attention, qkv, hidden, has_bias=config.has_qkv_bias),
            o=self._merged(
                attention, [("o_proj", hidden)], config.q_size, has_bias=config.has_o_bias
            ),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self._merged(
                mlp,
                [("gate_proj", inner), ("up_proj", inner)],
                hidden,
                has_bias=config.has_mlp_bias,
            ),
            down=self._merged(mlp, [("down_proj", hidden)], inner, has_bias=config.has_mlp_bias),
        )

    def lm_head(self, embedding: Tensor) -> Linear:
        """Only rows of ids the tokenizer knows: padding ids can never be sampled."""
        config, name = self._config, "lm_head.weight"
        weight = embedding
        if name in self._reader or not config.is_tied:
            weight = self._reader.take(name, (config.vocab_size, config.hidden_size))
            if config.is_tied and not torch.equal(weight, embedding):
                raise ModelError(
                    "tie_word_embeddings is true but lm_head.weight differs from the embedding"
                )
        return self._method.pack(weight[: config.num_token_ids].to(self._dtype), None)

    def _norm(self, name: str) -> Tensor:
        weight = self._reader.take(f"{name}.weight", (self._config.hidden_size,))
        return weight.to(self._dtype, copy=True)

    def _merged(
        self, prefix: str, parts: list[tuple[str, int]], num_inputs: int, *, has_bias: bool
    ) -> Linear:
        take = self._reader.take
        weight = torch.cat(
            [take(f"{prefix}.{name}.weight", (size, num_inputs)) for name, size in parts]
        ).to(self._dtype)
        bias = None
        if has_bias:
            bias = torch.cat([take(f"{prefix}.{name}.bias", (size,)) for name, size in parts])
            bias = bias.to(self._dtype)
        return self._method.pack(weight, bias)


def _narrower(embedding: Tensor, dtype: torch.dtype) -> Tensor:
    is_exact_later = dtype == torch.float32
    return embedding if is_exact_later else embedding.to(dtype)
