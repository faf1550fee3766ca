"""The estimate of an adapter's memory beside what the backends really take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loraplex_engine.artifact import estimate_memory, estimate_overhead
from loraplex_engine.lora.device_slots import pack_device, slot_size
from loraplex_engine.lora.weights import pack_native, pack_torch

from tests.support.adapter_files import SMOLLM2_SHAPE, make_adapter

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("rank", [1, 12, 16])
def test_it_holds_for_every_backend(dtype: str, rank: int, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", SMOLLM2_SHAPE, rank=rank, linears=LINEARS, dtype=dtype)

    memory = estimate_memory(adapter, SMOLLM2_SHAPE, max_rank=64)

    assert sum(module.parameters for module in memory.modules) == adapter.num_parameters
    assert {module.rank for module in memory.modules} == {rank}
    least, most = memory.cpu_bytes["float32"]
    for taken in (
        pack_torch(adapter, SMOLLM2_SHAPE).size_bytes,
        pack_native(adapter, SMOLLM2_SHAPE).size_bytes,
    ):
        # Alignment, and a table of the sites, which is nothing beside an adapter of any use.
        assert 0.99 * least <= taken <= 1.1 * most + 100_000
    for name, torch_dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        host = pack_device(adapter, SMOLLM2_SHAPE, dtype=torch_dtype, pin=False).size_bytes
        assert (
            0.5 * memory.gpu_host_bytes[name] * 0.99 <= host <= memory.gpu_host_bytes[name] * 1.05
        )
        slot = slot_size(SMOLLM2_SHAPE, 64, torch_dtype)
        assert memory.gpu_slot_bytes[name] == pytest.approx(slot, rel=0.01)


def test_overhead_grows_with_the_rank(tmp_path: Path) -> None:
    costs = [
        estimate_overhead(
            make_adapter(tmp_path / str(rank), SMOLLM2_SHAPE, rank=rank, linears=LINEARS),
            SMOLLM2_SHAPE,
        )
        for rank in (8, 16)
    ]

    assert costs[1].low_percent == pytest.approx(2 * costs[0].low_percent, rel=0.01)
    assert all(0 < cost.low_percent < cost.high_percent for cost in costs)
    assert costs[0].low_percent == pytest.approx(1.8, abs=0.1), "8 x 0.31 M of 134.5 M"
