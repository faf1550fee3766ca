"""Kernels with one fault each, built ahead of time: prints {name: its failures} as JSON.

Run as a process of its own, as Triton must not be interpreted: `python -m tests.support.aot_samples`.
"""

from __future__ import annotations

import json
from dataclasses import replace

import triton
import triton.language as tl
from loraplex_kernels.aot_build import build
from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.aot_registry import Group
from loraplex_kernels.plans import Plan


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


@triton.jit
def _multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision="ieee"))


def plan(num_warps: int = 4) -> Plan:
    return Plan({}, num_warps, 1, "for tests", "fast: any")


COPY = AotCase(
    kernel="copy",
    fn=_copy,
    signature={"source": "*bf16", "target": "*bf16", "count": "i32"},
    constexprs={"BLOCK": 1024},
    divisible_by_16=("source", "target", "count"),
    plan=plan(),
    arch="sm_90",
    dtype="bf16",
    needs=None,
    bytes_moved=4096,
    flops=0,
    shape="1024",
)
MULTIPLY = replace(
    COPY,
    kernel="multiply",
    fn=_multiply,
    signature={"a": "*bf16", "b": "*bf16", "out": "*bf16"},
    constexprs={"M": 64, "N": 64, "K": 64},
    divisible_by_16=("a", "b", "out"),
    needs="wgmma",
)
SAMPLES = {
    "sound copy": COPY,
    "sound product": MULTIPLY,
    "unaligned": replace(COPY, divisible_by_16=()),
    "unaligned, as meant": replace(COPY, divisible_by_16=(), has_vector_loads=False),
    "no product": replace(COPY, needs="mma"),
    "too few rows for wgmma": replace(MULTIPLY, constexprs={"M": 16, "N": 64, "K": 64}),
    "spills": replace(MULTIPLY, constexprs={"M": 128, "N": 256, "K": 64}, plan=plan(num_warps=1)),
    "too much shared memory": replace(
        MULTIPLY, arch="sm_89", constexprs={"M": 128, "N": 128, "K": 512}, plan=plan(num_warps=8)
    ),
    "argument forgotten": replace(COPY, signature={"source": "*bf16", "target": "*bf16"}),
    "no such type": replace(
        MULTIPLY, arch="sm_80", needs="mma", signature={**MULTIPLY.signature, "a": "*fp8e4nv"}
    ),
}


if __name__ == "__main__":
    print(json.dumps({name: build(Group((case,)))[0].failures for name, case in SAMPLES.items()}))
