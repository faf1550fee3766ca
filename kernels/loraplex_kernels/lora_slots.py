"""How adapters lie in device memory: one slot each, a header first, then the weights of all sites.

All slots are one buffer. A slot is filled by a single copy of an *image*, made on the host:

    header   one record of 64 bytes per site (SITE_HEADER): where A and the slices' B begin, ranks, scales
    weights  per site A, then the B of each slice, in the model's dtype, each at a multiple of 16 bytes

so an adapter arrives whole or not at all, tables and weights in stream order, at addresses that never change:
recorded launches (CUDA graphs) serve whatever a slot holds. A kernel reads the record of (slot, site) first and
leaves where nothing is targeted; what lies behind an image in its slot is never read.

A's of a site's slices are stacked: (rank of all slices, inputs), so that x is read once for q, k and v. A slice's
rank is padded with zeros to a multiple of 16, the tensor cores' step. B is (outputs, rank) row by row. The
embedding's A is (vocabulary, rank): its rows are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SLICES: Final = 3
# Offsets count in units of 16 bytes: so 32 bits reach 32 GiB, and the compiler sees the alignment.
UNIT_BYTES: Final = 16
RANK_MULTIPLE: Final = 16

SITE_HEADER: Final = np.dtype(
    [
        ("a_unit", np.int32),  # first unit of A, counted from the slot's begin
        ("rank", np.int32),  # of all slices; 0: the adapter does not target the site
        ("unused", np.int32, (2,)),
        (
            "slices",
            [
                ("rank", np.int32),  # padded; 0: not targeted
                ("scale", np.float32),
                ("b_unit", np.int32),  # first unit of B, counted from the slot's begin
                ("h_begin", np.int32),  # its first column of h
            ],
            (MAX_SLICES,),
        ),
    ]
)
_SITE_WORDS: Final = SITE_HEADER.itemsize // 4
SITE_WORDS: Final = tl.constexpr(_SITE_WORDS)


def padded_rank(rank: int) -> int:
    """The next multiple of RANK_MULTIPLE."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def a_row_length(num_inputs: int) -> int:
    """Numbers from one row of A to the next: 16-byte aligned in every dtype."""
    return -(-num_inputs // 16) * 16


@dataclass(frozen=True, slots=True)
class LoraSlots:
    """The buffer of all slots, as kernels take it.

    `weights` and `headers` are two views of the same memory.
    """

    weights: Tensor  # flat, model dtype
    headers: Tensor  # flat, int32
    slot_units: int  # units of 16 bytes from one slot to the next
    num_slots: int
    num_sites: int

    @classmethod
    def over(
        cls, memory: Tensor, *, dtype: torch.dtype, num_slots: int, num_sites: int
    ) -> LoraSlots:
        """See `memory` as slots of equal size.

        Args:
            memory: flat uint8, 16-byte aligned.

        Raises:
            ValueError: the memory is not made of slots that hold a header each.
        """
        slot_bytes = memory.numel() // max(1, num_slots)
        header_bytes = num_sites * SITE_HEADER.itemsize
        if memory.dtype != torch.uint8 or memory.ndim != 1 or memory.data_ptr() % UNIT_BYTES:
            raise ValueError("memory must be flat, uint8 and begin at a multiple of 16 bytes")
        if slot_bytes * num_slots != memory.numel() or slot_bytes % UNIT_BYTES:
            raise ValueError(f"{memory.numel()} bytes are not {num_slots} slots of 16-byte units")
        if slot_bytes < header_bytes:
            raise ValueError(f"a slot has {slot_bytes} bytes, its header alone {header_bytes}")
        return cls(
            weights=memory.view(dtype),
            headers=memory.view(torch.int32),
            slot_units=slot_bytes // UNIT_BYTES,
            num_slots=num_slots,
            num_sites=num_sites,
        )


@triton.jit
def site_header(headers_ptr, slot, slot_units, site):  # noqa: ANN201 -- jitted
    """Address of the record of (slot, site)."""
    return headers_ptr + slot.to(tl.int64) * slot_units * 4 + site * SITE_WORDS


@triton.jit
def slot_weights(weights_ptr, slot, slot_units, unit, UNIT: tl.constexpr):  # noqa: ANN201 -- jitted
    """Address of the weights at `unit` of a slot; UNIT numbers are 16 bytes."""
    return weights_ptr + (slot.to(tl.int64) * slot_units + unit) * UNIT
