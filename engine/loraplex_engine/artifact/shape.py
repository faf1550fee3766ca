"""The base model's linear layers, and whether an adapter fits them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np

from loraplex_engine.artifact.base_copy import check_base_copies
from loraplex_engine.artifact.errors import ArtifactError
from loraplex_engine.artifact.limits import AdapterLimits, PatternClock
from loraplex_engine.artifact.reader import (
    EMBEDDING,
    HEAD,
    OUTSIDE,
    AdapterArtifact,
    LoraPair,
    ModuleName,
)
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
    is_tied: bool = False  # lm_head shares the embedding's weight

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
                is_tied=raw.get("tie_word_embeddings") is True,
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

    def module_shape(self, module: ModuleName) -> tuple[int, int]:
        """(outputs, inputs) of a module; those of the embedding are (hidden, vocabulary)."""
        if module == EMBEDDING:
            return self.hidden_size, self.vocab_size
        if module == HEAD:
            return self.vocab_size, self.hidden_size
        return self.linear_shapes()[module.linear]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the base an adapter adapts."""

    matched_modules: int
    total_modules: int  # the linears of all layers, and embedding and head where they are adapted


def check_fits(
    artifact: AdapterArtifact,
    shape: ModelShape,
    *,
    limits: AdapterLimits | None = None,
    base: Path | None = None,
) -> Fit:
    """Check every pair against the base's layers, and that no targeted module lacks its pair.

    Args:
        base: the base's folder, to compare copies of its weights with; None: they were compared before,
            and are left out.

    Raises:
        ArtifactError: a layer the base does not have, a wrong shape, a missing pair, another base's
            weights, or patterns that take longer than the limits (None: the defaults) allow.
        ModelError: the base cannot be read.
    """
    clock = PatternClock(limits or AdapterLimits())
    for module, pair in artifact.pairs.items():
        _check_pair(module, pair, shape)
    linears = shape.linear_shapes()
    candidates = [
        EMBEDDING,
        HEAD,
        *(ModuleName(layer, linear) for layer in range(shape.num_layers) for linear in linears),
    ]
    is_tying = artifact.config.is_tying and shape.is_tied
    for module in candidates:
        is_targeted = artifact.config.targets(str(module))
        if is_tying and module in (EMBEDDING, HEAD):
            is_targeted = True
        if is_targeted and module not in artifact.pairs:
            raise ArtifactError(
                "adapter_model",
                f"the config targets {module}, but the file has no tensors for it.",
                "Save the adapter again; a part of it is missing.",
            )
        if not is_targeted and module in artifact.pairs:
            # Read for the sake of `ensure_weight_tying`, which this base has no use for.
            raise ArtifactError(
                f"adapter_model.{artifact.pairs[module].a.name}",
                f"it is tied to the embedding, but this base's {module} has a weight of its own.",
                OTHER_BASE,
            )
        clock.check()
    if base is not None:
        check_base_copies(artifact.base_copies, base)
    if is_tying:
        _check_tied(artifact.pairs[EMBEDDING], artifact.pairs[HEAD])
    num_outside = sum(module.layer == OUTSIDE for module in artifact.pairs)
    return Fit(
        matched_modules=len(artifact.pairs),
        total_modules=shape.num_layers * len(linears) + num_outside,
    )


def _check_pair(module: ModuleName, pair: LoraPair, shape: ModelShape) -> None:
    if module.layer >= shape.num_layers:
        raise ArtifactError(
            f"adapter_model.{pair.a.name}",
            f"layer {module.layer} does not exist: the base has {shape.num_layers} layers.",
            OTHER_BASE,
        )
    num_outputs, num_inputs = shape.module_shape(module)
    remedy = OTHER_BASE
    if module.layer == OUTSIDE:
        remedy = f"{OTHER_BASE} Adapters with added tokens are not served: train without them."
    if pair.a.shape[1] != num_inputs:
        raise ArtifactError(
            f"adapter_model.{pair.a.name}",
            f"shape {pair.a.shape}, but the base's {module.linear} takes {num_inputs} inputs.",
            remedy,
        )
    if pair.b.shape[0] != num_outputs:
        raise ArtifactError(
            f"adapter_model.{pair.b.name}",
            f"shape {pair.b.shape}, but the base's {module.linear} gives {num_outputs} outputs.",
            remedy,
        )


def _check_tied(embedding: LoraPair, head: LoraPair) -> None:
    """The head's delta is the embedding's, seen from the other side: its A is B', its B is A'."""
    for ours, theirs in ((head.a, embedding.b), (head.b, embedding.a)):
        if ours.shape != theirs.shape[::-1] or not np.array_equal(
            ours.to_float32(), theirs.to_float32().T
        ):
            raise ArtifactError(
                f"adapter_model.{ours.name}",
                "ensure_weight_tying is set, but it is not the embedding's pair transposed.",
                "Save the adapter again, or train with ensure_weight_tying=false.",
            )
