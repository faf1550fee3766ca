"""How the native attention kernel cuts a step's work; what it computes: tests/engine/test_attention_backends.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loraplex_kernels.cpu import attention
from loraplex_kernels.cpu.attention import NativeAttentionKernel
from loraplex_kernels.cpu.build import NativeBuildError

from tests.support.adapter_files import native_cache_dir

HEAD_DIM = 8


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> NativeAttentionKernel:
    try:
        return NativeAttentionKernel(
            num_heads=2,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            block_size=16,
            dtype=torch.float32,
            cache_dir=native_cache_dir(request.config),
            num_threads=4,
        )
    except NativeBuildError as error:
        pytest.skip(str(error))


def test_parts_of_split_items_are_bounded_in_memory_and_change_no_bit(
    kernel: NativeAttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, num_rows = 2048, 3
    rng = np.random.default_rng(0)
    kv = torch.from_numpy(rng.standard_normal((length, 2 * HEAD_DIM), np.float32))
    q = torch.from_numpy(rng.standard_normal((num_rows, 2 * HEAD_DIM), np.float32))
    computed, scheduled = np.full(num_rows, length - 1, np.int32), np.ones(num_rows, np.int32)
    table = np.tile(np.arange(length // 16, dtype=np.int32), (num_rows, 1))

    outputs, merges, sizes = [], [], []
    one_row = (length // attention.TILE) * (HEAD_DIM + 8) * 2
    for budget in (2**24, one_row, 0):
        monkeypatch.setattr(attention, "_MAX_PARTIALS", budget)
        work = kernel.plan(computed, scheduled, table)
        out = torch.empty_like(q)
        kernel.forward(q, out, kv, work)
        outputs.append(out)
        merges.append(len(work.merges))
        sizes.append(work._partials.size)

    assert merges == [3, 1, 0]
    assert sizes == [3 * one_row, one_row, 0]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
