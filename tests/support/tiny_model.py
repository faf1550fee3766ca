"""Small random Llama-family folders, written by transformers itself so that it is the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Defaults: grouped queries, widths that are no multiples of 32, tied embeddings."""

    kind: str = "llama"
    vocab_size: int = 131
    hidden_size: int = 48
    intermediate_size: int = 100
    num_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 8
    max_position: int = 1024
    is_tied: bool = True
    has_bias: bool = False
    rope_theta: float = 10_000.0
    dtype: torch.dtype = torch.float32
    seed: int = 0


def write_tiny_model(
    folder: Path, shape: TinyShape | None = None, *, max_shard_size: str = "5GB"
) -> Path:
    """Write a random model of `shape` into `folder` and return it."""
    shape = shape or TinyShape()
    config_type, model_type = _KINDS[shape.kind]
    fields = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.is_tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        # Large enough that the logits of random weights are far from uniform.
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if shape.kind == "llama":
        fields |= {"attention_bias": shape.has_bias, "mlp_bias": shape.has_bias}
    if shape.kind == "mistral":
        fields |= {"sliding_window": None}
    torch.manual_seed(shape.seed)
    model = model_type(config_type(**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, where a mistake would not show.
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(shape.dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_oracle(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The same folder in transformers, in `dtype`."""
    config = json.loads((folder / "config.json").read_text())
    model_type = {kind.__name__: kind for _, kind in _KINDS.values()}[config["architectures"][0]]
    model = model_type.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()
