"""The base model's linear layers, and whether an adapter fits them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from loraplex_engine.artifact.errors import ArtifactError
from loraplex_engine.artifact.limits import AdapterLimits, PatternClock
from loraplex_engine.artifact.reader import AdapterArtifact
from loraplex_engine.errors import ModelError

OTHER_BASE = "It was trained on another base model: upload it where that base is served."


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-family decoder, in elements."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_config_json(cls, path: Path) -> ModelShape:
        """Read the base model's config.json.

        Raises:
            ModelError: the file is missing or lacks a size.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            num_heads = int(raw["num_attention_heads"])
            return cls(
                num_layers=int(raw["num_hidden_layers"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // num_heads),
                vocab_size=int(raw["vocab_size"]),
            )
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: not a Llama-family config ({error!r}).") from error

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear of one layer, by its name inside the layer."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (heads, self.hidden_size),
            "self_attn.k_proj": (kv_heads, self.hidden_size),
            "self_attn.v_proj": (kv_heads, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, heads),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the base an adapter adapts."""

    matched_modules: int
    total_modules: int


def check_fits(
    artifact: AdapterArtifact, shape: ModelShape, *, limits: AdapterLimits | None = None
) -> Fit:
    """Check every pair against the base's layers, and that no targeted module lacks its pair.

    Raises:
        ArtifactError: a layer the base does not have, a wrong shape, a missing pair, or patterns that
            take longer than the limits (None: the defaults) allow.
    """
    clock = PatternClock(limits or AdapterLimits())
    linears = shape.linear_shapes()
    for module, pair in artifact.pairs.items():
        if module.layer >= shape.num_layers:
            raise ArtifactError(
                f"adapter_model.{pair.a.name}",
                f"layer {module.layer} does not exist: the base has {shape.num_layers} layers.",
                OTHER_BASE,
            )
        num_outputs, num_inputs = linears[module.linear]
        if pair.a.shape[1] != num_inputs:
            raise ArtifactError(
                f"adapter_model.{pair.a.name}",
                f"shape {pair.a.shape}, but the base's {module.linear} takes {num_inputs} inputs.",
                OTHER_BASE,
            )
        if pair.b.shape[0] != num_outputs:
            raise ArtifactError(
                f"adapter_model.{pair.b.name}",
                f"shape {pair.b.shape}, but the base's {module.linear} gives {num_outputs} outputs.",
                OTHER_BASE,
            )
    adapted = {str(module) for module in artifact.pairs}
    for layer in range(shape.num_layers):
        for linear in linears:
            name = f"model.layers.{layer}.{linear}"
            if name not in adapted and artifact.config.targets(name):
                raise ArtifactError(
                    "adapter_model",
                    f"the config targets {name}, but the file has no tensors for it.",
                    "Save the adapter again; a part of it is missing.",
                )
            clock.check()
    return Fit(matched_modules=len(artifact.pairs), total_modules=shape.num_layers * len(linears))
