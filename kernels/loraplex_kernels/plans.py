"""Launch plans: which block sizes, warps and stages a kernel runs with, one JSON file per (arch, kernel).

A plan is chosen by what is known on the host before the launch: phase, token bucket, rank, K, N, dtype.
Each entry carries its reason and two columns:

  fast        the quickest known; may differ from one token count to the next
  invariant   one fixed configuration for every token count of a phase, split sizes fixed and aligned to
              absolute positions: a row's bits do not depend on its neighbours

    plans/sm_90/lora_shrink.json
    {"kernel": "lora_shrink", "arch": "sm_90", "entries": [
      {"when": {"phase": "decode", "max_tokens": 16, "max_rank": 64},
       "fast":      {"config": {"BLOCK_M": 16, "SPLIT_K": 8}, "num_warps": 4, "num_stages": 3, "reason": "..."},
       "invariant": {"config": {"BLOCK_M": 16, "SPLIT_K": 4}, "num_warps": 4, "num_stages": 3, "reason": "..."}},
      ...
      {"when": {}, "fast": {...}, "invariant": {...}}]}

The first entry whose bounds hold wins; the last one has none. `tune.py` rewrites the fast column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from loraplex_kernels.support import MODEL_DTYPES

Phase = Literal["decode", "prefill"]
Column = Literal["fast", "invariant"]
COLUMNS: tuple[Column, ...] = get_args(Column)

PLANS_FOLDER = Path(__file__).parent / "plans"

# Choices kept per table: buckets and chunk sizes times kernels and shapes.
_MAX_CHOSEN = 8192
_BOUNDS = ("max_tokens", "max_rank", "max_k", "max_n")


class PlanError(Exception):
    """A plan file is missing or malformed; names file, entry and field."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to launch one kernel."""

    config: Mapping[str, int]  # constexpr arguments of the jitted function
    num_warps: int
    num_stages: int
    reason: str
    label: str = ""  # column and bounds of the entry it came from, for tables

    def launch(self) -> dict[str, int | bool]:
        """The keyword arguments of a launch: `kernel[grid](..., **plan.launch())`."""
        return {**self.config, **self.options()}

    def options(self) -> dict[str, int | bool]:
        """Compiler options alone, for ahead-of-time builds.

        Fused multiply-add is asked for by name: Triton's default is about to change.
        """
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True, slots=True)
class When:
    """The bounds of an entry; None: any."""

    phase: Phase | None = None
    dtype: str | None = None
    max_tokens: int | None = None
    max_rank: int | None = None
    max_k: int | None = None
    max_n: int | None = None

    def holds(
        self, *, phase: Phase, tokens: int, rank: int = 0, k: int = 0, n: int = 0, dtype: str
    ) -> bool:
        """Whether a launch falls under this entry."""
        return (
            self.phase in (None, phase)
            and self.dtype in (None, dtype)
            and (self.max_tokens is None or tokens <= self.max_tokens)
            and (self.max_rank is None or rank <= self.max_rank)
            and (self.max_k is None or k <= self.max_k)
            and (self.max_n is None or n <= self.max_n)
        )

    def __str__(self) -> str:
        words = [word for word in (self.phase, self.dtype) if word]
        words += [
            f"{bound.removeprefix('max_')}<={value}"
            for bound in _BOUNDS
            if (value := getattr(self, bound)) is not None
        ]
        return " ".join(words) or "any"


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One line of a table, in one column."""

    when: When
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanTable:
    """All plans of one architecture in one column; files are read on first use."""

    arch: str
    column: Column
    folder: Path = field(default=PLANS_FOLDER)
    # A choice is made for every launch of an eager step: a look-up, not a walk.
    _chosen: dict[tuple[object, ...], Plan] = field(default_factory=dict, compare=False, repr=False)

    def entries(self, kernel: str) -> tuple[PlanEntry, ...]:
        """Every entry of a kernel, in order of precedence.

        Raises:
            PlanError: there is no such file or it is malformed.
        """
        return _read_entries(self.folder / self.arch / f"{kernel}.json", self.column)

    def choose(
        self,
        kernel: str,
        *,
        phase: Phase,
        tokens: int,
        rank: int = 0,
        k: int = 0,
        n: int = 0,
        dtype: str = "bf16",
    ) -> Plan:
        """The first plan whose bounds hold.

        Args:
            tokens: rows of the launch, padding counted (the bucket's size under graphs).
            rank, k, n: whatever the kernel's owner bounds its entries by; 0 where it has none.

        Raises:
            PlanError: there is no such file or it is malformed.
        """
        key = (kernel, phase, tokens, rank, k, n, dtype)
        chosen = self._chosen.get(key)
        if chosen is None:
            if len(self._chosen) >= _MAX_CHOSEN:
                self._chosen.clear()
            chosen = self._chosen[key] = self._walk(*key)
        return chosen

    def _walk(
        self, kernel: str, phase: Phase, tokens: int, rank: int, k: int, n: int, dtype: str
    ) -> Plan:
        for entry in self.entries(kernel):
            if entry.when.holds(phase=phase, tokens=tokens, rank=rank, k=k, n=n, dtype=dtype):
                return entry.plan
        raise AssertionError("the last entry has no bounds: it was checked on reading")


def open_plans(arch: str, column: Column) -> PlanTable:
    """The committed table of `arch` ("sm_80", "sm_89", "sm_90", "sm_100").

    Raises:
        PlanError: no table for this architecture.
    """
    table = PlanTable(arch, column)
    if not (table.folder / arch).is_dir():
        known = sorted(path.name for path in table.folder.iterdir() if path.is_dir())
        raise PlanError(f"no plans for {arch}: there are {', '.join(known)}")
    return table


@cache
def _read_entries(path: Path, column: Column) -> tuple[PlanEntry, ...]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{path} does not exist: this kernel has no plans here") from None
    except ValueError as error:
        raise PlanError(f"{path}: not valid JSON: {error}") from error
    reader = _Reader(path)
    reader.keys(document, "the file", {"kernel", "arch", "entries"})
    if document["kernel"] != path.stem or document["arch"] != path.parent.name:
        raise reader.error(f"kernel or arch is not that of the path: {document['kernel']!r}")
    if not isinstance(document["entries"], list) or not document["entries"]:
        raise reader.error("entries is empty")
    entries = tuple(
        reader.entry(entry, index, column) for index, entry in enumerate(document["entries"])
    )
    if entries[-1].when != When():
        raise reader.error("the last entry has bounds, so some launches would have no plan")
    return entries


class _Reader:
    """Checks a file's values; every complaint names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def error(self, problem: str) -> PlanError:
        return PlanError(f"{self._path}: {problem}")

    def keys(self, value: object, what: str, expected: set[str]) -> None:
        if not isinstance(value, dict) or set(value) != expected:
            raise self.error(f"{what} must be an object with {', '.join(sorted(expected))}")

    def entry(self, entry: Any, index: int, column: Column) -> PlanEntry:  # noqa: ANN401 -- JSON
        self.keys(entry, f"entry {index}", {"when", *COLUMNS})
        when = self._when(entry["when"], index)
        plan = entry[column]
        self.keys(plan, f"entry {index}, {column}", {"config", "num_warps", "num_stages", "reason"})
        config = plan["config"]
        numbers = [plan["num_warps"], plan["num_stages"], *config.values()]
        if any(not isinstance(number, int) for number in numbers):
            raise self.error(f"entry {index}, {column}: config, warps and stages must be integers")
        if not isinstance(plan["reason"], str) or not plan["reason"]:
            raise self.error(f"entry {index}, {column}: reason is empty")
        return PlanEntry(
            when,
            Plan(
                MappingProxyType(dict(config)),
                plan["num_warps"],
                plan["num_stages"],
                plan["reason"],
                f"{column}: {when}",
            ),
        )

    def _when(self, when: Any, index: int) -> When:  # noqa: ANN401 -- JSON
        if not isinstance(when, dict) or set(when) - {"phase", "dtype", *_BOUNDS}:
            raise self.error(
                f"entry {index}: when may have phase, dtype, {', '.join(_BOUNDS)} and nothing else"
            )
        if when.get("phase") not in (None, *get_args(Phase)):
            raise self.error(f"entry {index}: phase {when['phase']!r}")
        if when.get("dtype") not in (None, *MODEL_DTYPES):
            raise self.error(f"entry {index}: dtype {when['dtype']!r}")
        if any(not isinstance(when[bound], int) for bound in _BOUNDS if bound in when):
            raise self.error(f"entry {index}: bounds must be integers")
        return When(**when)
