"""`python -m loraplex_kernels.tune`: measure launch plans on this GPU and rewrite the tables with the best.

A kernel module takes part by exporting

    def tune_cases(table: PlanTable, device: torch.device) -> Iterator[TuneCase]

with one case for each entry it wants tuned, at the shape the entry is made for. It is the `fast` column that is
rewritten: in `invariant` a plan is a promise about bits, not about speed. Where no candidate can break that promise
(`gemm` keeps its order of sums, sampling counts in integers) a case says so by naming both columns.
Without a GPU the command says so and succeeds.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import loraplex_kernels
from loraplex_kernels.plans import PLANS_FOLDER, Column, Plan, PlanTable, open_plans
from loraplex_kernels.support import support_of

# A plan is replaced only by one that is clearly quicker: below this, two runs of one plan differ as much.
MIN_GAIN = 0.03

Launch = Callable[[], object]
Timer = Callable[[Launch], float]  # median microseconds of a launch, caches cold


@dataclass(frozen=True, slots=True)
class TuneCase:
    """One entry of a table, to be measured."""

    kernel: str
    entry_index: int
    shape: str  # for people
    candidates: Sequence[Plan]
    bind: Callable[[Plan], Launch]  # the launch under a plan, its tensors made before
    columns: tuple[Column, ...] = ("fast",)  # to be rewritten


@dataclass(frozen=True, slots=True)
class Choice:
    """What measuring one case came to."""

    case: TuneCase
    present: Plan
    best: Plan  # the present one, if nothing is clearly quicker
    present_us: float
    best_us: float
    skipped: tuple[str, ...]  # candidates that do not run here, with the reason

    @property
    def is_changed(self) -> bool:
        """Whether the table should be rewritten."""
        return self.best is not self.present


def candidates(
    config: Mapping[str, Sequence[int]], *, warps: Sequence[int], stages: Sequence[int] = (1,)
) -> list[Plan]:
    """Every combination of the values given."""
    return [
        Plan(dict(zip(config, values, strict=True)), num_warps, num_stages, "candidate")
        for *values, num_warps, num_stages in itertools.product(*config.values(), warps, stages)
    ]


def choose(case: TuneCase, present: Plan, timer: Timer) -> Choice:
    """Measure the present plan and every candidate.

    A candidate that fails to launch (too much shared memory, a shape it does not take) is skipped. The present
    plan's failure is raised: it is what is served.
    """
    present_us = timer(case.bind(present))
    best, best_us = present, present_us
    skipped = []
    for candidate in case.candidates:
        try:
            candidate_us = timer(case.bind(candidate))
        except Exception as error:  # noqa: BLE001 -- whatever stops a launch rules the candidate out
            skipped.append(f"{_describe(candidate)}: {type(error).__name__}: {error}")
            continue
        if candidate_us < best_us:
            best, best_us = candidate, candidate_us
    if best_us > present_us * (1 - MIN_GAIN):
        best, best_us = present, present_us
    return Choice(case, present, best, present_us, best_us, tuple(skipped))


def rewrite(choices: Sequence[Choice], *, arch: str, gpu: str, folder: Path = PLANS_FOLDER) -> None:
    """Write the changed choices of one architecture into their cases' columns of the files."""
    for choice in choices:
        if not choice.is_changed:
            continue
        path = folder / arch / f"{choice.case.kernel}.json"
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for column in choice.case.columns:
            document["entries"][choice.case.entry_index][column] = {
                "config": dict(choice.best.config),
                "num_warps": choice.best.num_warps,
                "num_stages": choice.best.num_stages,
                "reason": (
                    f"measured on {gpu} at {choice.case.shape}: {choice.best_us:.1f} us, "
                    f"{choice.present_us:.1f} us before"
                ),
            }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def find_cases(
    table: PlanTable, device: torch.device, kernels: Sequence[str] = ()
) -> Iterator[TuneCase]:
    """The cases of every module that has `tune_cases`; `kernels` empty: all."""
    for info in pkgutil.iter_modules(loraplex_kernels.__path__):
        make = getattr(importlib.import_module(f"loraplex_kernels.{info.name}"), "tune_cases", None)
        if make is not None:
            for case in make(table, device):
                if not kernels or case.kernel in kernels:
                    yield case


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loraplex_kernels.tune", description=__doc__)
    parser.add_argument("--kernel", action="append", help="only this; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="measure, but leave the files")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stdout.write("No CUDA device here: nothing to tune.\n")
        return 0
    from triton.testing import do_bench

    def measure(launch: Launch) -> float:
        return 1000.0 * float(do_bench(launch, warmup=10, rep=50, return_mode="median"))

    device = torch.device("cuda", 0)
    arch, gpu = support_of(device).name, torch.cuda.get_device_name(device)
    table = open_plans(arch, "fast")
    choices = []
    for case in find_cases(table, device, options.kernel or ()):
        present = table.entries(case.kernel)[case.entry_index].plan
        choice = choose(case, present, measure)
        choices.append(choice)
        sys.stdout.write(f"{_report(choice)}\n")
    if not options.dry_run:
        rewrite(choices, arch=arch, gpu=gpu)
    changed = sum(choice.is_changed for choice in choices)
    sys.stdout.write(f"{len(choices)} entries measured on {gpu} ({arch}), {changed} changed\n")
    return 0


def _report(choice: Choice) -> str:
    case = choice.case
    line = f"{case.kernel} [{case.entry_index}] {case.shape}: {choice.present_us:.1f} us"
    if choice.is_changed:
        line += f" -> {choice.best_us:.1f} us with {_describe(choice.best)}"
    if choice.skipped:
        line += f" ({len(choice.skipped)} of {len(case.candidates)} candidates do not run here)"
    return line


def _describe(plan: Plan) -> str:
    words = [f"{name.lower()}={value}" for name, value in plan.config.items()]
    return " ".join([*words, f"warps={plan.num_warps}", f"stages={plan.num_stages}"])


if __name__ == "__main__":
    sys.exit(main())
