"""Inputs of LoRA kernel tests: adapters in slots full of NaN, routes, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from loraplex_kernels import reference
from loraplex_kernels.lora_embed import lora_embed
from loraplex_kernels.lora_expand import lora_expand
from loraplex_kernels.lora_image import LoraPart, LoraSitePairs, image_size, write_image
from loraplex_kernels.lora_route import LoraRoute, num_blocks_for, route_rows
from loraplex_kernels.lora_rows import lora_rows_expand, lora_rows_shrink
from loraplex_kernels.lora_shrink import lora_shrink
from loraplex_kernels.lora_slots import LoraSlots, a_row_length, padded_rank
from loraplex_kernels.plans import Plan, PlanTable
from torch import Tensor

NOTHING, LINEAR, EMBEDDING = range(3)  # sites of every adapter here


def plan(**config: int) -> Plan:
    """Small tiles, so that small inputs have several."""
    return Plan(config, num_warps=4, num_stages=2, reason="a test's")


SHRINK = plan(BLOCK_R=32, BLOCK_K=32, SPLIT_K=2)
EXPAND = plan(BLOCK_N=32, BLOCK_R=16)
EMBED = plan(BLOCK_N=64, BLOCK_R=16)


class FewPrograms(PlanTable):
    """The `invariant` plans with tiles for tiny models: interpreted, time goes by the number of programs."""

    def choose(self, kernel: str, **facts: Any) -> Plan:
        """A plan for every step alike."""
        tiles = {
            "lora_shrink": {"BLOCK_R": 64, "BLOCK_K": 32, "SPLIT_K": 2},
            "lora_expand": {"BLOCK_N": 128, "BLOCK_R": 16},
        }
        chosen = super().choose(kernel, **facts)
        return replace(chosen, config=tiles.get(kernel, chosen.config))


FEW_PROGRAMS = FewPrograms("sm_90", "invariant")


@dataclass(frozen=True)
class Adapters:
    """Adapters of one linear site and one embedding, in slots; a part of rank 0 is not targeted."""

    slots: LoraSlots
    pairs: tuple[tuple[LoraSitePairs, ...], ...]  # by slot, by site
    num_inputs: int
    widths: tuple[int, ...]
    vocabulary: int

    @property
    def max_rank(self) -> int:
        """Of all slices, padded."""
        ranks = [
            sum(padded_rank(part.a_RK.shape[0]) for part in sites[LINEAR].parts)
            for sites in self.pairs
        ]
        return max(ranks)


def make_adapters(
    ranks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    num_inputs: int,
    widths: tuple[int, ...],
    vocabulary: int = 19,
    sizes: Sequence[float] | None = None,
    seed: int = 0,
) -> Adapters:
    """Random adapters; whatever no image covers, in front of the next slot, is NaN.

    Args:
        ranks: per slot, per slice of the linear; the embedding has the first one's.
        sizes: per slot, of its weights; None: so that deltas are of the size of y.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(size: float, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    pairs = []
    for slot, slices in enumerate(ranks):
        size = 0.3 if sizes is None else sizes[slot]
        parts = tuple(
            LoraPart(i, draw(size, r, num_inputs), draw(size, widths[i], r), 0.5 + i + slot)
            for i, r in enumerate(slices)
            if r
        )
        first = max(1, slices[0])
        embedding = LoraPart(0, draw(size, first, vocabulary), draw(size, widths[0], first), 1.5)
        pairs.append((LoraSitePairs(), LoraSitePairs(parts), LoraSitePairs((embedding,), True)))
    slot_bytes = max(image_size(sites, dtype) for sites in pairs) + 64
    memory = torch.full((len(pairs) * slot_bytes,), 0xFF, dtype=torch.uint8)
    for slot, sites in enumerate(pairs):
        image = torch.zeros(image_size(sites, dtype), dtype=torch.uint8)
        write_image(image, sites, dtype)
        memory[slot * slot_bytes : slot * slot_bytes + len(image)] = image
    slots = LoraSlots.over(memory, dtype=dtype, num_slots=len(pairs), num_sites=3)
    return Adapters(slots, tuple(pairs), num_inputs, widths, vocabulary)


def make_route(slot_T: Sequence[int], block_rows: int, *, spare_blocks: int = 1) -> LoraRoute:
    """A route with some blocks more than are needed."""
    array = np.asarray(slot_T, np.int32)
    num_active = len(np.unique(array[array >= 0]))
    num_blocks = num_blocks_for(len(array), num_active, block_rows) + spare_blocks
    row_P, slot_B = np.empty(num_blocks * block_rows, np.int32), np.empty(num_blocks, np.int32)
    route_rows(array, block_rows=block_rows, row_P=row_P, slot_B=slot_B)
    return LoraRoute(torch.from_numpy(row_P), torch.from_numpy(slot_B), num_blocks, block_rows)


def add_linear(
    y_TN: Tensor,
    x_TK: Tensor,
    adapters: Adapters,
    slot_T: Sequence[int],
    *,
    block_rows: int = 16,
    shrink: Plan = SHRINK,
    expand: Plan = EXPAND,
) -> Tensor:
    """A copy of y with the deltas added, through workspace full of NaN."""
    route = make_route(slot_T, block_rows)
    rank = adapters.max_rank
    h_SPR = torch.full((shrink.config["SPLIT_K"], route.num_places, rank), torch.nan)
    result = y_TN.clone()
    shrink_rows, expand_rows = (
        (lora_rows_shrink, lora_rows_expand) if block_rows == 1 else (lora_shrink, lora_expand)
    )
    stride = a_row_length(adapters.num_inputs)
    shrink_rows(x_TK, adapters.slots, LINEAR, route, h_SPR, shrink, a_stride=stride, max_rank=rank)
    expand_rows(result, h_SPR, adapters.slots, LINEAR, route, adapters.widths, expand)
    return result


def add_embedding(
    y_TH: Tensor,
    token_T: Tensor,
    adapters: Adapters,
    slot_T: Sequence[int],
    *,
    block_rows: int = 16,
    embed: Plan = EMBED,
) -> Tensor:
    """A copy of y with the embedding's deltas added."""
    result = y_TH.clone()
    route = make_route(slot_T, block_rows)
    lora_embed(result, token_T, adapters.slots, EMBEDDING, route, embed)
    return result


def expected_linear(
    y_TN: Tensor, x_TK: Tensor, adapters: Adapters, slot_T: Sequence[int]
) -> Tensor:
    """The reference, slice by slice, rounded once."""
    slots, result = torch.tensor(slot_T, dtype=torch.int32), y_TN.float()
    for position, width in enumerate(adapters.widths):
        begin = sum(adapters.widths[:position])
        parts = [
            next((p for p in sites[LINEAR].parts if p.position == position), None)
            for sites in adapters.pairs
        ]
        a_LRK, b_LNR, scale_L = _stacked(parts, adapters.num_inputs, width)
        h_TR = reference.lora_shrink(x_TK.float(), a_LRK, slots)
        part = slice(begin, begin + width)
        result[:, part] = reference.lora_expand(result[:, part], h_TR, b_LNR, slots, scale_L)
    return result.to(y_TN.dtype)


def expected_embedding(
    y_TH: Tensor, token_T: Tensor, adapters: Adapters, slot_T: Sequence[int]
) -> Tensor:
    """The reference, rounded once."""
    slots = torch.tensor(slot_T, dtype=torch.int32)
    parts = [sites[EMBEDDING].parts[0] for sites in adapters.pairs]
    a_LRV, b_LNR, scale_L = _stacked(parts, adapters.vocabulary, y_TH.shape[1])
    h_TR = reference.lora_embed_shrink(token_T, a_LRV, slots)
    return reference.lora_expand(y_TH, h_TR, b_LNR, slots, scale_L)


def _stacked(
    parts: Sequence[LoraPart | None], num_inputs: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    rank = max((part.a_RK.shape[0] for part in parts if part), default=1)
    a_LRK = torch.zeros(len(parts), rank, num_inputs)
    b_LNR = torch.zeros(len(parts), width, rank)
    scale_L = torch.zeros(len(parts))
    for slot, part in enumerate(parts):
        if part is not None:
            a_LRK[slot, : part.a_RK.shape[0]] = part.a_RK.float()
            b_LNR[slot, :, : part.a_RK.shape[0]] = part.b_NR.float()
            scale_L[slot] = part.scale
    return a_LRK, b_LNR, scale_L


def exact_linear(
    y_TN: Tensor, x_TK: Tensor, adapters: Adapters, slot_T: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(the result in fp64, the sum of the sizes of the terms that it is the sum of), both (T, N)."""
    result, size = y_TN.double(), y_TN.double().abs()
    for row, slot in enumerate(slot_T):
        if slot < 0:
            continue
        x_K = x_TK[row].double()
        for part in adapters.pairs[slot][LINEAR].parts:
            begin = sum(adapters.widths[: part.position])
            columns = slice(begin, begin + adapters.widths[part.position])
            a_RK, b_NR = part.a_RK.double(), part.b_NR.double()
            result[row, columns] += part.scale * (b_NR @ (a_RK @ x_K))
            size[row, columns] += abs(part.scale) * (b_NR.abs() @ (a_RK.abs() @ x_K.abs()))
    return result, size


def exact_embedding(
    y_TH: Tensor, token_T: Tensor, adapters: Adapters, slot_T: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """As `exact_linear`, of the embedding."""
    result, size = y_TH.double(), y_TH.double().abs()
    for row, slot in enumerate(slot_T):
        if slot < 0:
            continue
        part = adapters.pairs[slot][EMBEDDING].parts[0]
        a_R, b_NR = part.a_RK[:, int(token_T[row])].double(), part.b_NR.double()
        result[row] += part.scale * (b_NR @ a_R)
        size[row] += abs(part.scale) * (b_NR.abs() @ a_R.abs())
    return result, size
