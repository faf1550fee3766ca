"""Noise is a pure function of (seed, position, id), however it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from loraplex_engine.sampling.noise import MAX_GUMBEL, Int64Array, gumbel, random_bits
from loraplex_kernels.philox import UInt32Array

SEED = 0xDEADBEEF12345678


def bits_of(seed: int, position: int, ids: list[int]) -> list[int]:
    return bits_of_row(seed, position, np.asarray(ids)).tolist()


def bits_of_row(seed: int, position: int, ids: Int64Array) -> UInt32Array:
    row = np.zeros(ids.size, np.int64)
    return random_bits(np.asarray([seed], np.uint64), np.asarray([position]), row, ids)


@pytest.mark.parametrize("num_ids", [1, 3, 4, 5, 131])
def test_a_whole_row_equals_ids_asked_one_by_one(num_ids: int) -> None:
    row = bits_of_row(SEED, 9, np.arange(num_ids))

    assert row.tolist() == [bits_of(SEED, 9, [i])[0] for i in range(num_ids)]


def test_order_and_company_of_ids_do_not_matter() -> None:
    ids = [77, 3, 49_151, 4, 0]

    assert bits_of(SEED, 2, ids) == [bits_of(SEED, 2, [i])[0] for i in ids]


def test_rows_mix_freely() -> None:
    seeds = np.asarray([SEED, 7], np.uint64)
    positions = np.asarray([9, 0])
    rows, ids = np.asarray([1, 0, 0, 1, 1]), np.asarray([5, 4, 5, 5, 6])

    mixed = random_bits(seeds, positions, rows, ids).tolist()

    assert mixed == [
        bits_of((SEED, 7)[row], (9, 0)[row], [token])[0]
        for row, token in zip(rows, ids, strict=True)
    ]


def test_every_part_of_the_key_changes_the_stream() -> None:
    base = bits_of_row(SEED, 9, np.arange(64))

    for other in (
        bits_of_row(SEED ^ 1, 9, np.arange(64)),  # low word of the seed
        bits_of_row(SEED ^ (1 << 63), 9, np.arange(64)),  # high word of the seed
        bits_of_row(SEED, 10, np.arange(64)),
        bits_of_row(SEED, 9 + (1 << 32), np.arange(64)),  # high word of the position
    ):
        assert (base == other).sum() <= 1


def test_gumbel_is_finite_and_bounded_at_the_ends() -> None:
    ends = gumbel(np.asarray([0, 2**32 - 1], np.uint32))

    assert np.isfinite(ends).all()
    assert ends[1] == MAX_GUMBEL


def test_gumbel_has_the_right_mean_and_variance() -> None:
    values = gumbel(bits_of_row(1, 0, np.arange(200_000)))

    assert abs(values.mean() - np.euler_gamma) < 0.01
    assert abs(values.var() - np.pi**2 / 6) < 0.02
