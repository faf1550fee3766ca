"""Memory accesses of the kernels' own builds for sm_90: prints what `Accesses` has as JSON.

Run as a process of its own, as Triton must not be interpreted: `python -m tests.support.aot_accesses`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict

import triton
from loraplex_kernels.aot_build import build, compile_case
from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.aot_registry import Group, find_groups

# The operands that a kernel's time goes into.
LARGE = {"gemm": "weight_ptr", "paged_decode": "kv_ptr", "lora_shrink": "weights_ptr"}
LORA = ("lora_shrink", "lora_expand", "lora_rows_shrink", "lora_rows_expand", "lora_embed")


class Accesses(TypedDict):
    """Rows of a kernel as it is, and with its large operand at any address; loads ahead of all branches and exits."""

    aligned: dict[str, dict[str, Any]]
    unaligned: dict[str, dict[str, Any]]
    loads_before_exit: dict[str, int]


def _first(kernel: str) -> AotCase:
    groups, _ = find_groups(("sm_90",), (kernel,))
    return next(g.cases[0] for g in groups if g.cases[0].dtype == "bf16")


def _row(case: AotCase) -> dict[str, Any]:
    return asdict(build(Group((case,)))[0])


def _unaligned(kernel: str) -> AotCase:
    case = _first(kernel)
    kept = tuple(name for name in case.divisible_by_16 if name != LARGE[kernel])
    assert len(kept) == len(case.divisible_by_16) - 1
    return replace(case, divisible_by_16=kept)


def _loads_before_exit(kernel: str) -> int:
    """In the machine code: ptxas moves loads to where their numbers are used, unless it may not."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_case(_first(kernel)).asm["cubin"])
        file.flush()
        listing = subprocess.run(
            [str(tool), "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    ahead = re.split(r"\b(?:EXIT|BRA)\b", listing, maxsplit=1)[0]
    return len(re.findall(r"\bLDG\b", ahead))


if __name__ == "__main__":
    found: Accesses = {
        "aligned": {kernel: _row(_first(kernel)) for kernel in LARGE},
        "unaligned": {kernel: _row(_unaligned(kernel)) for kernel in LARGE},
        "loads_before_exit": {kernel: _loads_before_exit(kernel) for kernel in LORA},
    }
    print(json.dumps(found))
