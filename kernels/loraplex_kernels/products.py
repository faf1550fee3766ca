"""Matrix products of tiles, as every kernel here writes them.

Triton's interpreter keeps a bf16 number as its bits and multiplies those, so there operands are widened first; that
changes nothing, products of bf16 are exact in fp32. (It also cuts fp32 off where a GPU rounds it to bf16: interpreted
results may be one step of bf16 away.)
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from loraplex_kernels.support import is_interpreted

# Read when the first kernel module is imported: so is TRITON_INTERPRET by Triton.
INTERPRETED: Final = tl.constexpr(is_interpreted())


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr = "ieee"):
    """total + a b, summed in fp32.

    PRECISION is that of fp32 operands: "ieee" for fp32 products without tensor cores, "tf32" on them.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)
