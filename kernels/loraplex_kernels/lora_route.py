"""Which rows of a step use which adapter, in the form that the grouped LoRA kernels read.

Rows with an adapter are sorted by slot; each slot's rows fill blocks of `block_rows`, the last one padded. A
program takes one block and so meets exactly one adapter. Rows without an adapter are in no block and cost
nothing. The number of blocks that are launched depends on the capacity alone, never on the rows: launches may be
recorded. Built in numpy without a loop over rows; goes up with the rest of the step's metadata.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LoraRoute:
    """The device arrays of a route, and how much of them a launch covers.

    P = num_blocks * block_rows places.
    """

    row_P: Tensor  # int32, place -> row of x and y; -1: padding
    slot_B: Tensor  # int32, block -> slot; -1: unused, whatever its places say
    num_blocks: int
    block_rows: int

    def __post_init__(self) -> None:
        """Raises ValueError: arrays too short, or not int32."""
        for name, array, size in (
            ("row_P", self.row_P, self.num_blocks * self.block_rows),
            ("slot_B", self.slot_B, self.num_blocks),
        ):
            if array.dtype != torch.int32 or array.ndim != 1 or array.numel() < size:
                raise ValueError(
                    f"{name} is {tuple(array.shape)} {array.dtype}, not ({size},) int32 or longer"
                )

    @property
    def num_places(self) -> int:
        """Rows of h that a launch may write."""
        return self.num_blocks * self.block_rows


def num_blocks_for(num_rows: int, num_active: int, block_rows: int) -> int:
    """Blocks that always suffice for `num_rows` rows of at most `num_active` adapters.

    Each adapter's last block may hold a single row, and no block is without one.
    """
    return min(num_rows, (num_rows + num_active * (block_rows - 1)) // block_rows)


def route_rows(
    slot_T: Int32Array, *, block_rows: int, row_P: Int32Array, slot_B: Int32Array
) -> Int32Array:
    """Fill `row_P` and `slot_B` for these rows.

    Args:
        slot_T: per row its slot, -1: no adapter.
        row_P, slot_B: overwritten as a whole; their lengths are the capacity.

    Returns:
        The slots in use, ascending.

    Raises:
        ValueError: more blocks are needed than there are, or the capacities do not agree.
    """
    num_blocks = len(slot_B)
    if len(row_P) != num_blocks * block_rows:
        raise ValueError(f"{len(row_P)} places are not {num_blocks} blocks of {block_rows}")
    # Sixteen bits are sorted by radix, in linear time.
    order = np.argsort(slot_T.astype(np.int16), kind="stable")
    sorted_T = slot_T[order]
    first = int(np.searchsorted(sorted_T, 0))
    rows, slots = order[first:], sorted_T[first:]
    row_P.fill(-1)
    slot_B.fill(-1)
    if not len(rows):
        return slots
    begins = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1))
    counts = np.diff(begins, append=len(rows))
    blocks = -(-counts // block_rows)
    ends = np.cumsum(blocks)
    if ends[-1] > num_blocks:
        raise ValueError(f"{ends[-1]} blocks are needed, the route has {num_blocks}")
    # A group's rows move back by what the padding of the groups before it takes.
    shift = (ends - blocks) * block_rows - begins
    row_P[np.arange(len(rows)) + np.repeat(shift, counts)] = rows
    active: Int32Array = slots[begins]
    slot_B[: ends[-1]] = np.repeat(active, blocks)
    return active
