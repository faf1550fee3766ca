"""The chaos table, printed: `python -m tests.chaos [--runs 3] [--only WORDS] [--list]`.

Exit code 1 if a run was not right. Every case starts and kills real processes; all of them take a
quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.cases import CASES
from tests.chaos.table import Row, markdown, run_case
from tests.chaos.world import World


async def _run(options: argparse.Namespace) -> int:
    cases = [case for case in CASES if options.only in case.name]
    rows = [Row(case) for case in cases]
    folder = Path(tempfile.mkdtemp(prefix="lpx-"))
    try:
        async with World.open(folder) as world:
            for row in rows:
                began_s = time.monotonic()
                for _ in range(options.runs):
                    try:
                        row.verdicts.append(await run_case(world, row.case))
                    except Exception as error:  # noqa: BLE001 - it is a row of the table
                        row.failures.append(f"{type(error).__name__}: {error}"[:300])
                print(f"{time.monotonic() - began_s:6.1f} s  {row.cells()}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + markdown(rows))
    return 0 if all(row.is_right for row in rows) else 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.name for case in CASES))
        return 0
    return asyncio.run(_run(options))


if __name__ == "__main__":
    sys.exit(main())
