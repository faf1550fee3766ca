"""What the backends on our C kernels are called: by the products they make, and so by their bits."""

from __future__ import annotations

from typing import Final

from loraplex_kernels.cpu.linear import Arithmetic

_SUFFIXES: Final[dict[Arithmetic, str]] = {
    "fp32": "",
    "amx": "_amx",
    "avx512_bf16": "_avx512_bf16",
}


def native_name(arithmetic: Arithmetic, kind: str = "") -> str:
    """`native`, what kind of it, and the arithmetic where it is not fp32: `native_int4_amx`."""
    return f"native{kind and '_' + kind}{_SUFFIXES[arithmetic]}"
