"""The CPU LoRA backends: plain torch, and the native kernel with torch as its fallback.

Both obey the seam's contract: rows are sorted by adapter once per step, each adapter's rows meet only
that adapter's weights, sums are fp32, y is rounded once, base rows and sites that no active adapter
targets are not touched.

T tokens, K inputs, N outputs, R rank over all slices of a site, G adapters (groups) in the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from loraplex_kernels.cpu.lora import LoraKernel, LoraStep, SliceOffsets
from torch import Tensor

from loraplex_engine.artifact import ModelShape
from loraplex_engine.lora.seam import LoraBatch, LoraSite
from loraplex_engine.lora.sites import (
    SITE_INDEX,
    SITES,
    embedding_index,
    head_index,
    site_layouts,
)
from loraplex_engine.lora.weights import NativeWeights, TorchSite, TorchWeights
from loraplex_engine.step import Int32Array

# A matrix kernel takes another inner loop for the last rows of a block: with padded rows a row's bits
# do not depend on how many came with it (DESIGN.md, the row rule).
ROW_MULTIPLE: Final = 4

Packed_co = TypeVar("Packed_co", covariant=True)


class SlotWeights(Protocol[Packed_co]):
    """What a backend needs of the pool."""

    def weights(self, slot: int) -> Packed_co:
        """The weights in a slot."""
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of a step that have an adapter, sorted by slot."""

    slots: tuple[int, ...]  # G, ascending
    rows: Int32Array  # token indices, group after group, ascending within a group
    sizes: Int32Array  # G

    @classmethod
    def of(cls, slot_T: Int32Array) -> Groups | None:
        """Sort tokens by slot; None: every token is base."""
        order = np.argsort(slot_T, kind="stable").astype(np.int32)
        rows = order[np.searchsorted(slot_T[order], 0) :]
        if not len(rows):
            return None
        slots, sizes = np.unique(slot_T[rows], return_counts=True)
        return cls(tuple(slots.tolist()), rows, sizes.astype(np.int32))


class _Prepared(Generic[Packed_co]):
    """Remembers the last batches: decoding repeats its step's (all rows, and those that sample) until a
    row or slot changes.
    """

    _NUM_KEPT: Final = 2

    def __init__(self) -> None:
        self._batches: OrderedDict[tuple[bytes, int], Packed_co | None] = OrderedDict()

    def get(
        self, slot_T: Int32Array, version: int, make: Callable[[], Packed_co | None]
    ) -> Packed_co | None:
        """The batch for these slots; made anew when the tokens' slots or the slots' content differ.

        Keyed on both: the same slot number may hold another tenant's adapter one step later.
        """
        key = (slot_T.tobytes(), version)
        if key in self._batches:
            self._batches.move_to_end(key)
            return self._batches[key]
        # A batch of an older slot table keeps weights alive that were evicted.
        for old in [old for old in self._batches if old[1] != version]:
            del self._batches[old]
        batch = self._batches[key] = make()
        if len(self._batches) > self._NUM_KEPT:
            self._batches.popitem(last=False)
        return batch


# ------------------------------------------------------------------------------------------ torch


@dataclass(frozen=True, slots=True)
class _TorchGroup:
    weights: TorchWeights
    rows: Tensor  # (m,) int64
    padded_rows: Tensor  # rows, the last repeated up to a multiple of ROW_MULTIPLE
    span: slice | None  # the same rows as one slice of x, where they are one


@dataclass(frozen=True, slots=True)
class _TorchBatch:
    groups: tuple[_TorchGroup, ...]


class TorchLora:
    """One pair of matrix products per adapter and slice: works everywhere torch does."""

    name: Final = "torch"

    def __init__(self, pool: SlotWeights[TorchWeights], shape: ModelShape) -> None:
        self._pool = pool
        self._embedding_index = embedding_index(shape)
        self._head_index = head_index(shape)
        self._prepared: _Prepared[_TorchBatch] = _Prepared()

    def prepare(
        self, slot_T: Int32Array, pool_version: int, *, of_head: bool = False
    ) -> LoraBatch | None:
        """See `LoraBackend.prepare`."""
        return self._prepared.get(slot_T, pool_version, lambda: self._make_batch(slot_T))

    def _make_batch(self, slot_T: Int32Array) -> _TorchBatch | None:
        groups = Groups.of(slot_T)
        if groups is None:
            return None
        result, begin = [], 0
        for slot, size in zip(groups.slots, groups.sizes.tolist(), strict=True):
            rows = groups.rows[begin : begin + size].astype(np.int64)
            begin += size
            padding = np.repeat(rows[-1:], -size % ROW_MULTIPLE)
            is_span = rows[-1] - rows[0] == size - 1
            span = slice(int(rows[0]), int(rows[-1]) + 1) if is_span else None
            result.append(
                _TorchGroup(
                    weights=self._pool.weights(slot),
                    rows=torch.from_numpy(rows),
                    padded_rows=torch.from_numpy(np.concatenate([rows, padding])),
                    span=span,
                )
            )
        return _TorchBatch(tuple(result))

    def add(self, y_TN: Tensor, x_TK: Tensor, layer: int, site: LoraSite, batch: LoraBatch) -> None:
        """See `LoraBackend.add`."""
        assert isinstance(batch, _TorchBatch)
        self._add(y_TN, x_TK, layer * len(SITES) + SITE_INDEX[site], batch)

    def add_embedding(self, y_TH: Tensor, token_T: Tensor, batch: LoraBatch) -> None:
        """See `LoraBackend.add_embedding`."""
        assert isinstance(batch, _TorchBatch)
        for group in batch.groups:
            weights = group.weights.sites[self._embedding_index]
            if weights is not None:
                h_MR = weights.a_KR.index_select(0, token_T[group.padded_rows])
                _expand(y_TH, h_MR.mul_(weights.scale_R), weights, group)

    def adapts_head(self, batch: LoraBatch) -> bool:
        """See `LoraBackend.adapts_head`."""
        assert isinstance(batch, _TorchBatch)
        return any(group.weights.sites[self._head_index] is not None for group in batch.groups)

    def add_head(self, y_RV: Tensor, x_RH: Tensor, batch: LoraBatch) -> None:
        """See `LoraBackend.add_head`."""
        assert isinstance(batch, _TorchBatch)
        self._add(y_RV, x_RH, self._head_index, batch)

    @staticmethod
    def _add(y_TN: Tensor, x_TK: Tensor, index: int, batch: _TorchBatch) -> None:
        for group in batch.groups:
            weights = group.weights.sites[index]
            if weights is None:
                continue
            if group.span is not None and len(group.rows) % ROW_MULTIPLE == 0:
                x_MK = x_TK[group.span]
            else:
                x_MK = x_TK.index_select(0, group.padded_rows)
            h_MR = torch.mm(x_MK.float(), weights.a_KR).mul_(weights.scale_R)
            _expand(y_TN, h_MR, weights, group)


def _expand(y_TN: Tensor, h_MR: Tensor, weights: TorchSite, group: _TorchGroup) -> None:
    """y += h B for the rows of a group; h has its padded rows."""
    count = len(group.rows)
    for part in weights.slices:
        # Padding ids that the head does not compute are cut off B too.
        width = min(part.outputs.stop, y_TN.shape[1]) - part.outputs.start
        outputs = slice(part.outputs.start, part.outputs.start + width)
        delta_mN = torch.mm(h_MR[:, part.ranks], part.b_RN[:, :width])[:count]
        if group.span is not None:
            y_mN = y_TN[group.span, outputs]
            y_mN.copy_(y_mN.float().add_(delta_mN))
        else:
            y_mN = y_TN[group.rows, outputs]
            y_TN[group.rows, outputs] = y_mN.float().add_(delta_mN).to(y_TN.dtype)


# ----------------------------------------------------------------------------------------- native


@dataclass(frozen=True, slots=True)
class NativeBatch:
    step: LoraStep
    is_active: npt.NDArray[np.bool_]  # by site number
    weights: tuple[NativeWeights, ...]  # keeps the memory alive that `step` points to


class NativeLora:
    """One call of the C kernel per site, over all adapters of the step."""

    def __init__(
        self, pool: SlotWeights[NativeWeights], shape: ModelShape, kernel: LoraKernel
    ) -> None:
        self._pool = pool
        self.kernel = kernel
        self._layouts = site_layouts(shape)
        self._max_inputs = max(layout.num_inputs for layout in self._layouts)
        self._embedding_index = embedding_index(shape)
        self._head_index = head_index(shape)
        self._head_offsets = SliceOffsets.of((shape.vocab_size,))
        self._offsets = [
            SliceOffsets.of(tuple(width for _, _, width in layout.slices))
            for layout in self._layouts
        ]
        self.slice_addresses = [offsets.begins.ctypes.data for offsets in self._offsets]
        self._prepared: _Prepared[NativeBatch] = _Prepared()

    def prepare(
        self, slot_T: Int32Array, pool_version: int, *, of_head: bool = False
    ) -> LoraBatch | None:
        """See `LoraBackend.prepare`."""
        return self._prepared.get(slot_T, pool_version, lambda: self._make_batch(slot_T))

    def _make_batch(self, slot_T: Int32Array) -> NativeBatch | None:
        groups = Groups.of(slot_T)
        if groups is None:
            return None
        weights = tuple(self._pool.weights(slot) for slot in groups.slots)
        tables: list[npt.NDArray[Any]] = [packed.sites for packed in weights]
        step = LoraStep(
            site_tables=tables,
            group_sizes=groups.sizes,
            rows=groups.rows,
            max_inputs=self._max_inputs,
            num_threads=torch.get_num_threads(),
        )
        is_active = np.any([table["rank_total"] > 0 for table in tables], axis=0)
        return NativeBatch(step, is_active, weights)

    def add(self, y_TN: Tensor, x_TK: Tensor, layer: int, site: LoraSite, batch: LoraBatch) -> None:
        """See `LoraBackend.add`."""
        assert isinstance(batch, NativeBatch)
        site_index = SITE_INDEX[site]
        index = layer * len(SITES) + site_index
        if batch.is_active[index]:
            self.kernel.add(y_TN, x_TK, self.slice_addresses[site_index], index, batch.step)

    def add_embedding(self, y_TH: Tensor, token_T: Tensor, batch: LoraBatch) -> None:
        """See `LoraBackend.add_embedding`."""
        assert isinstance(batch, NativeBatch)
        if batch.is_active[self._embedding_index]:
            self.kernel.embed(y_TH, token_T, self._embedding_index, batch.step)

    def adapts_head(self, batch: LoraBatch) -> bool:
        """See `LoraBackend.adapts_head`."""
        assert isinstance(batch, NativeBatch)
        return bool(batch.is_active[self._head_index])

    def add_head(self, y_RV: Tensor, x_RH: Tensor, batch: LoraBatch) -> None:
        """See `LoraBackend.add_head`."""
        assert isinstance(batch, NativeBatch)
        if not batch.is_active[self._head_index]:
            return
        if self._head_offsets.begins[-1] != y_RV.shape[1]:
            # The head computes no padding ids; B's rows for them are never read then.
            self._head_offsets = SliceOffsets.of((y_RV.shape[1],))
        self.kernel.add(
            y_RV, x_RH, self._head_offsets.begins.ctypes.data, self._head_index, batch.step
        )
