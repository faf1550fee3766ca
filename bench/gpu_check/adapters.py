"""Random adapters in host memory, as the pool would hold them, and a pool that has them in its slots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from loraplex_engine.artifact import ModelShape
from loraplex_engine.lora.device_slots import DeviceAdapter
from loraplex_engine.lora.sites import embedding_index, site_layouts
from loraplex_kernels.lora_image import LoraPart, LoraSitePairs, image_size, write_image
from loraplex_kernels.lora_slots import SITE_HEADER, padded_rank


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """An image for the device, and the pairs that it was made of, by site number."""

    packed: DeviceAdapter
    sites: tuple[LoraSitePairs, ...]
    rank: int

    def again(self) -> RandomAdapter:
        """Another adapter with the same weights: it takes a slot of its own."""
        packed = self.packed
        copy = DeviceAdapter(packed.image, packed.rank_S, packed.max_rank, packed.size_bytes)
        return RandomAdapter(copy, self.sites, self.rank)


def random_adapter(
    shape: ModelShape,
    rank: int,
    dtype: torch.dtype,
    *,
    pin: bool,
    seed: int = 0,
    has_ends: bool = False,
    fill: float | None = None,
) -> RandomAdapter:
    """Of one rank, on all seven modules of every layer.

    All layers have the same weights: drawing 8B's takes longer than what is measured.

    Args:
        has_ends: on embedding and head too.
        fill: what every weight is; None: random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        if fill is not None:
            return torch.full(size, fill, dtype=dtype)
        scale = math.sqrt(size[1])
        return (torch.randn(size, generator=generator) / scale).to(dtype)

    layer = []
    for layout in site_layouts(shape):
        parts = tuple(
            LoraPart(position, draw(rank, layout.num_inputs), draw(width, rank), 1.0)
            for position, (_, _, width) in enumerate(layout.slices)
        )
        layer.append(LoraSitePairs(parts))
    vocab, hidden = shape.vocab_size, shape.hidden_size
    embedding = (LoraPart(0, draw(rank, vocab), draw(hidden, rank), 1.0),) if has_ends else ()
    head = (LoraPart(0, draw(rank, hidden), draw(vocab, rank), 1.0),) if has_ends else ()
    sites = (
        *layer * shape.num_layers,
        LoraSitePairs(embedding, is_embedding=True),
        LoraSitePairs(head),
    )
    assert len(sites) == embedding_index(shape) + 2
    image = torch.zeros(image_size(sites, dtype), dtype=torch.uint8, pin_memory=pin)
    write_image(image, sites, dtype)
    headers = image[: len(sites) * SITE_HEADER.itemsize].numpy().view(SITE_HEADER)
    packed = DeviceAdapter(image, headers["rank"].copy(), padded_rank(rank), image.numel())
    return RandomAdapter(packed, sites, rank)


@dataclass
class SlotPool:
    """`SlotWeights` and `SlotTable` of whatever is put into its slots."""

    adapters: dict[int, RandomAdapter] = field(default_factory=dict)
    version: int = 0

    def put(self, slot: int, adapter: RandomAdapter) -> None:
        """Have a slot hold another adapter from the next step on."""
        self.adapters[slot] = adapter
        self.version += 1

    def weights(self, slot: int) -> DeviceAdapter:
        """See `SlotWeights`."""
        return self.adapters[slot].packed


class PlainLora:
    """A `LoraBackend` in fp32, a row at a time: what the kernels are compared to."""

    def __init__(self, pool: SlotPool, shape: ModelShape) -> None:
        self._pool = pool
        self._layouts = site_layouts(shape)

    def prepare(
        self, slot_T: np.ndarray, pool_version: int, *, of_head: bool = False
    ) -> list[int] | None:
        """See `LoraBackend.prepare`."""
        del pool_version, of_head
        return slot_T.tolist() if (slot_T >= 0).any() else None

    def add(
        self, y_TN: torch.Tensor, x_TK: torch.Tensor, layer: int, site: str, batch: list[int]
    ) -> None:
        """See `LoraBackend.add`."""
        place, layout = next(
            (place, layout) for place, layout in enumerate(self._layouts) if layout.site == site
        )
        begins = [begin for _, begin, _ in layout.slices]
        for row, pairs in self._pairs(batch, layer * len(self._layouts) + place):
            for part, begin in zip(pairs.parts, begins, strict=True):
                h = part.a_RK.to(x_TK.device).float() @ x_TK[row].float()
                _expand(y_TN[row, begin:], part, h)

    def add_embedding(self, y_TH: torch.Tensor, token_T: torch.Tensor, batch: list[int]) -> None:
        """See `LoraBackend.add_embedding`."""
        for row, pairs in self._pairs(batch, -2):
            for part in pairs.parts:
                _expand(y_TH[row], part, part.a_RK.to(y_TH.device)[:, token_T[row]].float())

    def adapts_head(self, batch: list[int]) -> bool:
        """See `LoraBackend.adapts_head`."""
        return any(pairs.parts for _, pairs in self._pairs(batch, -1))

    def add_head(self, y_RV: torch.Tensor, x_RH: torch.Tensor, batch: list[int]) -> None:
        """See `LoraBackend.add_head`."""
        for row, pairs in self._pairs(batch, -1):
            for part in pairs.parts:
                h = part.a_RK.to(x_RH.device).float() @ x_RH[row].float()
                _expand(y_RV[row], part, h)

    def _pairs(self, batch: list[int], index: int) -> Iterator[tuple[int, LoraSitePairs]]:
        """(row, what its adapter has for a site) of the rows that have an adapter."""
        for row, slot in enumerate(batch):
            if slot >= 0:
                yield row, self._pool.adapters[slot].sites[index]


def _expand(y_N: torch.Tensor, part: LoraPart, h_R: torch.Tensor) -> None:
    delta = part.scale * (part.b_NR.to(y_N.device).float() @ h_R)
    y = y_N[: len(delta)]
    y.copy_((y.float() + delta).to(y.dtype))
