"""Compiles one group of cases and looks at what came out: no GPU is needed, ptxas comes with Triton.

Read from the build: registers and spills (cuobjdump on the cubin), shared memory (Triton's metadata), tensor-core
instructions and the widths of accesses (the PTX).
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
# Accesses to global memory: (numbers of a vector, bits of each) straight into registers, and bytes through
# cp.async into shared memory. A bulk copy is wider than any of them.
_ACCESS = re.compile(r"\b(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b")
_ASYNC_COPY = re.compile(
    r"\bcp\.async\.c[ag]\.shared\.global[^;[]*\[[^]]*\]\s*,\s*\[[^]]*\]\s*,\s*(0x[0-9a-f]+|\d+)"
)
_BULK_COPY = re.compile(r"\bcp\.async\.bulk\.[\w.:]*global")
_WIDE_BYTES = 16


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
    wide: int  # instructions that move 16 bytes a thread or more to or from global memory
    narrow: (
        int  # those that move fewer: look-ups, masks' edges, and operands whose alignment is lost
    )
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
    registers = shared_bytes = spills = wide = narrow = 0
    failures: list[str] = []
    started_s = _cpu_s()
    try:
        compiled = compile_case(first)
    except Exception as error:  # noqa: BLE001 -- whatever the compiler raises is the finding
        failures.append(f"does not compile: {type(error).__name__}: {_last_line(error)}")
    else:
        shared_bytes = int(compiled.metadata.shared)
        registers, spills = _resources(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        wide, narrow = count_accesses(ptx)
        failures += _find_faults(first, ptx, shared_bytes, spills, wide)
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
            wide=wide,
            narrow=narrow,
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


def compile_case(case: AotCase) -> Any:  # noqa: ANN401 -- triton.compiler.CompiledKernel
    """What Triton makes of a case.

    Raises:
        ValueError: an argument of the function is in neither signature nor constexprs, or one that it has not.
    """
    names: list[str] = case.fn.arg_names
    unknown = set(names) ^ {*case.signature, *case.constexprs}
    if unknown:
        raise ValueError(f"signature and constexprs do not match the function: {sorted(unknown)}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(
        fn=case.fn, signature=signature, constexprs=dict(case.constexprs), attrs=attributes
    )
    target = GPUTarget("cuda", ARCHITECTURES[case.arch].capability, 32)
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


def count_accesses(ptx: str) -> tuple[int, int]:
    """(of 16 bytes a thread or more, of fewer) to or from global memory, as they are written, loops once."""
    sizes = [int(count or 1) * int(bits) // 8 for count, bits in _ACCESS.findall(ptx)]
    sizes += [int(size, 0) for size in _ASYNC_COPY.findall(ptx)]
    wide = sum(size >= _WIDE_BYTES for size in sizes)
    return wide + len(_BULK_COPY.findall(ptx)), len(sizes) - wide


def _find_faults(case: AotCase, ptx: str, shared_bytes: int, spills: int, wide: int) -> list[str]:
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
    if case.has_vector_loads and not wide:
        faults.append("no 16-byte access to global memory")
    return faults


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""
