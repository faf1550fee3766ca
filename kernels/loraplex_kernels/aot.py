"""Compile every kernel under every plan, ahead of time and without a GPU, and print what each build needs.

A build fails that does not compile, has more shared memory than the architecture, spills registers, lacks the
tensor-core instruction it was meant to have, or a 16-byte access to memory. Exit status: 0 all builds are sound;
1 something failed, each with its reason; 64 wrong use.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import TYPE_CHECKING

from loraplex_kernels.aot_registry import find_groups
from loraplex_kernels.support import ARCHITECTURES, is_interpreted

if TYPE_CHECKING:
    from loraplex_kernels.aot_build import Built

_BAR = 30


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    if is_interpreted():
        sys.stderr.write("TRITON_INTERPRET=1 is set: unset it, the interpreter cannot compile\n")
        return os.EX_USAGE
    from loraplex_kernels import aot_baseline

    archs = tuple(options.arch or ARCHITECTURES)
    kernels = tuple(options.kernel or ())
    groups, found = find_groups(archs, kernels)
    problems = list(found)
    if not groups:
        problems.append(f"no builds: no kernel is called {', '.join(kernels)}")
    built = dict(_build_all(archs, kernels, options))
    rows = [row for index in sorted(built) for row in built[index]]
    problems += [
        f"{row.kernel} {row.arch} {row.dtype} ({row.plan}; {row.shape}): {failure}"
        for row in rows
        for failure in row.failures
    ]
    if options.write_baseline:
        if problems:
            problems.append("the baseline was not written: mend the builds first")
        else:
            aot_baseline.write(rows)
    elif options.check:
        if aot_baseline.is_for_this_triton():
            problems += aot_baseline.compare(rows, archs=archs, kernels=kernels)
        else:
            sys.stderr.write("The baseline is another Triton's: figures are not compared.\n")
    if options.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _table(rows))
    cpu_s = sum(row.cpu_s for row in rows)
    sys.stderr.write(
        f"{len(groups)} builds, {len(rows)} rows, {cpu_s:.0f} CPU-seconds, {len(problems)} failed\n"
    )
    sys.stderr.writelines(f"FAILED {problem}\n" for problem in problems)
    return int(bool(problems))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loraplex_kernels.aot", description=__doc__)
    add = parser.add_argument
    add("--arch", action="append", choices=list(ARCHITECTURES), help="only this; may be repeated")
    add("--kernel", action="append", help="only this; may be repeated")
    add("--json", action="store_true", help="a JSON list instead of the table")
    add("--check", action="store_true", help="fail where a build is worse than the baseline")
    add("--write-baseline", action="store_true", help="replace the committed baseline")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (all CPUs)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.write_baseline and (options.arch or options.kernel):
        parser.error("--write-baseline needs every build: leave out --arch and --kernel")
    return options


def _build_all(
    archs: tuple[str, ...], kernels: tuple[str, ...], options: argparse.Namespace
) -> Iterator[tuple[int, list[Built]]]:
    """(group's index, its rows), as they are done. A process dies with its build alone."""
    count = len(find_groups(archs, kernels)[0])
    # The fork server imports torch and Triton once; each worker is a copy of it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loraplex_kernels.aot_build"])
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        futures = {
            pool.submit(_build_group, archs, kernels, index): index for index in range(count)
        }
        for done, future in enumerate(as_completed(futures), start=1):
            yield futures[future], future.result()
            _show_progress(done, count)


def _build_group(archs: tuple[str, ...], kernels: tuple[str, ...], index: int) -> list[Built]:
    """In a worker: groups are found anew, as jitted functions cannot be sent."""
    from loraplex_kernels.aot_build import build

    return build(find_groups(archs, kernels)[0][index])


def _show_progress(done: int, count: int) -> None:
    if sys.stderr.isatty():
        filled = _BAR * done // count
        end = "\n" if done == count else ""
        sys.stderr.write(f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{count}{end}")
        sys.stderr.flush()


def _table(rows: Sequence[Built]) -> Iterator[str]:
    header = ("kernel", "arch", "dtype", "plan", "shape", "config", "regs", "shared", "spills")
    cells = [
        (*header, "wide", "narrow", "MB", "floor us", ""),
        *(
            (
                *(row.kernel, row.arch, row.dtype, row.plan, row.shape, _describe(row.config)),
                *(str(row.registers), str(row.shared_bytes), str(row.spills)),
                *(str(row.wide), str(row.narrow)),
                *(f"{row.bytes_moved / 1e6:.1f}", f"{row.floor_us:.1f}"),
                "FAILED" if row.failures else "ok",
            )
            for row in rows
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(
            cell.rjust(width) if 6 <= index <= 12 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()


def _describe(config: dict[str, object]) -> str:
    return " ".join(f"{name.lower()}={value}" for name, value in config.items())


if __name__ == "__main__":
    sys.exit(main())
