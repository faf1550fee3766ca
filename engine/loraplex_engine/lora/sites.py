"""Where LoRA deltas go: the four merged linears of a layer, their slices and sizes; embedding and head.

A site is numbered layer * 4 + its place in `SITES`, embedding and head after the last layer's; that
number indexes every per-adapter table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex_engine.artifact import ModelShape
from loraplex_engine.lora.seam import SITE_SLICES, LoraSite

SITES: Final[tuple[LoraSite, ...]] = ("qkv", "o", "gate_up", "down")
SITE_INDEX: Final[dict[LoraSite, int]] = {site: index for index, site in enumerate(SITES)}


def num_sites(shape: ModelShape) -> int:
    """Entries of a per-adapter table."""
    return head_index(shape) + 1


def embedding_index(shape: ModelShape) -> int:
    """The embedding's number."""
    return shape.num_layers * len(SITES)


def head_index(shape: ModelShape) -> int:
    """The number of lm_head."""
    return embedding_index(shape) + 1


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """One merged linear: K inputs, and its slices as (module name, first output, outputs)."""

    site: LoraSite
    num_inputs: int
    slices: tuple[tuple[str, int, int], ...]

    @property
    def num_outputs(self) -> int:
        """N, over all slices."""
        return sum(width for _, _, width in self.slices)


def site_layouts(shape: ModelShape) -> tuple[SiteLayout, ...]:
    """The four sites of a layer of this model, in the order of `SITES`."""
    linears = shape.linear_shapes()
    layouts = []
    for site in SITES:
        slices, begin = [], 0
        for name in SITE_SLICES[site]:
            width = linears[name][0]
            slices.append((name, begin, width))
            begin += width
        num_inputs = linears[SITE_SLICES[site][0]][1]
        layouts.append(SiteLayout(site=site, num_inputs=num_inputs, slices=tuple(slices)))
    return tuple(layouts)
