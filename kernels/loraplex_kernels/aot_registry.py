"""Finds the ahead-of-time builds of this package: every module that has `aot_cases`, both columns, any architectures.

Cases that come to the same binary (often the two columns of one entry) are one `Group`, compiled once.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import loraplex_kernels
from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.plans import COLUMNS, open_plans
from loraplex_kernels.support import ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Group:
    """One binary, and what it is for."""

    cases: tuple[AotCase, ...]  # at least one; alike in all that the compiler sees


@cache
def find_groups(
    archs: tuple[str, ...], kernels: tuple[str, ...]
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """(groups, problems) of these architectures; `kernels` empty: all.

    A module that cannot say its cases (it does not import, has no plan file) is a problem and stops no other.
    The order is the same in every process, so an index names a group.
    """
    by_key: dict[object, list[AotCase]] = {}
    problems = []
    for info in pkgutil.iter_modules(loraplex_kernels.__path__):
        name = f"loraplex_kernels.{info.name}"
        try:
            cases = _cases_of(name, archs)
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with a module is the finding
            if not kernels or info.name in kernels:
                problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for case in cases:
            if not kernels or case.kernel in kernels:
                by_key.setdefault(_key(case), []).append(case)
    return tuple(Group(tuple(cases)) for cases in by_key.values()), tuple(problems)


def _cases_of(module_name: str, archs: Sequence[str]) -> list[AotCase]:
    make = getattr(importlib.import_module(module_name), "aot_cases", None)
    if make is None:
        return []
    return [
        case
        for arch in archs
        for column in COLUMNS
        for case in make(open_plans(arch, column), ARCHITECTURES[arch])
    ]


def _key(case: AotCase) -> object:
    return (
        case.fn.__module__,
        case.fn.__name__,
        case.arch,
        case.needs,
        case.has_vector_loads,
        tuple(sorted(case.signature.items())),
        tuple(sorted((name, repr(value)) for name, value in case.constexprs.items())),
        tuple(sorted(case.divisible_by_16)),
        tuple(sorted(case.plan.options().items())),
    )
