"""Adapters on their way to the GPU: packed into pinned memory once, copied into a slot in one go.

An adapter in host memory is an image (`loraplex_kernels.lora_slots`): header and weights in the model's dtype and
the kernels' order, in page-locked memory. It is made on a loader thread; putting it into a slot is one asynchronous
copy on the step's stream, before the launches that read it. The slot's address never changes, so recorded launches
serve it too.

What a slot holds is remembered by the packing's number, never by a reference: an adapter that leaves host memory
leaves it at once, whatever the slots still hold.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from loraplex_kernels.lora_image import LoraPart, LoraSitePairs, image_size, write_image
from loraplex_kernels.lora_slots import SITE_HEADER, LoraSlots, a_row_length, padded_rank
from torch import Tensor

from loraplex_engine.artifact import (
    EMBEDDING,
    HEAD,
    ArtifactError,
    LoraPair,
    ModelShape,
    ModuleName,
    TensorView,
)
from loraplex_engine.lora.sites import SITES, embedding_index, num_sites, site_layouts
from loraplex_engine.lora.weights import AdapterTensors

# A slot begins at a multiple of this: strides that are multiples of 16 units are compiled for as such.
_SLOT_ALIGNMENT: Final = 256
_numbers = itertools.count()

_STORED: Final[dict[str, tuple[torch.dtype, type[Any]]]] = {
    "F32": (torch.float32, np.float32),
    "BF16": (torch.bfloat16, np.int16),
    "F16": (torch.float16, np.int16),
}


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """An adapter in host memory, ready to be copied into a slot."""

    image: Tensor  # uint8, page-locked where there is a GPU
    rank_S: npt.NDArray[np.int32]  # by site number, all slices, padded; 0: not targeted
    max_rank: int  # of one slice, padded
    size_bytes: int  # of host memory, the allocator's rounding counted
    number: int = field(default_factory=lambda: next(_numbers))


def pack_device(
    artifact: AdapterTensors, shape: ModelShape, *, dtype: torch.dtype, pin: bool
) -> DeviceAdapter:
    """Lay an adapter out for a slot.

    Args:
        dtype: of the model; weights that are stored wider are rounded to it.
        pin: into page-locked memory.

    Raises:
        ArtifactError: a weight is beyond the range of `dtype`.
    """
    sites = _pairs_of(artifact, shape, dtype)
    num_bytes = image_size(sites, dtype)
    image = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin)
    write_image(image, sites, dtype)
    headers = image[: len(sites) * SITE_HEADER.itemsize].numpy().view(SITE_HEADER)
    # torch's allocator of page-locked memory hands out powers of two.
    size_bytes = 1 << (num_bytes - 1).bit_length() if pin else num_bytes
    max_rank = int(headers["slices"]["rank"].max())
    return DeviceAdapter(image, headers["rank"].copy(), max_rank, size_bytes)


def slot_size(shape: ModelShape, max_rank: int, dtype: torch.dtype) -> int:
    """Bytes of a slot that holds any adapter of at most `max_rank` on every module."""
    rank = padded_rank(max_rank)
    numbers = 0
    for layout in site_layouts(shape):
        a_rows = rank * len(layout.slices)
        numbers += shape.num_layers * (
            a_rows * a_row_length(layout.num_inputs) + rank * layout.num_outputs
        )
    # Embedding and head: one has the vocabulary for inputs, the other for outputs.
    numbers += 2 * rank * shape.vocab_size
    numbers += rank * (shape.hidden_size + a_row_length(shape.hidden_size))
    num_bytes = numbers * dtype.itemsize + num_sites(shape) * SITE_HEADER.itemsize
    return -(-num_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


class DeviceSlots:
    """The slots' memory on the device, and what is in them."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the memory of all slots; none holds an adapter yet."""
        self._slot_bytes = slot_size(shape, max_rank, dtype)
        memory = torch.empty(num_slots * self._slot_bytes, dtype=torch.uint8, device=device)
        self._memory = memory.view(num_slots, self._slot_bytes)
        self.kernel_view: Final = LoraSlots.over(
            memory, dtype=dtype, num_slots=num_slots, num_sites=num_sites(shape)
        )
        # An empty slot targets nothing, should a launch ever look at it.
        self._memory[:, : num_sites(shape) * SITE_HEADER.itemsize].zero_()
        self._held: list[int | None] = [None] * num_slots  # numbers of packings
        self.uploads_total = 0
        self.uploaded_bytes_total = 0

    @property
    def size_bytes(self) -> int:
        """Device memory of all slots."""
        return self._memory.numel()

    def hold(self, slot: int, adapter: DeviceAdapter) -> bool:
        """Have `slot` hold `adapter` for whatever is launched next; returns whether a copy was needed.

        The copy is one, asynchronous, on the current stream: launches before it still see the old content.

        Raises:
            ValueError: the adapter is larger than a slot.
        """
        if self._held[slot] == adapter.number:
            return False
        num_bytes = adapter.image.numel()
        if num_bytes > self._slot_bytes:
            raise ValueError(
                f"the adapter takes {num_bytes} bytes, a slot has {self._slot_bytes}: "
                "raise --max-lora-rank"
            )
        self._memory[slot, :num_bytes].copy_(adapter.image, non_blocking=True)
        self._held[slot] = adapter.number
        self.uploads_total += 1
        self.uploaded_bytes_total += num_bytes
        return True


def _pairs_of(
    artifact: AdapterTensors, shape: ModelShape, dtype: torch.dtype
) -> list[LoraSitePairs]:
    """By site number."""

    def part(module: ModuleName, position: int) -> tuple[LoraPart, ...]:
        pair: LoraPair | None = artifact.pairs.get(module)
        if pair is None:
            return ()
        a_RK, b_NR = _as_tensor(pair.a, dtype), _as_tensor(pair.b, dtype)
        return (LoraPart(position, a_RK, b_NR, pair.scale),)

    sites = []
    layouts = site_layouts(shape)
    for index in range(embedding_index(shape)):
        layer, layout = index // len(SITES), layouts[index % len(SITES)]
        found = [
            part(ModuleName(layer, linear), position)
            for position, (linear, _, _) in enumerate(layout.slices)
        ]
        sites.append(LoraSitePairs(sum(found, ())))
    sites.append(LoraSitePairs(part(EMBEDDING, 0), is_embedding=True))
    sites.append(LoraSitePairs(part(HEAD, 0)))
    return sites


def _as_tensor(view: TensorView, dtype: torch.dtype) -> Tensor:
    """The stored numbers, rounded to `dtype` where they are wider."""
    stored, words = _STORED[view.dtype]
    # A copy, as torch takes no memory that it may not write; it lives until the image is made.
    bits = np.frombuffer(view.data, dtype=words).reshape(view.shape).copy()
    tensor = torch.from_numpy(bits).view(stored)
    if dtype == torch.float16 and not bool(tensor.to(dtype).isfinite().all()):
        raise ArtifactError(
            f"adapter_model.{view.name}",
            "has weights beyond the range of float16, the dtype that the model is served in.",
            "Serve the model in bfloat16, or train with smaller weights.",
        )
    return tensor
