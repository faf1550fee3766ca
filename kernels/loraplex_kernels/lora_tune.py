"""What `tune` measures of the LoRA kernels: shrink and expand of one site, together.

A shrink with more spans of K is quicker and leaves its expand more planes to read, so a candidate for the one is
timed with the other behind it. The site is qkv of Llama-3.1-8B; up to eight adapters of one rank share the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from loraplex_kernels.lora_aot import NUM_INPUTS, WIDTHS, LoraWork, works
from loraplex_kernels.lora_expand import lora_expand
from loraplex_kernels.lora_image import LoraPart, LoraSitePairs, image_size, write_image
from loraplex_kernels.lora_route import LoraRoute, num_blocks_for, route_rows
from loraplex_kernels.lora_rows import lora_rows_expand, lora_rows_shrink
from loraplex_kernels.lora_shrink import lora_shrink
from loraplex_kernels.lora_slots import LoraSlots, a_row_length
from loraplex_kernels.plans import Plan, PlanTable
from loraplex_kernels.tune import Launch, TuneCase, candidates

_MAX_ADAPTERS = 8


@dataclass(frozen=True, slots=True)
class _Site:
    """Tensors of one launch, on the device."""

    x_TK: Tensor
    y_TN: Tensor
    slots: LoraSlots
    route: LoraRoute
    rank: int  # over all slices
    widths: tuple[int, ...]

    def launch(self, shrink: Plan, expand: Plan) -> Launch:
        """Both kernels under these plans."""
        is_grouped = self.route.block_rows > 1
        first, second = (
            (lora_shrink, lora_expand) if is_grouped else (lora_rows_shrink, lora_rows_expand)
        )
        h_SPR = torch.empty(
            shrink.config["SPLIT_K"],
            self.route.num_places,
            self.rank,
            dtype=torch.float32,
            device=self.x_TK.device,
        )
        stride = a_row_length(self.x_TK.shape[1])

        def run() -> None:
            first(
                *(self.x_TK, self.slots, 0, self.route, h_SPR, shrink),
                a_stride=stride,
                max_rank=self.rank,
            )
            second(self.y_TN, h_SPR, self.slots, 0, self.route, self.widths, expand)

        return run


def tune_cases(
    table: PlanTable,
    device: torch.device,
    *,
    num_inputs: int = NUM_INPUTS,
    widths: tuple[int, ...] = WIDTHS,
) -> Iterator[TuneCase]:
    """One case for each bf16 entry of the four kernels, at the longest step that it is chosen for."""
    for is_grouped in (True, False):
        kernels = (
            ("lora_shrink", "lora_expand")
            if is_grouped
            else ("lora_rows_shrink", "lora_rows_expand")
        )
        found = list(works(table, ("bf16",), is_grouped=is_grouped))
        for position, kernel in enumerate(kernels):
            for index, entry in enumerate(table.entries(kernel)):
                fitting = [w for w in found if w.choose(table, kernel) is entry.plan]
                if not fitting:
                    continue  # another dtype's, or for inputs wider than the site's
                work = fitting[-1]
                # Made when a plan is bound, so that asking for another kernel's cases costs nothing.
                site = cache(partial(_make_site, work, device, num_inputs, widths))
                other = work.choose(table, kernels[1 - position])
                yield TuneCase(
                    kernel,
                    index,
                    f"T={work.tokens} L={min(work.tokens, _MAX_ADAPTERS)} r={work.rank}",
                    _space(kernel, work),
                    _binder(site, other, is_shrink=position == 0),
                )


def _binder(site: Callable[[], _Site], other: Plan, *, is_shrink: bool) -> Callable[[Plan], Launch]:
    if is_shrink:
        return lambda plan: site().launch(plan, other)
    return lambda plan: site().launch(other, plan)


def _space(kernel: str, work: LoraWork) -> Sequence[Plan]:
    if kernel == "lora_shrink":
        spans = (4, 8, 16, 32) if work.phase == "decode" else (1, 2, 4)
        tiles = {"BLOCK_R": (16, 32, 64), "BLOCK_K": (64, 128, 256), "SPLIT_K": spans}
        return candidates(tiles, warps=(4,), stages=(3, 4))
    if kernel == "lora_expand":
        return candidates(
            {"BLOCK_N": (64, 128, 256), "BLOCK_R": (16, 32, 64)}, warps=(4, 8), stages=(1, 2)
        )
    if kernel == "lora_rows_shrink":
        return candidates(
            {"BLOCK_R": (4, 8, 16), "BLOCK_K": (256, 512, 1024), "SPLIT_K": (2, 4, 8)},
            warps=(2, 4),
            stages=(1, 2),
        )
    return candidates({"BLOCK_N": (32, 64, 128), "BLOCK_R": (16, 32, 64)}, warps=(2, 4, 8))


def _make_site(
    work: LoraWork, device: torch.device, num_inputs: int, widths: tuple[int, ...]
) -> _Site:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_adapters = min(work.tokens, _MAX_ADAPTERS)
    parts = tuple(
        LoraPart(position, draw(work.rank, num_inputs), draw(width, work.rank), 1.0)
        for position, width in enumerate(widths)
    )
    sites = [LoraSitePairs(parts)]
    image = torch.zeros(image_size(sites, dtype), dtype=torch.uint8)
    write_image(image, sites, dtype)
    # The same numbers in every slot; what counts is that each is read from memory of its own.
    memory = image.repeat(num_adapters).to(device)
    slot_T = np.arange(work.tokens, dtype=np.int32) % num_adapters
    num_blocks = num_blocks_for(work.tokens, num_adapters, work.block_rows)
    row_P, slot_B = np.empty(num_blocks * work.block_rows, np.int32), np.empty(num_blocks, np.int32)
    route_rows(slot_T, block_rows=work.block_rows, row_P=row_P, slot_B=slot_B)
    return _Site(
        x_TK=draw(work.tokens, num_inputs).to(device),
        y_TN=draw(work.tokens, sum(widths)).to(device),
        slots=LoraSlots.over(memory, dtype=dtype, num_slots=num_adapters, num_sites=1),
        route=LoraRoute(
            torch.from_numpy(row_P).to(device),
            torch.from_numpy(slot_B).to(device),
            num_blocks,
            work.block_rows,
        ),
        rank=work.rank * len(widths),
        widths=widths,
    )
