"""The host's grid arithmetic is Triton's."""

from __future__ import annotations

import triton
from loraplex_kernels.grid import ceil_div, next_power_of_2


def test_it_computes_what_triton_computes() -> None:
    assert [next_power_of_2(n) for n in range(1, 300)] == [
        triton.next_power_of_2(n) for n in range(1, 300)
    ]
    assert [ceil_div(n, size) for n in range(40) for size in range(1, 9)] == [
        triton.cdiv(n, size) for n in range(40) for size in range(1, 9)
    ]
