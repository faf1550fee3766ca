"""Python side of lora.c: the layout of an adapter's weights, and one call per site.

Everything that is the same for a whole step (groups, row order, scratch) is laid out once in a
`LoraStep`; `lora_add` then costs one foreign call. Reference: `reference.lora_shrink` and
`reference.lora_expand`. Contract of rounding and order: the header of lora.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_kernels.cpu.build import address_of, load_library

MAX_SLICES: Final = 3
OUT_BLOCK: Final = 32
_CHUNK: Final = 24
_LINE: Final = 16  # floats; loads that cross lines take twice as long
_TILE: Final = 16  # rows, ranks or outputs of a matrix tile
_TILE_K: Final = 32  # numbers that one product of tiles adds up
_HALF_TILE: Final = 8


class SiteFormat(IntEnum):
    """How a site's weights are laid out, and of what type they are; as in lora.c."""

    FP32 = 0
    BF16 = 1
    # For matrix tiles, in one plane of bf16 or in two: only for bf16 rows, and not of an embedding.
    TILES = 2
    SPLIT_TILES = 3


# lora_site in lora.c
SITE_DTYPE: Final = np.dtype(
    [
        ("a", np.uint64),
        ("b", np.uint64, (MAX_SLICES,)),
        ("scale", np.float32, (MAX_SLICES,)),
        ("rank", np.int32, (MAX_SLICES,)),
        ("format", np.int32),  # SiteFormat
        ("rank_total", np.int32),
    ]
)


class _Step(ctypes.Structure):
    """lora_step in lora.c."""

    _fields_ = (
        ("sites", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("h_stride", ctypes.c_int64),
        ("wide_stride", ctypes.c_int64),
        ("num_groups", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class SliceOffsets:
    """Where the slices of a merged linear begin in its output; the last entry is its width."""

    begins: npt.NDArray[np.int32]  # (MAX_SLICES + 1,)

    @classmethod
    def of(cls, widths: tuple[int, ...]) -> SliceOffsets:
        """Offsets of slices of these widths."""
        begins = np.full(MAX_SLICES + 1, sum(widths), dtype=np.int32)
        begins[: len(widths)] = np.cumsum((0, *widths[:-1]))
        return cls(begins)


class LoraStep:
    """Which rows use which adapter in one step, as lora.c wants it; holds all memory it points to."""

    def __init__(
        self,
        *,
        site_tables: list[npt.NDArray[Any]],
        group_sizes: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int32],
        max_inputs: int,
        num_threads: int,
    ) -> None:
        """Lay out a step.

        Args:
            site_tables: per group, the adapter's sites (SITE_DTYPE), one entry per (layer, site).
            group_sizes: rows of each group.
            rows: row indices into x and y, group after group, ascending within a group.
            max_inputs: largest K of any site.
            num_threads: threads that a call may use.

        Raises:
            ValueError: rows of a group do not ascend.
        """
        max_rank = max(int(table["rank_total"].max()) for table in site_tables)
        # `padded_rank` adds no more than a sixteenth and one.
        max_rank += max_rank // 16 + MAX_SLICES
        h_stride, wide_stride = _round_up(max_rank, _LINE), _round_up(max_inputs, _TILE_K)
        self.is_tiled = any((table["format"] >= SiteFormat.TILES).any() for table in site_tables)
        self._sites = np.array([table.ctypes.data for table in site_tables], dtype=np.uint64)
        self._rows = np.ascontiguousarray(rows, dtype=np.int32)
        self._begins = np.zeros(len(group_sizes) + 1, dtype=np.int32)
        np.cumsum(group_sizes, out=self._begins[1:])
        # Of each row whether it may follow the one before, and one entry more, for the end of the last group.
        may_follow = np.ones(len(self._rows) + 1, dtype=np.bool_)
        np.greater(self._rows[1:], self._rows[:-1], out=may_follow[1:-1])
        may_follow[self._begins] = True
        if not may_follow.all():
            raise ValueError(f"rows {self._rows} do not ascend within groups of {group_sizes}")
        num_h = len(self._rows) * h_stride
        self._scratch = np.empty(
            num_h + num_threads * _CHUNK * wide_stride + _LINE, dtype=np.float32
        )
        self._site_tables = site_tables
        line_bytes = 4 * _LINE
        h = -(-self._scratch.ctypes.data // line_bytes) * line_bytes
        self._struct = _Step(
            sites=self._sites.ctypes.data,
            rows=self._rows.ctypes.data,
            begins=self._begins.ctypes.data,
            h=h,
            wide=h + 4 * num_h,
            h_stride=h_stride,
            wide_stride=wide_stride,
            num_groups=len(group_sizes),
            num_threads=num_threads,
        )
        self.address = ctypes.addressof(self._struct)


def blocked_outputs(b_NR: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """B (N, R) in the order lora.c reads it: (ceil(N / 32), R, 32), padded with zeros."""
    num_outputs, rank = b_NR.shape
    num_blocks = -(-num_outputs // OUT_BLOCK)
    padded = np.zeros((num_blocks * OUT_BLOCK, rank), dtype=b_NR.dtype)
    padded[:num_outputs] = b_NR
    return np.ascontiguousarray(padded.reshape(num_blocks, OUT_BLOCK, rank).transpose(0, 2, 1))


def padded_rank(rank: int) -> int:
    """Ranks that a slice takes in matrix tiles: equal steps of at most 32, each even."""
    steps = -(-rank // _TILE_K)
    return steps * _round_up(-(-rank // max(steps, 1)), 2)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class LoraKernel:
    """The compiled kernel."""

    def __init__(self, cache_dir: Path) -> None:
        """Load it, compiling it first if need be.

        Raises:
            NativeBuildError: not on this machine.
        """
        library = load_library("lora", cache_dir)
        # Whether weights may be SiteFormat.TILES on this machine.
        self.has_tiles: Final[bool] = library.lora_has_tiles() != 0
        self._count_planes = library.lora_count_planes
        self._count_planes.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._pack_tiles = library.lora_pack_tiles
        self._pack_tiles.restype = None
        self._pack_tiles.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),
            *((ctypes.c_int64,) * 5),
        )
        self._embed = library.lora_embed
        self._embed.restype = None
        self._embed.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_void_p,
        )
        self._add = library.lora_add
        self.add_address = address_of(self._add)  # for layers.c
        self._add.restype = None
        self._add.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
        )

    def count_planes(self, weights: npt.NDArray[Any]) -> int:
        """How many bf16 must be added up for these weights, within 2^-16 of each: 1 where bf16 holds them, else 2.

        0: some are too large for bf16. Two hold fp16 exactly.
        Args:
            weights: fp32, or bits of bf16 as uint16; contiguous.
        """
        if weights.dtype == np.uint16:
            return 1
        planes: int = self._count_planes(weights.ctypes.data, weights.size)
        return planes

    def tiled_inputs(
        self, slices_RK: Sequence[npt.NDArray[Any]], planes: int
    ) -> npt.NDArray[np.uint16]:
        """The A of a site's slices in the order of lora_tiles.h, as one flat array.

        Args:
            slices_RK: fp32, or bits of bf16 as uint16; contiguous.
            planes: at least what `count_planes` says of each.
        """
        num_ranks = _round_up(sum(padded_rank(len(a_RK)) for a_RK in slices_RK), _HALF_TILE)
        depth = _round_up(slices_RK[0].shape[1], _TILE_K)
        packed = np.zeros(num_ranks * depth * planes, dtype=np.uint16)
        begin = 0
        for a_RK in slices_RK:
            self._pack(packed, a_RK, planes, begin, num_ranks, depth)
            begin += padded_rank(len(a_RK))
        return packed

    def tiled_outputs(self, b_NR: npt.NDArray[Any], planes: int) -> npt.NDArray[np.uint16]:
        """The B of a slice: (ceil(N / 16), planes, padded rank / 2, 16, 2), padded with zeros.

        Args:
            b_NR: fp32, or bits of bf16 as uint16; contiguous.
            planes: at least what `count_planes` says of it.
        """
        num_outputs, rank = b_NR.shape
        num_blocks, depth = -(-num_outputs // _TILE), padded_rank(rank)
        packed = np.zeros((num_blocks, planes, depth // 2, _TILE, 2), dtype=np.uint16)
        self._pack(packed, b_NR, planes, 0, num_blocks * _TILE, depth)
        return packed

    def _pack(
        self,
        packed: npt.NDArray[np.uint16],
        weights: npt.NDArray[Any],
        planes: int,
        begin: int,
        num_rows: int,
        depth: int,
    ) -> None:
        self._pack_tiles(
            packed.ctypes.data,
            weights.ctypes.data,
            weights.dtype == np.uint16,
            planes,
            *weights.shape,
            begin,
            num_rows,
            depth,
        )

    def add(
        self, y_TN: Tensor, x_TK: Tensor, slices_address: int, site_index: int, step: LoraStep
    ) -> None:
        """y[row] += B (scale * (A x[row])) in place, for every row of `step`.

        Shapes: T rows, K inputs, N outputs over all slices.
        Args:
            y_TN: (T, N) bf16 or fp32, contiguous.   x_TK: (T, K), dtype of y, contiguous.
            slices_address: of the `SliceOffsets.begins` of the site.
            site_index: entry of the adapters' site tables.
        Raises:
            ValueError: dtype or layout differ from the above, or the weights are for bf16 rows only.
        """
        dtype = y_TN.dtype
        if dtype is not x_TK.dtype or not (dtype is torch.bfloat16 or dtype is torch.float32):
            raise ValueError(f"y is {dtype} and x {x_TK.dtype}: both must be bf16 or fp32")
        if not (y_TN.is_contiguous() and x_TK.is_contiguous()):
            raise ValueError("x and y must be contiguous")
        if step.is_tiled and dtype is not torch.bfloat16:
            raise ValueError(f"x is {dtype}, the weights are laid out for bf16 rows")
        self._add(
            y_TN.data_ptr(),
            x_TK.data_ptr(),
            dtype is torch.bfloat16,
            x_TK.shape[1],
            y_TN.shape[1],
            slices_address,
            site_index,
            step.address,
        )

    def embed(self, y_TN: Tensor, token_T: Tensor, site_index: int, step: LoraStep) -> None:
        """y[row] += B (scale * A[:, token[row]]) in place, for every row of `step`.

        Shapes: T rows, N outputs.
        Args:
            y_TN: (T, N) bf16 or fp32, contiguous.   token_T: (T,) int64, contiguous, below the vocabulary.
            site_index: entry of the adapters' site tables; its `a` is (vocabulary, rank).
        Raises:
            ValueError: dtype or layout differ from the above.
        """
        dtype = y_TN.dtype
        if not (dtype is torch.bfloat16 or dtype is torch.float32):
            raise ValueError(f"y is {dtype}: it must be bf16 or fp32")
        if token_T.dtype is not torch.int64 or len(token_T) != len(y_TN):
            raise ValueError(f"token is {token_T.shape} {token_T.dtype}, y has {len(y_TN)} rows")
        if not (y_TN.is_contiguous() and token_T.is_contiguous()):
            raise ValueError("token and y must be contiguous")
        self._embed(
            y_TN.data_ptr(),
            token_T.data_ptr(),
            dtype is torch.bfloat16,
            y_TN.shape[1],
            site_index,
            step.address,
        )
