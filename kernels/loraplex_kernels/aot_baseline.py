"""The committed figures of every build, and what counts as worse.

A compiler or a kernel may cost a few registers more without harm; shared memory follows from the plan and may
not grow; spills never. Nor may narrow accesses: one operand that lost its alignment shows there, while wide ones
of the others remain. A build that the baseline does not know, or knows and does not find, fails too: whoever
changes a plan writes the baseline anew (`--write-baseline`) and the diff shows what it cost.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import triton

from loraplex_kernels.aot_build import Built

PATH = Path(__file__).parent / "aot_baseline.json"
# A thread's registers are handed out 8 at a time.
REGISTERS_TOLERANCE = 8
_KEY = ("kernel", "arch", "dtype", "config", "shape")
_FIGURES = ("registers", "shared_bytes", "spills", "narrow")
_WRITTEN = (*_FIGURES, "wide")


def write(rows: Iterable[Built], path: Path = PATH) -> None:
    """Replace the baseline by `rows`, which must be those of every kernel and architecture."""
    builds = [{name: getattr(row, name) for name in (*_KEY, *_WRITTEN)} for row in rows]
    builds.sort(key=lambda entry: (entry["kernel"], _arch_order(entry["arch"]), _key(entry)))
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in builds)
    path.write_text(f'{{"triton": "{triton.__version__}", "builds": [\n{lines}\n]}}\n')


def is_for_this_triton(path: Path = PATH) -> bool:
    """Whether the baseline was written by the installed Triton: another's figures say nothing."""
    return bool(_read(path)["triton"] == triton.__version__)


def compare(
    rows: Iterable[Built],
    *,
    archs: Collection[str],
    kernels: Collection[str] = (),
    path: Path = PATH,
) -> list[str]:
    """What is worse than the baseline, one line each, among these architectures and kernels (empty: all)."""
    expected = {
        _key(entry): entry
        for entry in _read(path)["builds"]
        if entry["arch"] in archs and (not kernels or entry["kernel"] in kernels)
    }
    problems = []
    for row in rows:
        values = {name: getattr(row, name) for name in (*_KEY, *_FIGURES)}
        name = f"{row.kernel} {row.arch} {row.dtype} ({row.plan}; {row.shape})"
        entry = expected.pop(_key(values), None)
        if entry is None:
            problems.append(f"{name}: not in the baseline: run with --write-baseline")
            continue
        problems += [
            f"{name}: {figure} {entry[figure]} -> {values[figure]}"
            for figure in _FIGURES
            if values[figure]
            > entry[figure] + (REGISTERS_TOLERANCE if figure == "registers" else 0)
        ]
    problems += [
        f"{entry['kernel']} {entry['arch']} {entry['dtype']} ({entry['shape']}): "
        "in the baseline, but no plan makes it: run with --write-baseline"
        for entry in expected.values()
    ]
    return problems


def _key(entry: dict[str, Any]) -> str:
    return json.dumps([entry[name] for name in _KEY], sort_keys=True)


def _arch_order(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
