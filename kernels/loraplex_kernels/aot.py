"""`python -m loraplex_kernels.aot`: compiles every kernel under every plan, ahead of time, and prints a table.

Exit status: 0 all builds are sound; 1 a build failed (each with its reason); 2 wrong use.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import asdict

import loraplex_kernels
from loraplex_kernels.aot_case import AotCase
from loraplex_kernels.plans import COLUMNS, open_plans
from loraplex_kernels.support import ARCHITECTURES, is_interpreted


def find_cases(archs: list[str], kernels: list[str] | None = None) -> Iterator[AotCase]:
    """The builds of every module of this package that has `aot_cases`, both columns."""
    for info in pkgutil.iter_modules(loraplex_kernels.__path__):
        module = importlib.import_module(f"loraplex_kernels.{info.name}")
        make = getattr(module, "aot_cases", None)
        if make is None:
            continue
        for arch in archs:
            for column in COLUMNS:
                for case in make(open_plans(arch, column), ARCHITECTURES[arch]):
                    if kernels is None or case.kernel in kernels:
                        yield case


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loraplex_kernels.aot", description=__doc__)
    parser.add_argument("--arch", action="append", choices=sorted(ARCHITECTURES))
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if is_interpreted():
        sys.stderr.write("TRITON_INTERPRET=1 is set: unset it, the interpreter cannot compile\n")
        return os.EX_USAGE
    from loraplex_kernels.aot_build import build

    rows = [build(case) for case in find_cases(options.arch or list(ARCHITECTURES), options.kernel)]
    sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    sys.exit(main())
