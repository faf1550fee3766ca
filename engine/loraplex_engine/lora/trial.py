"""A LoRA backend of the kind in use, over adapters that nobody uploaded: for the self-check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from loraplex_engine.artifact import (
    EMBEDDING,
    HEAD,
    LoraPair,
    ModelShape,
    ModuleName,
    TensorView,
)
from loraplex_engine.artifact.tensors import FloatDType
from loraplex_engine.lora.loader import PackedAdapter
from loraplex_engine.lora.seam import LoraBackend
from loraplex_engine.lora.setup import Lora
from loraplex_engine.lora.sites import SiteLayout, site_layouts

# What differs inside a backend: how weights are stored, ranks below, at and beyond its blocks.
_ADAPTERS: Final[tuple[tuple[int, FloatDType], ...]] = ((8, "BF16"), (5, "F32"), (64, "BF16"))


@dataclass(frozen=True, slots=True)
class LoraTrial:
    """The backend, and what may be asked of it: layer 0, these sites, embedding and head, slots below
    `num_slots`.
    """

    backend: LoraBackend
    layouts: tuple[SiteLayout, ...]
    num_slots: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Adapter:
    tensors: Mapping[str, TensorView]
    pairs: Mapping[ModuleName, LoraPair]


class _Slots:
    def __init__(self, weights: list[PackedAdapter]) -> None:
        self._weights = weights

    def weights(self, slot: int) -> PackedAdapter:
        return self._weights[slot]


def make_trial(lora: Lora, shape: ModelShape) -> LoraTrial:
    """A second backend like `lora.backend`, with adapters on all of the first layer, embedding and head."""
    # One layer: as many numbers as are tried, and a GPU's memory is given away by now.
    shape = msgspec.structs.replace(shape, num_layers=1)
    layouts = site_layouts(shape)
    rng = np.random.default_rng(0)
    weights = [
        lora.pack(_draw_adapter(rng, shape, layouts, min(rank, lora.max_rank), dtype), shape)
        for rank, dtype in _ADAPTERS
    ]
    return LoraTrial(
        lora.open_backend(_Slots(weights), len(weights), shape),
        layouts,
        len(weights),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
    )


def _draw_adapter(
    rng: np.random.Generator,
    shape: ModelShape,
    layouts: tuple[SiteLayout, ...],
    rank: int,
    dtype: FloatDType,
) -> _Adapter:
    pairs = {}
    for module in (EMBEDDING, HEAD):
        num_outputs, num_inputs = shape.module_shape(module)
        a = _draw(rng, f"{module}.A", dtype, rank, num_inputs)
        b = _draw(rng, f"{module}.B", dtype, num_outputs, rank)
        pairs[module] = LoraPair(a, b, rank, 2.0)
    for layout in layouts:
        for linear, _, width in layout.slices:
            a = _draw(rng, f"{linear}.A", dtype, rank, layout.num_inputs)
            b = _draw(rng, f"{linear}.B", dtype, width, rank)
            pairs[ModuleName(0, linear)] = LoraPair(a, b, rank, 2.0)
    tensors = {view.name: view for pair in pairs.values() for view in (pair.a, pair.b)}
    return _Adapter(tensors, pairs)


def _draw(rng: np.random.Generator, name: str, dtype: FloatDType, *shape: int) -> TensorView:
    values = rng.standard_normal(shape, dtype=np.float32)
    # bfloat16 is the upper half of a float32.
    stored = values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    return TensorView(name, dtype, shape, memoryview(stored.tobytes()))
