"""One ahead-of-time build: what to compile, for which architecture, and what the result must contain.

Each kernel module exports

    def aot_cases(table: PlanTable, support: Support) -> Iterator[AotCase]

which yields, for one column of one architecture, every plan entry that `support` allows, at the shape the
entry was made for (Llama-3.1-8B's where nothing says otherwise). `aot.py` finds the modules and compiles.
The launch wrapper and `aot_cases` must agree on types and constants: build both from the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loraplex_kernels.plans import Plan


@dataclass(frozen=True, slots=True)
class AotCase:
    """One build."""

    kernel: str
    fn: Any  # the @triton.jit function
    # Run-time arguments only, by name: "*bf16", "i32", "fp32"; in any order.
    signature: Mapping[str, str]
    # Every tl.constexpr argument, those of the plan too.
    constexprs: Mapping[str, Any]
    # Run-time arguments whose pointer or value is a multiple of 16 (what Triton finds out at a launch).
    divisible_by_16: tuple[str, ...]
    plan: Plan
    arch: str
    dtype: str
    # The tensor-core instruction that must be there; "wgmma" is tcgen05 on sm_100 and mma on sm_80/89.
    needs: Literal["mma", "wgmma"] | None
    bytes_moved: int  # to and from device memory, each operand once
    flops: int
    shape: str  # for people: "T=16 H=4096"
    # Kernels that only gather single numbers say False; for all others a 16-byte access must be there.
    has_vector_loads: bool = True
