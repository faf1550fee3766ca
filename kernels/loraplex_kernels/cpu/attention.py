"""Python side of attention.c: tasks laid out once per step, then one foreign call per layer.

Contract of rounding and order: the header of attention.c. Reference: torch's SDPA over the gathered
keys, within rounding.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_kernels.cpu.build import address_of, load_library

TILE: Final = 64
_LINE: Final = 64  # bytes; loads that cross lines take twice as long
# Rows of an item: enough to make good use of a tile in cache, few enough to stay there themselves. Tiles in hardware
# take keys and values that were packed for them: more rows share that.
_ITEM_ROWS: Final = 48
_ITEM_ROWS_IN_TILES: Final = 192
# Items that a thread gets when work is split for want of items: they end at different times.
_ITEMS_PER_THREAD: Final = 3
# Tiles that are worth an item of their own, and perhaps the wake-up of a thread.
_MIN_TILES: Final = 4
# What the parts of split items may take in a step, in floats (64 MiB): beyond it, items stay whole.
_MAX_PARTIALS: Final = 2**24
# Cost of a key beside a row's work on it, in rows: it comes from memory, and is packed.
_KEY_COST: Final = 6
_KEY_COST_IN_TILES: Final = 32

# attention_item in attention.c
ITEM_DTYPE: Final = np.dtype(
    [
        ("first_row", np.int32),
        ("count", np.int32),
        ("position", np.int32),
        ("sequence", np.int32),
        ("first_head", np.int32),
        ("num_heads", np.int32),
        ("first_tile", np.int32),
        ("end_tile", np.int32),
        ("partial", np.int64),
    ]
)

Int32Array = npt.NDArray[np.int32]


class _Shape(ctypes.Structure):
    """attention_shape in attention.c."""

    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("max_rows", ctypes.c_int32),
        ("in_tiles", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _Call(ctypes.Structure):
    """attention_call in attention.c."""

    _fields_ = (
        ("shape", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("table_width", ctypes.c_int32),
    )


class AttentionWork:
    """One step's items, as attention.c wants them; keeps alive what it points to."""

    __slots__ = ("_partials", "_shape", "_table_BM", "call", "items", "merges")

    def __init__(
        self,
        shape: _Shape,
        items: npt.NDArray[Any],
        merges: npt.NDArray[Any],
        table_BM: Int32Array,
        num_partials: int,
    ) -> None:
        self.items, self.merges = items, merges  # (num,) of ITEM_DTYPE
        self._shape = shape
        self._table_BM = np.ascontiguousarray(table_BM, dtype=np.int32)
        self._partials = np.empty(num_partials, dtype=np.float32)
        self.call = _Call(
            shape=ctypes.addressof(shape),
            table=self._table_BM.ctypes.data,
            partials=self._partials.ctypes.data,
            table_width=self._table_BM.shape[1],
        )


class NativeAttentionKernel:
    """The compiled kernel for one attention shape, with its threads' scratch."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        cache_dir: Path,
        num_threads: int,
        window: int | None = None,
        soft_cap: float | None = None,
        in_tiles: bool | None = None,
    ) -> None:
        """Compile or load the kernel.

        Args:
            in_tiles: compute bf16 in tiles in hardware, for all rows alike, with bits of its own; None: where the
                CPU has them.
            window: keys that a row sees, its own counted; None: all.
            soft_cap: scores become soft_cap * tanh(score / soft_cap); None: as they are.

        Raises:
            ValueError: a shape or dtype the kernel does not have; tiles that this CPU does not have.
            NativeBuildError: no compiler here, or it failed.
        """
        if head_dim % 8:
            raise ValueError(f"head_dim {head_dim} is not a multiple of 8")
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads do not divide among {num_kv_heads} kv heads")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} is neither float32 nor bfloat16")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}: a row sees its own key at least, use 1 or more")
        if soft_cap is not None and not soft_cap > 0:
            raise ValueError(f"soft_cap is {soft_cap}: use more than 0, or None for none")
        library = load_library("attention", cache_dir)
        has_tiles = dtype == torch.bfloat16 and bool(library.attention_may_use_tiles())
        if in_tiles and not has_tiles:
            raise ValueError("this CPU computes no bf16 in tiles: use in_tiles=None")
        self.in_tiles = has_tiles if in_tiles is None else in_tiles
        item_rows = _ITEM_ROWS_IN_TILES if self.in_tiles else _ITEM_ROWS
        self._key_cost = _KEY_COST_IN_TILES if self.in_tiles else _KEY_COST
        # Floats of a row's sum of values, and of what says how to join it.
        sum_width = -(-head_dim // 32) * 32 if self.in_tiles else head_dim
        self._partial_floats = sum_width + 8
        self._query_tile = max(1, item_rows * num_kv_heads // num_heads)
        self._shape = _Shape(
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            int(dtype == torch.bfloat16),
            window or 0,
            max(num_heads, item_rows),
            int(self.in_tiles),
            head_dim**-0.5,
            soft_cap or 0.0,
        )
        library.attention_scratch_floats.restype = ctypes.c_size_t
        library.attention_scratch_floats.argtypes = (ctypes.c_void_p,)
        self._forward = library.attention_forward
        self._forward.restype = None
        self._forward.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
        )
        self.num_threads = num_threads
        self.forward_address = address_of(self._forward)
        size = int(library.attention_scratch_floats(ctypes.byref(self._shape)))
        # Zeros: rows that fill up a vector of eight are computed, though not used.
        self._scratch = np.zeros(size * num_threads + _LINE // 4, dtype=np.float32)
        self.scratch_address = -(-self._scratch.ctypes.data // _LINE) * _LINE

    def plan(
        self, num_computed_B: Int32Array, num_scheduled_B: Int32Array, table_BM: Int32Array
    ) -> AttentionWork:
        """Cut B sequences' queries into items that keep all threads busy; once per step.

        Sequence b's queries are rows sum(num_scheduled[:b]) .. of the step, at positions
        num_computed[b] .. num_computed[b] + num_scheduled[b] - 1. How the work is cut changes no bit.

        Args:
            table_BM: block ids; not copied where it is contiguous int32.
        """
        shape, query_tile = self._shape, self._query_tile
        cuts_B = -(-num_scheduled_B // query_tile)
        sequence = np.repeat(np.arange(len(num_scheduled_B)), cuts_B)
        within = np.arange(len(sequence)) - np.repeat(np.cumsum(cuts_B) - cuts_B, cuts_B)
        offset = within * query_tile
        start_B = np.cumsum(num_scheduled_B) - num_scheduled_B
        tasks = np.zeros(len(sequence), dtype=ITEM_DTYPE)
        tasks["first_row"] = start_B[sequence] + offset
        tasks["count"] = count = np.minimum(query_tile, num_scheduled_B[sequence] - offset)
        tasks["position"] = position = num_computed_B[sequence] + offset
        tasks["sequence"] = sequence
        tasks["num_heads"] = shape.num_kv_heads
        end = position + count
        first = np.maximum(position + 1 - shape.window, 0) if shape.window else np.zeros_like(end)
        tasks["first_tile"] = first_tile = first // TILE
        tasks["end_tile"] = end_tile = -(-end // TILE)
        tasks["partial"] = -1

        # Few rows take all heads at once: a token's keys lie side by side.
        joint = count * shape.num_heads <= shape.max_rows
        items_of = np.where(joint, 1, shape.num_kv_heads)
        fold = shape.num_heads // shape.num_kv_heads
        cost = (end - first) * (count * fold + self._key_cost) * (shape.num_kv_heads // items_of)
        pieces = np.ones_like(count)
        if self.num_threads > 1:
            aim = max(int((cost * items_of).sum()) // (_ITEMS_PER_THREAD * self.num_threads), 1)
            pieces = np.minimum(
                -(-cost // aim), np.maximum((end_tile - first_tile) // _MIN_TILES, 1)
            )
        floats = self._partial_floats * shape.num_heads * count.astype(np.int64)  # of a tile
        size = np.where(pieces > 1, (end_tile - first_tile) * floats, 0)
        pieces[np.cumsum(size) > _MAX_PARTIALS] = 1
        if joint.all() and (pieces == 1).all():
            order = np.argsort(-cost, kind="stable")
            return AttentionWork(shape, tasks[order], tasks[:0], table_BM, 0)

        is_split = pieces > 1
        size = np.where(is_split, size, 0)
        tasks["partial"][is_split] = (np.cumsum(size) - size)[is_split]
        copies = pieces * items_of
        of = np.repeat(np.arange(len(tasks)), copies)
        place = np.arange(len(of)) - np.repeat(np.cumsum(copies) - copies, copies)
        items = tasks[of]
        head, piece = np.divmod(place, pieces[of])
        items["first_head"] = head
        items["num_heads"] = shape.num_kv_heads // items_of[of]
        tiles = (end_tile - first_tile)[of]
        items["first_tile"] = first_tile[of] + piece * tiles // pieces[of]
        items["end_tile"] = first_tile[of] + (piece + 1) * tiles // pieces[of]
        items["partial"] += np.where(
            is_split[of], (items["first_tile"] - first_tile[of]) * floats[of], 0
        )
        # The longest first: with few threads the last one to finish decides.
        order = np.argsort(-(cost // pieces)[of], kind="stable")
        return AttentionWork(shape, items[order], tasks[is_split], table_BM, int(size.sum()))

    def forward(self, q_TC: Tensor, out_TC: Tensor, kv: Tensor, work: AttentionWork) -> None:
        """Attend every row that `work` names; other rows of `out_TC` are left as they are.

        Args:
            q_TC: (T, C) with C >= H * D, the kernel's dtype; a row begins with its H * D rotated queries and is
                contiguous, as the rows of the merged qkv are.
            out_TC: (T, H * D), the kernel's dtype, rows contiguous.
            kv: (slots, 2, kv heads, D) of one layer, contiguous; the step's keys already stored.
        """
        call = work.call
        call.q, call.out, call.kv = q_TC.data_ptr(), out_TC.data_ptr(), kv.data_ptr()
        call.q_stride, call.out_stride = q_TC.stride(0), out_TC.stride(0)
        self._forward(
            ctypes.byref(call),
            work.items.ctypes.data,
            len(work.items),
            work.merges.ctypes.data,
            len(work.merges),
            self.scratch_address,
            self.num_threads,
        )
