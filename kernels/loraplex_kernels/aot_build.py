"""Compiles one group of cases and looks at what came out: no GPU is needed, ptxas comes with Triton.

Read from the build: registers and spills (cuobjdump on the cubin), shared memory (Triton's metadata), tensor-core
instructions and 16-byte accesses (the PTX).
"""

from __future__ import annotations

import re
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.aot_registry import Group
from loraplex_kernels.roofline import PEAKS
from loraplex_kernels.support import ARCHITECTURES

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# A 16-byte access to global memory, straight into registers or through cp.async into shared memory, or a
# bulk copy, which is wider still.
_WIDE_ACCESS = re.compile(
    r"\b(?:ld|st)\.global[\w.:]*\.v4\.(?:b32|f32|u32)"
    r"|\b(?:ld|st)\.global[\w.:]*\.v2\.(?:b64|f64|u64)"
    r"|\b(?:ld|st)\.global[\w.:]*\.v8\.(?:b16|b32)"
    r"|\bcp\.async\.c[ag]\.shared\.global[^;]*\b(?:0x10|16)\b"
    r"|\bcp\.async\.bulk"
)


@dataclass(frozen=True, slots=True)
class Built:
    """What one build needs of the machine, and what is wrong with it."""

    kernel: str
    arch: str
    dtype: str
    plan: str
    config: dict[str, Any]
    shape: str
    registers: int
    shared_bytes: int
    spills: int  # bytes of a thread's stack and local memory
    bytes_moved: int
    flops: int
    floor_us: float
    cpu_s: float  # of the compilation; 0 in all rows of a binary but the first
    failures: list[str] = field(default_factory=list)


def build(group: Group) -> list[Built]:
    """Compile once and inspect: a row for every shape of the group.

    A compiler's refusal is a failure of the rows, not an exception.
    """
    first = group.cases[0]
    registers = shared_bytes = spills = 0
    failures: list[str] = []
    started_s = _cpu_s()
    try:
        compiled = _compile(first, ARCHITECTURES[first.arch].capability)
    except Exception as error:  # noqa: BLE001 -- whatever the compiler raises is the finding
        failures.append(f"does not compile: {type(error).__name__}: {_last_line(error)}")
    else:
        shared_bytes = int(compiled.metadata.shared)
        registers, spills = _resources(compiled.asm["cubin"])
        failures += _find_faults(first, compiled.asm["ptx"], shared_bytes, spills)
    cpu_s = _cpu_s() - started_s
    by_shape: dict[str, list[AotCase]] = {}
    for case in group.cases:
        by_shape.setdefault(case.shape, []).append(case)
    return [
        Built(
            kernel=first.kernel,
            arch=first.arch,
            dtype=first.dtype,
            plan=_join_labels([case.plan.label for case in cases]),
            config={
                **first.constexprs,
                "num_warps": first.plan.num_warps,
                "num_stages": first.plan.num_stages,
            },
            shape=shape,
            registers=registers,
            shared_bytes=shared_bytes,
            spills=spills,
            bytes_moved=cases[0].bytes_moved,
            flops=cases[0].flops,
            floor_us=PEAKS[first.arch].floor_us(
                bytes_moved=cases[0].bytes_moved,
                flops=cases[0].flops,
                dtype=first.dtype,
                on_tensor_cores=first.needs is not None,
            ),
            cpu_s=0.0 if index else cpu_s,
            failures=list(failures),
        )
        for index, (shape, cases) in enumerate(by_shape.items())
    ]


def _join_labels(labels: list[str]) -> str:
    """["fast: decode", "invariant: decode"] -> "fast+invariant: decode"."""
    columns: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        column, _, when = label.partition(": ")
        columns.setdefault(when, []).append(column)
    return " | ".join(f"{'+'.join(names)}: {when}" for when, names in columns.items())


def _cpu_s() -> float:
    """Of this process and the compilers it started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _compile(case: AotCase, capability: int) -> Any:  # noqa: ANN401 -- triton.compiler.CompiledKernel
    names: list[str] = case.fn.arg_names
    unknown = set(names) ^ {*case.signature, *case.constexprs}
    if unknown:
        raise ValueError(f"signature and constexprs do not match the function: {sorted(unknown)}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(
        fn=case.fn, signature=signature, constexprs=dict(case.constexprs), attrs=attributes
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=case.plan.options())


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack and local memory a thread)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(tool), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = _RESOURCES.findall(listing)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump names {len(found)} functions, not 1: {listing!r}")
    registers, stack, _, local = map(int, found[0])
    return registers, stack + local


def _find_faults(case: AotCase, ptx: str, shared_bytes: int, spills: int) -> list[str]:
    support = ARCHITECTURES[case.arch]
    faults = []
    if shared_bytes > support.shared_bytes:
        faults.append(f"{shared_bytes} bytes of shared memory, {support.shared_bytes} is the limit")
    if spills:
        faults.append(f"{spills} bytes of registers are spilled")
    if case.needs is not None:
        instruction = support.matrix_instruction(case.needs)
        if instruction not in ptx:
            faults.append(f"no {instruction} instruction")
    if case.has_vector_loads and not _WIDE_ACCESS.search(ptx):
        faults.append("no 16-byte access to global memory")
    return faults


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""
