"""What a Hugging Face folder says about its model, checked: the shape of a Llama-family decoder.

Reads `config.json` (and `generation_config.json` for the stop ids) and nothing else; no torch.
Anything this decoder would compute differently from the checkpoint's authors is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex_engine.errors import ModelError

# Architecture -> whether q, k, v carry a bias although the configuration has no field for it.
_QKV_BIAS_BY_ARCHITECTURE: dict[str, bool] = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": True,
}
_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers the decoder is built from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    is_tied: bool  # lm_head shares the embedding's weight
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...]
    num_token_ids: int  # ids the tokenizer knows; lm_head rows from here on are padding

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads; the value heads are as wide."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read a model folder.

        Raises:
            ModelError: a file is missing or malformed, or a field is unsupported; names the field.
        """
        values = _read_json(folder / "config.json")
        if values is None:
            raise ModelError(f"{folder / 'config.json'} does not exist: not a model folder")
        generation = _read_json(folder / "generation_config.json") or {}
        fields = _Fields(values, folder / "config.json")
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        num_heads = fields.count("num_attention_heads")
        hidden_size = fields.count("hidden_size")
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.error("hidden_size", "not a multiple of num_attention_heads")
        kv_default = num_heads if architecture == "LlamaForCausalLM" else None
        num_kv_heads = fields.count("num_key_value_heads", kv_default)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", "does not divide num_attention_heads")
        head_dim = fields.count("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise fields.error("head_dim", "odd: rotary embedding needs pairs")
        has_bias = fields.flag("attention_bias")
        vocab_size = fields.count("vocab_size")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=fields.count("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(fields),
            has_qkv_bias=has_bias or _QKV_BIAS_BY_ARCHITECTURE[architecture],
            has_o_bias=has_bias,
            has_mlp_bias=fields.flag("mlp_bias"),
            is_tied=fields.flag("tie_word_embeddings"),
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields, generation),
            num_token_ids=min(vocab_size, _count_token_ids(folder) or vocab_size),
        )


class _Fields:
    """Typed access to a JSON object; every complaint names the file and the field."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:  # noqa: ANN401 -- a JSON value of any type; callers check it
        return self._values.get(name)

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._path}: {name}={self._values.get(name)!r}: {problem}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "not a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, "not a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, "not true or false")
        return value


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} could not be read: {error}") from error
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return values


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _QKV_BIAS_BY_ARCHITECTURE:
        raise fields.error(
            "architectures", f"supported are {', '.join(sorted(_QKV_BIAS_BY_ARCHITECTURE))}"
        )
    return str(names[0])


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.get("hidden_act") != "silu":
        raise fields.error("hidden_act", "only silu is supported")
    if "quantization_config" in fields:
        raise fields.error("quantization_config", "quantized checkpoints are not supported")
    if fields.get("pretraining_tp") not in (None, 1):
        raise fields.error("pretraining_tp", "only 1 is supported")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", "only 1 is supported")
    window = fields.get("sliding_window")
    # Qwen2 carries a window that is off unless use_sliding_window says otherwise.
    is_window_on = window is not None and fields.get("use_sliding_window") is not False
    if is_window_on and window < fields.count("max_position_embeddings"):
        raise fields.error("sliding_window", "sliding-window attention is not supported")


def _rope_theta(fields: _Fields) -> float:
    parameters = fields.get("rope_parameters")  # transformers 5
    scaling = fields.get("rope_scaling")  # transformers 4
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(name, "not an object")
        rope_type = value.get("rope_type", value.get("type", "default"))
        if rope_type != "default":
            raise fields.error(name, f"rope type {rope_type!r} is not supported, only 'default'")
        if value.get("partial_rotary_factor", 1) != 1:
            raise fields.error(name, "a partial_rotary_factor is not supported")
    theta = (parameters or {}).get("rope_theta")
    if theta is None:
        return fields.number("rope_theta", _DEFAULT_ROPE_THETA)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise fields.error("rope_parameters", "rope_theta is not a positive number")
    return float(theta)


def _dtype(fields: _Fields) -> str:
    name = "dtype" if "dtype" in fields else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    if value not in ("float32", "bfloat16", "float16"):
        raise fields.error(name, "supported are float32, bfloat16 and float16")
    return str(value)


def _eos_token_ids(fields: _Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", fields.get("eos_token_id"))
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise fields.error("eos_token_id", "not an integer or a list of integers")
    return tuple(sorted(set(ids)))


def _count_token_ids(folder: Path) -> int | None:
    """One more than the highest id in `tokenizer.json`; None: no such file, or another layout."""
    tokenizer = _read_json(folder / "tokenizer.json")
    if tokenizer is None:
        return None
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not vocab:
        return None
    added = tokenizer.get("added_tokens") or []
    return 1 + max(int(i) for i in (*vocab.values(), *(token["id"] for token in added)))
