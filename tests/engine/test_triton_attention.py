"""The Triton backend, interpreted: what it has beyond the contract of all backends."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from loraplex_engine.attention.base import AttentionBatch, AttentionShape
from loraplex_engine.attention.triton_attention import PagedKv
from loraplex_kernels.plans import Column

from tests.support.attention_cases import BLOCK_SIZE, NUM_BLOCKS, Sequences, StagedTriton
from tests.support.recorded_graph import RecordingBackend

SHAPE = AttentionShape(4, 2, 32, torch.float32)
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("column", ["fast", "invariant"])
@pytest.mark.parametrize(
    "more",
    [{"window": 20}, {"soft_cap": 1.5}, {"window": 1, "soft_cap": 3.0}],
    ids=["window", "soft-cap", "both"],
)
def test_windows_and_soft_caps_equal_dense_softmax(more: dict[str, Any], column: Column) -> None:
    shape = AttentionShape(4, 2, 32, torch.float32, **more)
    sequences = Sequences(StagedTriton(shape, column=column), shape, [1, 70])

    prefill = sequences.run([(0, 0, 1), (1, 0, 69)])
    decode = sequences.run([(1, 69, 70)])

    for output, expected in (
        (prefill[0], sequences.dense(0)),
        (prefill[1], sequences.dense(1)[:69]),
        (decode[0], sequences.dense(1)[69:]),
    ):
        torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES.values(), ids=KV_DTYPES)
def test_a_quantized_cache_is_near_and_smaller(kv_dtype: torch.dtype) -> None:
    exact = Sequences(StagedTriton(SHAPE), SHAPE, [40, 33])
    backend = StagedTriton(SHAPE, kv_dtype=kv_dtype)
    sequences = Sequences(backend, SHAPE, [40, 33])
    steps = [[(0, 0, 40), (1, 0, 20)], [(1, 20, 32)], [(1, 32, 33), (0, 39, 40)]]

    for parts in steps:
        for output, expected in zip(sequences.run(parts), exact.run(parts), strict=True):
            error = (output - expected).abs().max()
            assert 0 < error < (0.03 if kv_dtype == torch.int8 else 0.25)

    assert backend.kv_bytes_per_block() == 2 * 2 * BLOCK_SIZE * (32 + 4)
    assert isinstance(sequences.cache, PagedKv)
    assert sequences.cache.scale is not None
    taken = sequences.cache.numbers.nbytes + sequences.cache.scale.nbytes
    assert taken == NUM_BLOCKS * backend.kv_bytes_per_block()
    assert backend.name == f"triton-{'int8' if kv_dtype == torch.int8 else 'fp8'}"


def test_a_copied_block_of_a_quantized_cache_takes_its_scales_along() -> None:
    sequences = Sequences(StagedTriton(SHAPE, kv_dtype=torch.int8), SHAPE, [BLOCK_SIZE])
    sequences.run([(0, 0, BLOCK_SIZE)])
    before = sequences.run([(0, BLOCK_SIZE - 1, BLOCK_SIZE)])[0]
    old = int(sequences.table[0, 0])
    new = (old + 1) % NUM_BLOCKS

    sequences.backend.copy_blocks(sequences.cache, torch.tensor([old]), torch.tensor([new]))
    sequences.table[0, 0] = new
    after = sequences.run([(0, BLOCK_SIZE - 1, BLOCK_SIZE)])[0]

    assert torch.equal(after, before)


def test_decoding_rows_beside_a_chunk_have_the_bits_they_have_without_it() -> None:
    sequences = Sequences(StagedTriton(SHAPE), SHAPE, [37, 60, 18])
    sequences.run([(0, 0, 36), (2, 0, 17)])
    alone = sequences.run([(0, 36, 37), (2, 17, 18)])

    first, _chunk, second = sequences.run([(0, 36, 37), (1, 0, 60), (2, 17, 18)])

    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])


def test_under_invariant_plans_the_position_decides_whatever_shares_the_step() -> None:
    """Prompts in one piece or many, ending in one token; later tokens alone, as drafts, or computed again."""
    sequences = Sequences(StagedTriton(SHAPE), SHAPE, [44, 18])
    prompt = 40
    whole = sequences.run([(0, 0, prompt)], num_prompt=prompt)[0]
    later = [sequences.run([(0, p, p + 1)], num_prompt=prompt)[0] for p in range(prompt, 44)]
    expected = torch.cat([whole, *later])

    for cuts in ([0, 39, 40, 44], [0, 36, 38, 44]):
        sequences.reset(seed=len(cuts))
        sequences.run([(1, 0, 17)], num_prompt=prompt)
        # Beside another sequence: of its prompt's end, too.
        pieces = [
            sequences.run([(1, 17, 18), (0, start, stop)], num_prompt=prompt)[1]
            for start, stop in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(pieces), expected), cuts
    # What is kept apart here does differ: else nothing would be shown.
    alone = sequences.run([(0, prompt - 1, prompt)], num_prompt=prompt - 1)[0]
    assert not torch.equal(alone, expected[prompt - 1 : prompt])


def test_more_tokens_one_by_one_than_the_workspace_has_room_for() -> None:
    """They are launched in turns, and the padding is zero all the same."""
    backend = StagedTriton(SHAPE)
    backend._max_entries = 4
    sequences = Sequences(backend, SHAPE, [10])

    output = sequences.run([(0, 0, 10)], num_prompt=0)[0]

    torch.testing.assert_close(output.double(), sequences.dense(0), atol=2e-5, rtol=2e-5)
    assert torch.equal(sequences.run([(0, 9, 10)], num_prompt=0)[0], output[9:])


def test_padding_has_no_place_and_comes_out_as_zero() -> None:
    sequences = Sequences(StagedTriton(SHAPE), SHAPE, [20, 9])
    sequences.run([(0, 0, 19), (1, 0, 8)])
    exact = sequences.run([(0, 19, 20), (1, 8, 9)])
    kept = sequences.cache.numbers.clone()

    # `run` asserts that the padding rows, NaN on their way in, are zero.
    padded = sequences.run([(0, 19, 20), (1, 8, 9)], num_rows=32)

    assert torch.equal(torch.cat(padded), torch.cat(exact))
    written = sequences.cache.numbers
    assert torch.equal(written.isnan(), kept.isnan())


def test_a_step_of_padding_alone_is_all_zero() -> None:
    backend = StagedTriton(SHAPE)
    nobody = np.empty(0, np.int32)
    plan = backend.prepare(AttentionBatch(nobody, nobody, np.empty((0, 1), np.int32), 4))
    kv = backend.allocate_kv(2)
    qkv = torch.full((4, SHAPE.q_size + 2 * SHAPE.kv_size), torch.nan)
    angle = torch.ones(4, 1, SHAPE.head_dim)
    kv.numbers.fill_(7.0)

    backend.rotate_and_write(qkv, angle, angle, kv, plan)

    assert backend.forward(qkv, kv, plan).eq(0).all()
    assert kv.numbers.eq(7.0).all()


@pytest.mark.parametrize("column", ["fast", "invariant"])
def test_a_recorded_step_holds_for_other_rows_and_lengths(column: Column) -> None:
    lengths = [5, 90, 33]
    sequences = Sequences(StagedTriton(SHAPE, column=column), SHAPE, lengths)
    sequences.run([(s, 0, n - 1) for s, n in enumerate(lengths)])
    backend, kv = sequences.backend, sequences.cache
    qkv = torch.zeros(4, SHAPE.q_size + 2 * SHAPE.kv_size)
    angle = torch.zeros(4, 1, SHAPE.head_dim)
    out = torch.zeros(4, SHAPE.q_size)
    nobody = np.empty(0, np.int32)

    def step(plan: Any) -> None:
        backend.rotate_and_write(qkv, angle + 1, angle, kv, plan)
        out.copy_(backend.forward(qkv, kv, plan))

    stand_in = backend.prepare(AttentionBatch(nobody, nobody, np.empty((0, 1), np.int32), 4))
    recorded = RecordingBackend().capture(lambda: step(stand_in))

    for members in ([0, 1, 2], [1], [2, 0]):
        batch = AttentionBatch(
            np.array([lengths[s] - 1 for s in members], np.int32),
            np.ones(len(members), np.int32),
            sequences.table[members],
            4,
        )
        drawn = torch.randn(qkv.shape, generator=torch.Generator().manual_seed(len(members)))
        plan = backend.prepare(batch)
        qkv.copy_(drawn)
        step(plan)
        eager = out.clone()
        qkv.copy_(drawn)
        recorded.replay()
        assert torch.equal(out, eager)
        assert eager[: len(members)].ne(0).any(dim=1).all()


@pytest.mark.parametrize(
    ("shape", "more", "message"),
    [
        (AttentionShape(2, 2, 40, torch.float32), {}, "head_dim 40"),
        (AttentionShape(2, 2, 512, torch.float32), {}, "head_dim 512"),
        (SHAPE, {"kv_dtype": torch.float16}, "kv_dtype"),
    ],
    ids=["width", "wide", "kv-dtype"],
)
def test_shapes_that_the_kernels_do_not_have_are_refused(
    shape: AttentionShape, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StagedTriton(shape, **more)


def test_an_unwritten_cache_takes_no_part() -> None:
    """Int8 codes of unwritten slots look healthy; their scale says otherwise and is not read."""
    sequences = Sequences(StagedTriton(SHAPE, kv_dtype=torch.int8), SHAPE, [21])
    assert isinstance(sequences.cache, PagedKv)
    assert sequences.cache.scale is not None
    sequences.cache.numbers.fill_(127)

    output = sequences.run([(0, 0, 21)])[0]

    assert output.isfinite().all()
    assert sequences.cache.scale.isfinite().sum() == 2 * 2 * 21
