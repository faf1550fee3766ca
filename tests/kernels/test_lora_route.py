"""Routes: every row with an adapter stands in exactly one block, with rows of its adapter only."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loraplex_kernels.lora_route import LoraRoute, num_blocks_for, route_rows
from loraplex_kernels.plans import COLUMNS, open_plans
from loraplex_kernels.support import ARCHITECTURES


def route(slots: list[int], block_rows: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    row_P = np.full(num_blocks * block_rows, 77, np.int32)
    slot_B = np.full(num_blocks, 77, np.int32)
    active = route_rows(
        np.array(slots, np.int32), block_rows=block_rows, row_P=row_P, slot_B=slot_B
    )
    assert active.tolist() == sorted({slot for slot in slots if slot >= 0})
    return row_P, slot_B


def test_rows_stand_by_slot_in_their_order() -> None:
    row_P, slot_B = route([2, -1, 0, 2, 2, 0, 2, 2], block_rows=4, num_blocks=4)

    assert row_P.reshape(4, 4).tolist() == [
        [2, 5, -1, -1],
        [0, 3, 4, 6],
        [7, -1, -1, -1],
        [-1, -1, -1, -1],
    ]
    assert slot_B.tolist() == [0, 2, 2, -1]


@given(
    slots=st.lists(st.integers(-1, 70), max_size=200),
    block_rows=st.sampled_from([1, 2, 16, 64]),
    spare=st.integers(0, 3),
)
def test_every_routed_row_is_in_one_block_of_its_slot(
    slots: list[int], block_rows: int, spare: int
) -> None:
    num_active = len({slot for slot in slots if slot >= 0})
    num_blocks = num_blocks_for(len(slots), num_active, block_rows) + spare

    row_P, slot_B = route(slots, block_rows, num_blocks)

    found = row_P[row_P >= 0]
    assert sorted(found.tolist()) == [row for row, slot in enumerate(slots) if slot >= 0]
    for slot, places in zip(slot_B.tolist(), row_P.reshape(-1, block_rows), strict=True):
        rows = places[places >= 0].tolist()
        assert rows == sorted(rows)
        assert {slots[row] for row in rows} == ({slot} if slot >= 0 else set())


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9), block_rows=st.integers(1, 20))
def test_the_capacity_is_reached_but_never_passed(sizes: list[int], block_rows: int) -> None:
    """For so many rows and adapters; one row each but for one adapter needs the most blocks."""
    num_rows, num_active = sum(sizes), len(sizes)
    capacity = num_blocks_for(num_rows, num_active, block_rows)

    assert sum(-(-size // block_rows) for size in sizes) <= capacity
    most = num_active - 1 + -(-(num_rows - num_active + 1) // block_rows)
    assert most <= capacity <= most + num_active


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks are needed, the route has 1"):
        route([0, 1], block_rows=16, num_blocks=1)
    with pytest.raises(ValueError, match="5 places are not 2 blocks of 4"):
        route_rows(
            np.zeros(1, np.int32),
            block_rows=4,
            row_P=np.zeros(5, np.int32),
            slot_B=np.zeros(2, np.int32),
        )
    with pytest.raises(ValueError, match="row_P is"):
        LoraRoute(torch.zeros(7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 2, 4)
    with pytest.raises(ValueError, match="slot_B is"):
        LoraRoute(torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), 2, 4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_invariant_plans_are_one_plan(arch: str) -> None:
    """Blocks, tiles and spans of K are the same for every row count, rank and phase."""
    table = open_plans(arch, "invariant")
    for kernel in ("lora_route", "lora_shrink", "lora_expand", "lora_embed"):
        by_dtype: dict[str, set[tuple[object, ...]]] = {}
        for entry in table.entries(kernel):
            plan = entry.plan
            found = (*sorted(plan.config.items()), plan.num_warps, plan.num_stages)
            by_dtype.setdefault(entry.when.dtype or "any", set()).add(found)
        assert all(len(plans) == 1 for plans in by_dtype.values()), (kernel, by_dtype)
    assert table.entries("lora_route")[0].plan.config["BLOCK_M"] > 1, "rows are for `fast` alone"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_blocks_are_what_the_kernels_take(arch: str, column: str) -> None:
    table = open_plans(arch, column)  # type: ignore[arg-type]
    for entry in table.entries("lora_route"):
        rows = entry.plan.config["BLOCK_M"]
        assert rows == 1 or (rows >= 16 and rows & (rows - 1) == 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_plan_is_dead_and_each_is_built_ahead_of_time(arch: str) -> None:
    """With the blocks and planes that steps take it with; an entry that no step leads to has no build."""
    table, support = open_plans(arch, "fast"), ARCHITECTURES[arch]
    built: dict[str, set[str]] = {}
    for module in ("lora_shrink", "lora_expand", "lora_rows", "lora_embed"):
        for case in importlib.import_module(f"loraplex_kernels.{module}").aot_cases(table, support):
            built.setdefault(case.kernel, set()).add(case.plan.label)

    assert set(built) == {*_KERNELS, "lora_embed"}
    for kernel, labels in built.items():
        assert labels == {entry.plan.label for entry in table.entries(kernel)}, kernel
    in_rows = importlib.import_module("loraplex_kernels.lora_rows")
    assert not list(in_rows.aot_cases(open_plans(arch, "invariant"), support))


_KERNELS = ("lora_shrink", "lora_expand", "lora_rows_shrink", "lora_rows_expand")
