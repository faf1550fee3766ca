"""Makes an adapter's image: what is copied into a slot, as `lora_slots` lays it out. On the host, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex_kernels.lora_slots import (
    MAX_SLICES,
    SITE_HEADER,
    UNIT_BYTES,
    a_row_length,
    padded_rank,
)


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The pair of one slice of a site: the delta is scale * (x A^T) B^T."""

    position: int  # of the slice within its site
    a_RK: Tensor  # any float dtype; the embedding's too, (rank, vocabulary)
    b_NR: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraSitePairs:
    """What an adapter has for one site; no parts: it does not target it."""

    parts: tuple[LoraPart, ...] = ()
    is_embedding: bool = False


def image_size(sites: Sequence[LoraSitePairs], dtype: torch.dtype) -> int:
    """Bytes of the image, a multiple of 16."""
    size = len(sites) * SITE_HEADER.itemsize
    for site in sites:
        size += _a_bytes(site, dtype) + sum(_b_bytes(part, dtype) for part in site.parts)
    return size


def write_image(image: Tensor, sites: Sequence[LoraSitePairs], dtype: torch.dtype) -> None:
    """Lay out header and weights.

    Args:
        image: zeroed uint8 on the CPU, `image_size` bytes.
        dtype: of the model; weights are rounded to it where they are stored wider.

    Raises:
        ValueError: the image has another size, or parts do not fit together.
    """
    if image.dtype != torch.uint8 or image.numel() != image_size(sites, dtype):
        raise ValueError(f"image is {image.numel()} {image.dtype}, not {image_size(sites, dtype)}")
    headers = np.zeros(len(sites), SITE_HEADER)
    used = headers.nbytes

    def take(num_bytes: int) -> tuple[int, Tensor]:
        nonlocal used
        begin, used = used, used + num_bytes
        return begin // UNIT_BYTES, image[begin:used].view(dtype)

    for header, site in zip(headers, sites, strict=True):
        if not site.parts:
            continue
        _check(site)
        total = sum(padded_rank(part.a_RK.shape[0]) for part in site.parts)
        num_inputs = site.parts[0].a_RK.shape[1]
        header["rank"] = total
        header["a_unit"], a_memory = take(_a_bytes(site, dtype))
        if site.is_embedding:
            a_RK = a_memory.view(num_inputs, total).T
        else:
            a_RK = a_memory.view(total, a_row_length(num_inputs))[:, :num_inputs]
        h_begin = 0
        for part in site.parts:
            rank = part.a_RK.shape[0]
            a_RK[h_begin : h_begin + rank].copy_(part.a_RK)
            record = header["slices"][part.position]
            record["rank"], record["scale"] = padded_rank(rank), part.scale
            record["h_begin"] = h_begin
            record["b_unit"], b_memory = take(_b_bytes(part, dtype))
            num_outputs = part.b_NR.shape[0]
            b_memory[: num_outputs * padded_rank(rank)].view(num_outputs, -1)[:, :rank].copy_(
                part.b_NR
            )
            h_begin += padded_rank(rank)
    image[: headers.nbytes].numpy()[:] = headers.view(np.uint8)


def _a_bytes(site: LoraSitePairs, dtype: torch.dtype) -> int:
    if not site.parts:
        return 0
    total = sum(padded_rank(part.a_RK.shape[0]) for part in site.parts)
    num_inputs = site.parts[0].a_RK.shape[1]
    # Ranks are multiples of 16, and so are rows of A elsewhere: both end at a unit.
    return total * (num_inputs if site.is_embedding else a_row_length(num_inputs)) * dtype.itemsize


def _b_bytes(part: LoraPart, dtype: torch.dtype) -> int:
    return part.b_NR.shape[0] * padded_rank(part.a_RK.shape[0]) * dtype.itemsize


def _check(site: LoraSitePairs) -> None:
    first = site.parts[0]
    positions = [part.position for part in site.parts]
    if len(set(positions)) != len(positions) or not set(positions) <= set(range(MAX_SLICES)):
        raise ValueError(f"slices at positions {positions}: each once, below {MAX_SLICES}")
    if site.is_embedding and len(site.parts) != 1:
        raise ValueError(f"the embedding has {len(site.parts)} slices, not one")
    for part in site.parts:
        rank, num_inputs = part.a_RK.shape
        if part.b_NR.ndim != 2 or part.b_NR.shape[1] != rank or not rank:
            raise ValueError(f"A is {tuple(part.a_RK.shape)}, B is {tuple(part.b_NR.shape)}")
        if num_inputs != first.a_RK.shape[1]:
            raise ValueError(f"A has {num_inputs} inputs, another slice {first.a_RK.shape[1]}")
