"""An adapter's weights as each CPU backend wants them.

Memory for weights comes from anonymous mappings of its own, so that it goes back to the system the
moment an adapter is evicted, whatever the heap looks like by then.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from loraplex_kernels.cpu.lora import (
    SITE_DTYPE,
    LoraKernel,
    SiteFormat,
    blocked_outputs,
)
from torch import Tensor

from loraplex_engine.artifact import (
    EMBEDDING,
    HEAD,
    LoraPair,
    ModelShape,
    ModuleName,
    TensorView,
)
from loraplex_engine.lora.sites import (
    SITES,
    SiteLayout,
    embedding_index,
    head_index,
    num_sites,
    site_layouts,
)

_ALIGNMENT: Final = 64
_HUGE_PAGE: Final = 2 << 20


class AdapterTensors(Protocol):
    """What packing needs of an `AdapterArtifact`."""

    @property
    def tensors(self) -> Mapping[str, TensorView]: ...

    @property
    def pairs(self) -> Mapping[ModuleName, LoraPair]: ...


def mapped_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory that is unmapped when its last user is gone; in huge pages where they fit into it whole."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and num_bytes >= _HUGE_PAGE:
        # A step reads every weight of its adapters once: with small pages it looks up an address per 4 KiB.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


# ------------------------------------------------------------------------------------------ torch


@dataclass(frozen=True, slots=True)
class TorchSlice:
    """One slice of a site: its ranks in h, its outputs in y, its B."""

    ranks: slice
    outputs: slice
    b_RN: Tensor  # fp32


@dataclass(frozen=True, slots=True)
class TorchSite:
    """One site: A of all slices stacked, so that x is multiplied once."""

    # fp32; a view of (R, K), but contiguous for the embedding, whose rows are looked up.
    a_KR: Tensor
    scale_R: Tensor  # fp32
    slices: tuple[TorchSlice, ...]


@dataclass(frozen=True, slots=True)
class TorchWeights:
    """An adapter in fp32; None at sites it does not touch."""

    sites: tuple[TorchSite | None, ...]  # by site number, see `sites.py`
    size_bytes: int


def pack_torch(artifact: AdapterTensors, shape: ModelShape) -> TorchWeights:
    """Widen to fp32, exactly; the rank of each slice is padded with zeros to a multiple of 8.

    Padding is safe: a padded column of h is 0 * x summed, its row of B is 0, and 0 + d is d.
    """
    layouts = site_layouts(shape)
    pairs = [
        _site_pairs(artifact, layer, layout)
        for layer in range(shape.num_layers)
        for layout in layouts
    ]
    for module in (EMBEDDING, HEAD):
        pair = artifact.pairs.get(module)
        pairs.append([] if pair is None else [(pair, 0, pair.b.shape[0])])
    num_floats = sum(
        _padded(pair.rank) * (pair.a.shape[1] + width) for site in pairs for pair, _, width in site
    )
    memory = torch.from_numpy(mapped_memory(num_floats * 4).view(np.float32))
    sites: list[TorchSite | None] = []
    used = 0

    def take(rows: int, columns: int) -> Tensor:
        nonlocal used
        used += rows * columns
        return memory[used - rows * columns : used].view(rows, columns)

    for index, site in enumerate(pairs):
        if not site:
            sites.append(None)
            continue
        total = sum(_padded(pair.rank) for pair, _, _ in site)
        num_inputs = site[0][0].a.shape[1]
        is_embedding = index == embedding_index(shape)
        if is_embedding:
            a_KR = take(num_inputs, total)
            a_RK = a_KR.T
        else:
            a_RK = take(total, num_inputs)
            a_KR = a_RK.T
        scale_R = torch.zeros(total)
        slices, rank_begin = [], 0
        for pair, begin, width in site:
            rank_end = rank_begin + _padded(pair.rank)
            a_RK[rank_begin : rank_begin + pair.rank].numpy()[:] = pair.a.to_float32()
            scale_R[rank_begin:rank_end] = pair.scale
            b_RN = take(_padded(pair.rank), width)
            b_RN[: pair.rank].numpy()[:] = pair.b.to_float32().T
            slices.append(
                TorchSlice(slice(rank_begin, rank_end), slice(begin, begin + width), b_RN)
            )
            rank_begin = rank_end
        sites.append(TorchSite(a_KR, scale_R, tuple(slices)))
    return TorchWeights(tuple(sites), num_floats * 4)


def _padded(rank: int) -> int:
    return -(-rank // 8) * 8


def _site_pairs(
    artifact: AdapterTensors, layer: int, layout: SiteLayout
) -> list[tuple[LoraPair, int, int]]:
    """(pair, first output, outputs) of the slices of a site that the adapter has."""
    found = []
    for linear, begin, width in layout.slices:
        pair = artifact.pairs.get(ModuleName(layer, linear))
        if pair is not None:
            found.append((pair, begin, width))
    return found


# ----------------------------------------------------------------------------------------- native


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """An adapter as lora.c reads it: bf16 if it was stored so, else fp32."""

    sites: npt.NDArray[Any]  # SITE_DTYPE, by site number; points into `memory`
    memory: npt.NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        """Memory of weights and table."""
        return self.memory.nbytes + self.sites.nbytes


def pack_native(
    artifact: AdapterTensors, shape: ModelShape, *, tiles: LoraKernel | None = None
) -> NativeWeights:
    """Lay out all sites one after another, in the order a step reads them.

    Args:
        tiles: weights are laid out for the matrix tiles of this kernel, which has some; rows must be bf16 then.
    """
    is_bf16 = all(tensor.dtype == "BF16" for tensor in artifact.tensors.values())
    layouts = site_layouts(shape)
    sites = np.zeros(num_sites(shape), dtype=SITE_DTYPE)
    sites["format"] = SiteFormat.BF16 if is_bf16 else SiteFormat.FP32
    arena = _Arena()

    def stored(tensor: TensorView) -> npt.NDArray[Any]:
        return tensor.bits() if is_bf16 else tensor.to_float32()

    def pairs_of(index: int) -> list[LoraPair | None]:
        if index == embedding_index(shape):
            return [artifact.pairs.get(EMBEDDING)]
        if index == head_index(shape):
            return [artifact.pairs.get(HEAD)]
        layer, layout = index // len(SITES), layouts[index % len(SITES)]
        return [artifact.pairs.get(ModuleName(layer, linear)) for linear, _, _ in layout.slices]

    for index, site in enumerate(sites):
        pairs = pairs_of(index)
        if not any(pairs):
            continue
        is_embedding = index == embedding_index(shape)  # whose A is looked up
        own = [pair for pair in pairs if pair]
        halves = [stored(half) for pair in own for half in (pair.a, pair.b)]
        planes = 0
        if tiles is not None and not is_embedding:
            counts = [tiles.count_planes(half) for half in halves]
            planes = max(counts) if all(counts) else 0
        if tiles is not None and planes:
            site["format"] = SiteFormat.TILES if planes == 1 else SiteFormat.SPLIT_TILES
            site["a"] = arena.place(tiles.tiled_inputs(halves[::2], planes))
            blocked = [tiles.tiled_outputs(b_NR, planes) for b_NR in halves[1::2]]
        else:
            a_RK = np.concatenate(halves[::2])
            site["a"] = arena.place(np.ascontiguousarray(a_RK.T) if is_embedding else a_RK)
            blocked = [blocked_outputs(b_NR) for b_NR in halves[1::2]]
        for position, pair in enumerate(pairs):
            if pair is not None:
                site["b"][position] = arena.place(blocked.pop(0))
                site["scale"][position] = pair.scale
                site["rank"][position] = pair.rank
        site["rank_total"] = site["rank"].sum()

    memory = arena.finish()
    # Offsets become addresses, which are fixed as long as `memory` lives.
    sites["a"][sites["rank_total"] > 0] += np.uint64(memory.ctypes.data)
    sites["b"][sites["rank"] > 0] += np.uint64(memory.ctypes.data)
    return NativeWeights(sites, memory)


class _Arena:
    """Arrays on their way into one block of memory."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, npt.NDArray[Any]]] = []
        self._used = 0

    def place(self, part: npt.NDArray[Any]) -> int:
        """The offset that the array will have."""
        begin = self._used
        self._parts.append((begin, part))
        self._used = begin + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        return begin

    def finish(self) -> npt.NDArray[np.uint8]:
        """Copy all of them into place."""
        memory = mapped_memory(self._used)
        for begin, part in self._parts:
            memory[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)
        return memory
