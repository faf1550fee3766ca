"""Arithmetic of launch grids on the host.

`triton.cdiv` and `triton.next_power_of_2` are the same, but wrapped for use inside of kernels: some microseconds a
call, hundreds of calls in an eager step.
"""

from __future__ import annotations


def ceil_div(numerator: int, denominator: int) -> int:
    """How many blocks of `denominator` cover `numerator`."""
    return -(-numerator // denominator)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, which is 1 or more."""
    return 1 << (count - 1).bit_length()
