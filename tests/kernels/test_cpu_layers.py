"""All layers in one call beside the kernels called one by one: the same bits, in results and caches."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from loraplex_engine.model.rope import RotaryTable
from loraplex_kernels.cpu.attention import NativeAttentionKernel
from loraplex_kernels.cpu.build import NativeBuildError
from loraplex_kernels.cpu.layers import TIMED_PARTS, LayerParts, LayersKernel
from loraplex_kernels.cpu.linear import Arithmetic, LinearKernel, PackedLinear, list_arithmetics
from loraplex_kernels.cpu.ops import OpsKernel
from torch import Tensor

from tests.support.adapter_files import native_cache_dir

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 50, 33, 4, 2, 8
Q_SIZE, KV_SIZE = HEADS * WIDTH, KV_HEADS * WIDTH
BLOCK_SIZE, NUM_BLOCKS = 4, 24
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / 4).to(dtype)


@dataclass
class Parts:
    """Three layers of random weights and their kernels."""

    dtype: torch.dtype
    ops: OpsKernel
    linear: LinearKernel
    attention: NativeAttentionKernel
    layers: list[LayerParts]
    rotary: RotaryTable
    cache: Path

    @classmethod
    def of(cls, dtype: torch.dtype, cache: Path, arithmetic: Arithmetic = "fp32") -> Parts:
        try:
            ops = OpsKernel(dtype, cache_dir=cache, num_threads=2)
            if arithmetic not in list_arithmetics(dtype, cache):
                pytest.skip(f"this CPU has no {arithmetic}")
            linear = LinearKernel(cache_dir=cache, num_threads=2, arithmetic=arithmetic)
        except NativeBuildError as error:
            pytest.skip(f"no C compiler here: {error}")
        attention = NativeAttentionKernel(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            cache_dir=cache,
            num_threads=2,
        )

        def pack(num_out: int, num_in: int, seed: int, *, has_bias: bool) -> PackedLinear:
            bias = draw(num_out, dtype=dtype, seed=seed + 50) if has_bias else None
            return linear.pack(draw(num_out, num_in, dtype=dtype, seed=seed), bias)

        layers = [
            LayerParts(
                input_norm=draw(HIDDEN, dtype=dtype, seed=seed),
                mlp_norm=draw(HIDDEN, dtype=dtype, seed=seed + 1),
                linears=(
                    pack(Q_SIZE + 2 * KV_SIZE, HIDDEN, seed + 2, has_bias=True),
                    pack(HIDDEN, Q_SIZE, seed + 3, has_bias=False),
                    pack(2 * INNER, HIDDEN, seed + 4, has_bias=False),
                    pack(HIDDEN, INNER, seed + 5, has_bias=True),
                ),
                kv=torch.full((NUM_BLOCKS * BLOCK_SIZE, 2 * KV_SIZE), torch.nan, dtype=dtype),
            )
            for seed in (0, 100, 200)
        ]
        rotary = RotaryTable(WIDTH, 64, 10_000.0, dtype)
        return cls(dtype, ops, linear, attention, layers, rotary, cache)

    def kernel(self) -> LayersKernel:
        return LayersKernel(
            self.layers,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            eps=EPS,
            ops=self.ops,
            attention=self.attention,
            lora=None,
            slice_addresses=(),
            cache_dir=self.cache,
        )

    def one_by_one(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slot: Tensor, work: object
    ) -> Tensor:
        """What the loop over all layers computes, still to be added to `hidden`."""
        added = None
        for layer in self.layers:
            qkv, o, gate_up, down = layer.linears
            x = self.ops.rms_norm(hidden, layer.input_norm, EPS, y_TH=added)
            merged = self.linear.forward(x, qkv)
            self.ops.rotate_and_write(
                merged, cos, sin, layer.kv, slot, num_heads=HEADS, num_kv_heads=KV_HEADS
            )
            out = torch.zeros((len(hidden), Q_SIZE), dtype=self.dtype)
            self.attention.forward(merged, out, layer.kv, work)  # type: ignore[arg-type]
            x = self.ops.rms_norm(hidden, layer.mlp_norm, EPS, y_TH=self.linear.forward(out, o))
            added = self.linear.forward(self.ops.gated(self.linear.forward(x, gate_up)), down)
        assert added is not None
        return added


# Rows computed before, rows computed now; by sequence.
STEPS = ([(0, 5), (0, 9)], [(5, 1), (9, 1)], [(6, 3), (10, 1), (0, 1)], [(9, 1)])


def lay_out(parts: Parts, sequences: Sequence[tuple[int, int]], num_padding: int) -> tuple:
    computed = np.array([c for c, _ in sequences], np.int32)
    scheduled = np.array([n for _, n in sequences], np.int32)
    table = np.arange(len(sequences) * 6, dtype=np.int32).reshape(len(sequences), 6)
    position = np.concatenate([np.arange(c, c + n) for c, n in sequences])
    sequence = np.repeat(np.arange(len(sequences)), scheduled)
    slot = table[sequence, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    slot += position % BLOCK_SIZE
    padded = torch.from_numpy(np.concatenate((position, np.zeros(num_padding, np.int64))))
    cos, sin = parts.rotary.gather(padded)
    return cos, sin, torch.from_numpy(slot), parts.attention.plan(computed, scheduled, table)


@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "avx512_bf16"),
        (torch.bfloat16, "amx"),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_padding", [0, 3])
def test_one_call_has_the_bits_of_the_calls_one_by_one(
    pytestconfig: pytest.Config, dtype: torch.dtype, arithmetic: Arithmetic, num_padding: int
) -> None:
    cache = native_cache_dir(pytestconfig)
    parts, others = (Parts.of(dtype, cache, arithmetic) for _ in range(2))
    kernel = parts.kernel()

    for seed, sequences in enumerate(STEPS):
        num_rows = sum(n for _, n in sequences) + num_padding
        hidden = draw(num_rows, HIDDEN, dtype=dtype, seed=500 + seed)
        expected_hidden = hidden.clone()
        expected = others.one_by_one(expected_hidden, *lay_out(others, sequences, num_padding))

        added = kernel.forward(hidden, *lay_out(parts, sequences, num_padding))

        assert torch.equal(added, expected)
        assert torch.isfinite(added).all()
        assert torch.equal(hidden, expected_hidden)
        for layer, other in zip(parts.layers, others.layers, strict=True):
            assert torch.equal(layer.kv.nan_to_num(7.0), other.kv.nan_to_num(7.0))


def test_what_it_cannot_read_is_refused(pytestconfig: pytest.Config) -> None:
    parts = Parts.of(torch.float32, native_cache_dir(pytestconfig))
    kernel = parts.kernel()
    cos, sin, slot, work = lay_out(parts, [(0, 3)], 0)
    hidden = torch.zeros(3, HIDDEN)

    with pytest.raises(ValueError, match=r"hidden is torch\.bfloat16"):
        kernel.forward(hidden.bfloat16(), cos, sin, slot, work)
    with pytest.raises(ValueError, match="cos has 2 rows, hidden 3"):
        kernel.forward(hidden, cos[:2], sin, slot, work)
    with pytest.raises(ValueError, match="at most one a row"):
        kernel.forward(hidden[:2], cos[:2], sin[:2], slot, work)
    with pytest.raises(ValueError, match="contiguous: False"):
        kernel.forward(hidden, cos, sin, slot.repeat(2)[::2], work)
    with pytest.raises(ValueError, match="part_seconds is"):
        kernel.forward(hidden, cos, sin, slot, work, part_seconds=np.zeros(3))


def test_what_is_timed_inside_has_the_same_bits_and_adds_up(pytestconfig: pytest.Config) -> None:
    parts = Parts.of(torch.float32, native_cache_dir(pytestconfig))
    kernel = parts.kernel()
    hidden = draw(5, HIDDEN, dtype=torch.float32, seed=1)
    seconds = np.zeros(len(TIMED_PARTS))

    plain = kernel.forward(hidden.clone(), *lay_out(parts, [(0, 5)], 0)).clone()
    started = time.monotonic()
    timed = kernel.forward(hidden, *lay_out(parts, [(0, 5)], 0), part_seconds=seconds)
    whole_s = time.monotonic() - started

    assert torch.equal(timed, plain)
    by_part = dict(zip(TIMED_PARTS, seconds.tolist(), strict=True))
    assert by_part.pop("lora") == 0, "no row has an adapter"
    assert min(by_part.values()) > 0
    assert sum(by_part.values()) <= whole_s


def test_a_cache_that_nobody_else_holds_is_let_go(pytestconfig: pytest.Config) -> None:
    parts = Parts.of(torch.float32, native_cache_dir(pytestconfig))
    kernel = parts.kernel()
    caches = [weakref.ref(layer.kv) for layer in parts.layers]

    parts.layers.clear()

    assert [cache() for cache in caches] == [None] * len(caches)
    del kernel
