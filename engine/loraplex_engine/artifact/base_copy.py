"""Copies of base weights inside an adapter: PEFT adds one of embed_tokens and lm_head where it adapts them.

PEFT loads such a copy over the base's own weight. Where the two are equal that does nothing, and the copy
is left out; where they differ, the adapter was trained on another base, or with embeddings of its own,
and is refused. Reads the base's safetensors in pieces, so that the check needs next to no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from loraplex_engine.artifact.errors import ArtifactError
from loraplex_engine.artifact.tensors import ITEM_BYTES, FloatDType, TensorView
from loraplex_engine.errors import ModelError

_EMBEDDING: Final = "model.embed_tokens.weight"
# By the name of the copy.
BASE_COPIES: Final[Mapping[str, str]] = {
    "base_model.model.model.embed_tokens.base_layer.weight": _EMBEDDING,
    "base_model.model.lm_head.base_layer.weight": "lm_head.weight",
}
_PIECE_ITEMS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of the base lies."""

    path: Path
    dtype: FloatDType
    shape: tuple[int, ...]
    begin: int


def check_base_copies(copies: Mapping[str, TensorView], base: Path) -> None:
    """Raise unless each copy equals the base's weight, value by value.

    Args:
        base: the base model's folder.

    Raises:
        ArtifactError: a copy differs.
        ModelError: the base cannot be read.
    """
    if not copies:
        return
    places = _find_places(base)
    for name, copy in copies.items():
        # A tied base has one weight for both.
        place = places.get(BASE_COPIES[name]) or places.get(_EMBEDDING)
        if place is None:
            raise ModelError(f"{base}: there is no tensor {BASE_COPIES[name]}")
        if copy.shape != place.shape or not _is_equal(copy, place):
            raise ArtifactError(
                f"adapter_model.{name}",
                "it is a copy of the base's weights (PEFT adds it where embed_tokens or lm_head is "
                "adapted), but the base here has other ones.",
                "Upload it where its own base is served; if only the copy is stale, save with "
                "save_pretrained(folder, save_embedding_layers=False).",
            )


def _is_equal(copy: TensorView, place: _Place) -> bool:
    item_bytes, copy_item_bytes = ITEM_BYTES[place.dtype], ITEM_BYTES[copy.dtype]
    num_items = copy.size_bytes // copy_item_bytes
    with place.path.open("rb") as file:
        file.seek(place.begin)
        for begin in range(0, num_items, _PIECE_ITEMS):
            count = min(_PIECE_ITEMS, num_items - begin)
            theirs = memoryview(file.read(count * item_bytes))
            ours = copy.data[begin * copy_item_bytes : (begin + count) * copy_item_bytes]
            if len(theirs) != count * item_bytes:
                raise ModelError(f"{place.path} is truncated")
            copied = TensorView("", copy.dtype, (count,), ours)
            base = TensorView("", place.dtype, (count,), theirs)
            if not np.array_equal(copied.to_float32(), base.to_float32()):
                return False
    return True


def _find_places(base: Path) -> dict[str, _Place]:
    try:
        return dict(place for path in sorted(base.glob("*.safetensors")) for place in _read(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{base}: its weights could not be read: {error!r}") from error


def _read(path: Path) -> Iterator[tuple[str, _Place]]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    for name in BASE_COPIES.values():
        entry = header.get(name)
        if entry is not None:
            begin = 8 + header_bytes + int(entry["data_offsets"][0])
            dtype = entry["dtype"]
            if dtype not in ITEM_BYTES:
                raise ValueError(f"{name} is {dtype}")
            yield name, _Place(path, dtype, tuple(entry["shape"]), begin)
