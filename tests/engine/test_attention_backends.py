"""One contract, every attention backend: right, and a row's bits are its own.

The Triton kernels run interpreted. There a row's bits are its own within a phase, prefill or decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from loraplex_engine.attention.native_attention import NativeAttention
from loraplex_engine.attention.setup import BackendName, open_attention
from loraplex_engine.attention.torch_attention import TorchAttention

from tests.support.attention_cases import BLOCK_SIZE, NUM_BLOCKS, Sequences, StagedTriton

SHAPES = {
    "smollm2": (9, 3, 64),
    "no-groups": (2, 2, 32),
    "one-kv-head": (8, 1, 48),
}

Open = Callable[[AttentionShape], AttentionBackend[Any, Any]]


@pytest.fixture
def openers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Open]:
    cache_dir = tmp_path_factory.getbasetemp() / "native"
    return {
        "torch": lambda shape: TorchAttention(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        "native": lambda shape: NativeAttention(
            shape, block_size=BLOCK_SIZE, cache_dir=cache_dir, num_threads=2
        ),
        "triton": StagedTriton,
    }


@pytest.fixture(params=["torch", "native", "triton"])
def open_backend(request: pytest.FixtureRequest, openers: dict[str, Open]) -> Open:
    return openers[request.param]


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("smollm2", torch.float32),
        ("smollm2", torch.bfloat16),
        ("no-groups", torch.float32),
        ("one-kv-head", torch.bfloat16),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_chunks_neighbours_or_blocks(
    open_backend: Open, name: str, dtype: torch.dtype
) -> None:
    shape = _shape(name, dtype)
    sequences = Sequences(open_backend(shape), shape, [70, 131, 17])
    whole = sequences.run([(s, 0, n) for s, n in enumerate(sequences.lengths)])

    has_phases = open_backend is StagedTriton
    for chunk in (50,) if has_phases else (1, 7, 100):
        for sequence, length in enumerate(sequences.lengths):
            sequences.reset(seed=chunk)
            parts = [
                sequences.run([(sequence, start, min(length, start + chunk))])[0]
                for start in range(0, length, chunk)
            ]
            assert torch.equal(torch.cat(parts), whole[sequence]), (chunk, sequence)

    # Decoding rows of all sequences together, on top of prefixes that were computed alone.
    sequences.reset(seed=99)
    alone = [row[-1] for row in whole]
    for sequence, length in enumerate(sequences.lengths):
        sequences.run([(sequence, 0, length - 1)])
        if has_phases:
            alone[sequence] = sequences.run([(sequence, length - 1, length)])[0][0]
    last = sequences.run([(s, n - 1, n) for s, n in enumerate(sequences.lengths)])
    for sequence, row in enumerate(last):
        assert torch.equal(row[0], alone[sequence])


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

    torch.testing.assert_close(last[0][0], expected[0][-1])
    torch.testing.assert_close(last[1][0], expected[1][-1])


def test_bytes_of_a_known_model_s_token() -> None:
    # A layer of Llama-2-7B: in 16 bits half a MiB per token over 32 layers.
    shape = AttentionShape(32, 32, 128, torch.bfloat16)

    assert 32 * shape.kv_bytes_per_token() == 2**19
    # Half of it, and a scale of four bytes for each of 32 heads, of keys and of values.
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        assert shape.kv_bytes_per_token(kv_dtype) == 2**13 + 2 * 32 * 4


@pytest.mark.parametrize("backend", ["auto", "torch", "native"])
def test_a_quantized_cache_is_refused_by_a_cpu_s_backends(
    backend: BackendName, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype int8: .* use auto"):
        open_attention(
            _shape("smollm2", torch.float32),
            num_blocks=1,
            block_size=BLOCK_SIZE,
            cache_dir=tmp_path,
            num_threads=1,
            backend=backend,
            kv_cache_dtype="int8",
        )


def test_a_block_takes_the_bytes_it_says(open_backend: Open) -> None:
    backend = open_backend(_shape("smollm2", torch.bfloat16))

    assert backend.kv_bytes_per_block() == BLOCK_SIZE * 2 * 3 * 64 * 2


@pytest.mark.parametrize("more", [{"window": 8}, {"soft_cap": 30.0}], ids=["window", "soft-cap"])
def test_torch_refuses_what_it_would_ignore(openers: dict[str, Open], more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sliding window"):
        openers["torch"](AttentionShape(2, 2, 32, torch.float32, **more))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("smollm2", {"window": 8}),
        ("smollm2", {"window": 70}),
        ("no-groups", {"window": 64, "soft_cap": 2.0}),
        ("one-kv-head", {"soft_cap": 0.5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_has_windows_and_soft_caps(
    openers: dict[str, Open], name: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    """Right, and with the same bits in any chunk: a window's edge lies elsewhere in every row's tiles."""
    shape = AttentionShape(*SHAPES[name], dtype, **more)
    sequences = Sequences(openers["native"](shape), shape, [190, 3, 131])

    whole = sequences.run([(s, 0, n) for s, n in enumerate(sequences.lengths)])

    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for sequence, output in enumerate(whole):
        torch.testing.assert_close(
            output.double(), sequences.dense(sequence), atol=tolerance, rtol=tolerance
        )
    for chunk in (1, 23, 100):
        for sequence, length in enumerate(sequences.lengths):
            sequences.reset(seed=chunk)
            parts = [
                sequences.run([(sequence, start, min(length, start + chunk))])[0]
                for start in range(0, length, chunk)
            ]
            assert torch.equal(torch.cat(parts), whole[sequence]), (chunk, sequence)


def test_a_window_reads_nothing_behind_it(openers: dict[str, Open]) -> None:
    """What lies there may have been given to another sequence."""
    shape = AttentionShape(*SHAPES["smollm2"], torch.float32, window=70)
    sequences = Sequences(openers["native"](shape), shape, [190])
    expected = sequences.run([(0, 0, 190)])[0]

    for position in range(120):
        slot = int(sequences.table[0, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        sequences.cache[slot] = float("nan")

    assert torch.equal(sequences.run([(0, 189, 190)])[0][0], expected[189])


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(None, torch.float32), (None, torch.bfloat16), (460, torch.float32)],
    ids=str,
)
def test_native_bits_do_not_depend_on_how_threads_share_the_work(
    tmp_path_factory: pytest.TempPathFactory, window: int | None, dtype: torch.dtype
) -> None:
    """One item a row with one thread; with more, a row's tiles are split among items and joined."""
    shape = AttentionShape(*SHAPES["smollm2"], dtype, window=window)
    steps = {
        "one row": [(0, 499, 500)],
        "rows": [(0, 499, 500), (1, 70, 71), (2, 333, 334)],
        "drafts": [(0, 495, 500), (1, 66, 71)],
        "chunk": [(0, 430, 500), (1, 70, 71)],
    }
    results: dict[int, list[torch.Tensor]] = {}
    num_split = 0
    for num_threads in (1, 2, 4):
        backend = NativeAttention(
            shape,
            block_size=BLOCK_SIZE,
            cache_dir=tmp_path_factory.getbasetemp() / "native",
            num_threads=num_threads,
        )
        sequences = Sequences(backend, shape, [500, 71, 334])
        prefix = sequences.run([(s, 0, n) for s, n in enumerate(sequences.lengths)])
        results[num_threads] = [*prefix]
        for name, step in steps.items():
            outputs = sequences.run(step)
            results[num_threads] += outputs
            for (sequence, start, stop), output in zip(step, outputs, strict=True):
                assert torch.equal(output, prefix[sequence][start:stop]), (name, num_threads)
            plan = backend.prepare(
                AttentionBatch(
                    np.array([start for _s, start, _stop in step], np.int32),
                    np.array([stop - start for _s, start, stop in step], np.int32),
                    sequences.table[[s for s, _start, _stop in step]],
                    num_rows=1,
                )
            )
            num_split += len(plan.work.merges)
            assert num_threads > 1 or not len(plan.work.merges)

    assert num_split > 0
    for one, two, four in zip(*results.values(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, four)


@pytest.mark.parametrize(
    ("more", "match"),
    [({"window": 0}, "window is 0"), ({"soft_cap": -1.0}, "soft_cap is -1")],
    ids=["window", "soft-cap"],
)
def test_native_refuses_limits_that_mean_nothing(
    openers: dict[str, Open], more: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        openers["native"](AttentionShape(2, 2, 32, torch.float32, **more))


@pytest.mark.parametrize("name", ["torch", "native"])
def test_cpu_backends_have_heads_of_a_multiple_of_8(openers: dict[str, Open], name: str) -> None:
    shape = AttentionShape(4, 2, 40, torch.float32)
    sequences = Sequences(openers[name](shape), shape, [19])

    output = sequences.run([(0, 0, 19)])[0]

    torch.testing.assert_close(output.double(), sequences.dense(0), atol=2e-5, rtol=2e-5)
