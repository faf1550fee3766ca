"""One contract, every CPU attention backend: right, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from loraplex_engine.attention.native_attention import NativeAttention
from loraplex_engine.attention.torch_attention import TorchAttention
from loraplex_engine.model.rope import RotaryTable, rotate_merged_

BLOCK_SIZE = 16
NUM_BLOCKS = 96
SHAPES = {
    "smollm2": (9, 3, 64),
    "no-groups": (2, 2, 32),
    "one-kv-head": (8, 1, 40),
}

Open = Callable[[AttentionShape], AttentionBackend[Any, Any]]


@pytest.fixture(params=["torch", "native"])
def open_backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Open:
    cache_dir = tmp_path_factory.getbasetemp() / "native"

    def make(shape: AttentionShape) -> AttentionBackend[Any, Any]:
        if request.param == "torch":
            return TorchAttention(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        return NativeAttention(shape, block_size=BLOCK_SIZE, cache_dir=cache_dir, num_threads=2)

    return make


class Sequences:
    """Random sequences whose queries, keys and values exist in full; run any part of them."""

    def __init__(
        self, backend: AttentionBackend[Any, Any], shape: AttentionShape, lengths: list[int]
    ) -> None:
        self.backend, self.shape, self.lengths = backend, shape, lengths
        random = torch.Generator().manual_seed(7)
        self.rotary = RotaryTable(shape.head_dim, max(lengths), 10_000.0, shape.dtype)
        self.q = [torch.randn(n, shape.q_size, generator=random).to(shape.dtype) for n in lengths]
        self.kv = [
            torch.randn(n, 2 * shape.kv_size, generator=random).to(shape.dtype) for n in lengths
        ]
        self.reset(seed=0)

    def reset(self, *, seed: int) -> None:
        """An empty cache full of NaN, and block tables that lie elsewhere for every seed."""
        self.cache = self.backend.allocate_kv(NUM_BLOCKS)
        self.cache[: NUM_BLOCKS * BLOCK_SIZE] = float("nan")
        blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS).astype(np.int32)
        width = max(-(-n // BLOCK_SIZE) for n in self.lengths)
        assert width * len(self.lengths) <= NUM_BLOCKS
        self.table = blocks[: width * len(self.lengths)].reshape(len(self.lengths), width)

    def run(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One step over (sequence, start, stop) parts; a tensor of rows for each."""
        computed = np.array([start for _s, start, _stop in parts], np.int32)
        scheduled = np.array([stop - start for _s, start, stop in parts], np.int32)
        num_tokens = int(scheduled.sum())
        num_rows = num_tokens + -num_tokens % 4
        table = self.table[[sequence for sequence, _start, _stop in parts]]
        plan = self.backend.prepare(AttentionBatch(computed, scheduled, table, num_rows))

        qkv = torch.zeros(num_rows, self.shape.q_size + 2 * self.shape.kv_size).to(self.shape.dtype)
        qkv[:num_tokens] = torch.cat(
            [torch.cat([self.q[s][a:b], self.kv[s][a:b]], dim=1) for s, a, b in parts]
        )
        position = torch.zeros(num_rows, dtype=torch.int64)
        position[:num_tokens] = torch.cat([torch.arange(a, b) for _s, a, b in parts])
        cos, sin = self.rotary.gather(position)
        self.backend.rotate_and_write(qkv, cos, sin, self.cache, plan)
        out = self.backend.forward(qkv, self.cache, plan)
        assert out.shape == (num_rows, self.shape.num_heads * self.shape.head_dim)
        return list(out[:num_tokens].split(scheduled.tolist()))

    def dense(self, sequence: int) -> torch.Tensor:
        """What it should be: rotated in the model's dtype, then float64 on the whole sequence."""
        shape, length = self.shape, self.lengths[sequence]
        fold = shape.num_heads // shape.num_kv_heads
        qkv = torch.cat([self.q[sequence], self.kv[sequence]], dim=1)
        tables = self.rotary.gather(torch.arange(length))
        rotate_merged_(qkv, shape.num_heads + shape.num_kv_heads, *tables)
        q = qkv[:, : shape.q_size].double().view(length, shape.num_heads, shape.head_dim)
        k, v = (
            half.view(length, shape.num_kv_heads, shape.head_dim).repeat_interleave(fold, 1)
            for half in qkv[:, shape.q_size :].double().chunk(2, dim=1)
        )
        score = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
        score = score.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return torch.einsum("hqk,khd->qhd", score.softmax(-1), v).reshape(length, -1)


def _shape(name: str, dtype: torch.dtype) -> AttentionShape:
    num_heads, num_kv_heads, head_dim = SHAPES[name]
    return AttentionShape(num_heads, num_kv_heads, head_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_dense_softmax(open_backend: Open, name: str, dtype: torch.dtype) -> None:
    shape = _shape(name, dtype)
    sequences = Sequences(open_backend(shape), shape, [1, 5, 33, 130])

    outputs = sequences.run([(s, 0, n) for s, n in enumerate(sequences.lengths)])

    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for sequence, output in enumerate(outputs):
        torch.testing.assert_close(
            output.double(), sequences.dense(sequence), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_chunks_neighbours_or_blocks(
    open_backend: Open, name: str, dtype: torch.dtype
) -> None:
    shape = _shape(name, dtype)
    sequences = Sequences(open_backend(shape), shape, [70, 131, 17])
    whole = sequences.run([(s, 0, n) for s, n in enumerate(sequences.lengths)])

    for chunk in (1, 7, 100):
        for sequence, length in enumerate(sequences.lengths):
            sequences.reset(seed=chunk)
            parts = [
                sequences.run([(sequence, start, min(length, start + chunk))])[0]
                for start in range(0, length, chunk)
            ]
            assert torch.equal(torch.cat(parts), whole[sequence]), (chunk, sequence)

    # Decoding rows of all sequences together, on top of prefixes that were computed alone.
    sequences.reset(seed=99)
    for sequence, length in enumerate(sequences.lengths):
        sequences.run([(sequence, 0, length - 1)])
    last = sequences.run([(s, n - 1, n) for s, n in enumerate(sequences.lengths)])
    for sequence, row in enumerate(last):
        assert torch.equal(row[0], whole[sequence][-1])


def test_a_neighbour_full_of_nan_reaches_nobody(open_backend: Open) -> None:
    shape = _shape("smollm2", torch.float32)
    sequences = Sequences(open_backend(shape), shape, [40, 40])
    alone = sequences.run([(0, 0, 40)])[0]

    sequences.reset(seed=3)
    sequences.kv[1].fill_(float("nan"))
    sequences.q[1].fill_(float("inf"))
    victim, hostile = sequences.run([(0, 0, 40), (1, 0, 40)])

    assert torch.equal(victim, alone)
    assert not hostile.isfinite().any()


def test_native_kernel_refuses_a_shape_it_does_not_have(tmp_path: Path) -> None:
    shape = AttentionShape(2, 2, 12, torch.float32)

    with pytest.raises(ValueError, match="head_dim 12"):
        NativeAttention(shape, block_size=BLOCK_SIZE, cache_dir=tmp_path, num_threads=1)


def test_copied_blocks_are_what_they_were_before(open_backend: Open) -> None:
    shape = _shape("no-groups", torch.float32)
    sequences = Sequences(open_backend(shape), shape, [BLOCK_SIZE, BLOCK_SIZE + 3])
    expected = sequences.run([(0, 0, BLOCK_SIZE), (1, 0, BLOCK_SIZE + 3)])
    first, second = int(sequences.table[0, 0]), int(sequences.table[1, 0])

    # Swapped in one call: each source must be read before the other copy lands on it.
    sequences.backend.copy_blocks(
        sequences.cache, torch.tensor([first, second]), torch.tensor([second, first])
    )
    sequences.table[0, 0], sequences.table[1, 0] = second, first
    last = sequences.run([(0, BLOCK_SIZE - 1, BLOCK_SIZE), (1, BLOCK_SIZE + 2, BLOCK_SIZE + 3)])

    assert torch.equal(last[0][0], expected[0][-1])
    assert torch.equal(last[1][0], expected[1][-1])


def test_a_block_takes_the_bytes_it_says(open_backend: Open) -> None:
    backend = open_backend(_shape("smollm2", torch.bfloat16))

    assert backend.kv_bytes_per_block() == BLOCK_SIZE * 2 * 3 * 64 * 2


@pytest.mark.parametrize("more", [{"window": 8}, {"soft_cap": 30.0}], ids=["window", "soft-cap"])
def test_cpu_backends_refuse_what_they_would_ignore(
    open_backend: Open, more: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="sliding window"):
        open_backend(AttentionShape(2, 2, 32, torch.float32, **more))
