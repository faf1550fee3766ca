"""The counter generator against the vectors its authors published with Random123."""

from __future__ import annotations

import numpy as np
import pytest
from loraplex_kernels.philox import philox4x32

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_ten_rounds_equal_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(np.asarray(counter, np.uint32)[:, None], np.asarray(key, np.uint32)[:, None])

    assert words[:, 0].tolist() == list(expected)


def test_counters_are_independent_of_each_other() -> None:
    counters = np.asarray([answer[0] for answer in KNOWN_ANSWERS], np.uint32).T
    keys = np.asarray([answer[1] for answer in KNOWN_ANSWERS], np.uint32).T

    words = philox4x32(counters, keys)

    assert words.T.tolist() == [list(answer[2]) for answer in KNOWN_ANSWERS]


def test_one_key_serves_all_counters() -> None:
    counters = np.arange(8, dtype=np.uint32).reshape(4, 2)
    key = np.asarray([[5], [6]], np.uint32)

    together = philox4x32(counters, key)

    for index in range(2):
        assert (philox4x32(counters[:, index : index + 1], key)[:, 0] == together[:, index]).all()
