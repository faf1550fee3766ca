"""What `tune` measures of the sampling kernels, at Llama-3.1-8B's vocabulary; every row filters by top-k and top-p.

Tokens do not depend on these plans: cutoffs are found in integers, and candidates are scored again in fp64. So both
columns are rewritten. Log-probabilities are rounded otherwise under another plan of draw or pick, so those two may
be rewritten in `invariant` only as long as one entry holds for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from loraplex_kernels.plans import COLUMNS, Column, Plan, PlanTable
from loraplex_kernels.sample_cutoff import KERNEL as CUTOFF_KERNEL
from loraplex_kernels.sample_cutoff import sample_cutoff
from loraplex_kernels.sample_draw import KERNEL as DRAW_KERNEL
from loraplex_kernels.sample_draw import PICK_KERNEL, sample_draw, sample_pick
from loraplex_kernels.sample_rows import NUM_FIELDS, pack_rows
from loraplex_kernels.tune import Launch, TuneCase, candidates

_SIZE = 128_256
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tensors of one step, on the device."""

    logits_RV: Tensor
    rows_RF: Tensor
    found_2R: Tensor  # cutoffs, or tokens and status
    logprob_R: Tensor

    def cutoff(self, plan: Plan) -> Launch:
        """The search for cutoffs."""
        cutoff_R, last_R = self.found_2R.unbind(0)
        return lambda: sample_cutoff(self.logits_RV, self.rows_RF, cutoff_R, last_R, plan)

    def draw(self, draw: Plan, pick: Plan) -> Launch:
        """Both launches: smaller chunks are quicker and leave the second one more candidates."""

        def run() -> None:
            found = sample_draw(
                self.logits_RV, self.rows_RF, None, draw, has_bans=False, has_logprobs=True
            )
            sample_pick(
                *(self.logits_RV, self.rows_RF, found, *self.found_2R, self.logprob_R, pick),
                has_logprobs=True,
            )

        return run


def tune_cases(
    table: PlanTable, device: torch.device, *, size: int = _SIZE, most_rows: int = _MOST_ROWS
) -> Iterator[TuneCase]:
    """One case for each entry, at the most rows that it is chosen for; tensors are made when a plan is bound."""

    @cache
    def rows(count: int) -> _Rows:
        return _make_rows(count, size, device)

    for index, entry in enumerate(table.entries(CUTOFF_KERNEL)):
        count = min(entry.when.max_tokens or _MOST_ROWS, most_rows)
        tiles = {"BLOCK": (1024, 2048, 4096), "NUM_SPLITS": (1, 2, 4, 8, 16, 32)}
        space = candidates(tiles, warps=(4, 8, 16))
        yield TuneCase(
            CUTOFF_KERNEL,
            index,
            f"R={count} V={size}",
            [plan for plan in space if count * plan.config["NUM_SPLITS"] <= 8 * _MOST_ROWS],
            _bind_cutoff(rows, count),
            columns=COLUMNS,
        )

    def chosen(kernel: str, count: int) -> Plan:
        return table.choose(kernel, phase="decode", tokens=count, n=size)

    for kernel, space in (
        (
            DRAW_KERNEL,
            candidates({"CHUNK": (4096, 8192, 16_384), "BLOCK": (512, 1024, 2048)}, warps=(4, 8)),
        ),
        (PICK_KERNEL, candidates({}, warps=(1, 2, 4))),
    ):
        entries = table.entries(kernel)
        columns: tuple[Column, ...] = COLUMNS if len(entries) == 1 else ("fast",)
        for index, entry in enumerate(entries):
            count = min(entry.when.max_tokens or 64, most_rows)
            bind = (
                _bind_draw(rows, count, chosen(PICK_KERNEL, count))
                if kernel == DRAW_KERNEL
                else _bind_pick(rows, count, chosen(DRAW_KERNEL, count))
            )
            yield TuneCase(kernel, index, f"R={count} V={size}", space, bind, columns=columns)


MakeRows = Callable[[int], _Rows]


def _bind_cutoff(rows: MakeRows, count: int) -> Callable[[Plan], Launch]:
    return lambda plan: rows(count).cutoff(plan)


def _bind_draw(rows: MakeRows, count: int, pick: Plan) -> Callable[[Plan], Launch]:
    return lambda plan: rows(count).draw(plan, pick)


def _bind_pick(rows: MakeRows, count: int, draw: Plan) -> Callable[[Plan], Launch]:
    return lambda plan: rows(count).draw(draw, plan)


def _make_rows(count: int, size: int, device: torch.device) -> _Rows:
    packed = np.empty((count, NUM_FIELDS), np.int64)
    pack_rows(
        packed,
        temperature_R=np.full(count, 0.8),
        top_k_R=np.full(count, 50),
        top_p_R=np.full(count, 0.9),
        min_p_R=np.zeros(count),
        seed_R=np.arange(count),
        position_R=np.arange(count),
    )
    return _Rows(
        3.0 * torch.randn(count, size, device=device, dtype=torch.bfloat16),
        torch.from_numpy(packed).to(device),
        torch.empty((2, count), dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
    )
