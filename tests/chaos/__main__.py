"""The chaos table: `python -m tests.chaos [--runs 3] [--only WORDS] [--out FILE] [--list]`.

`--out chaos` writes `chaos.md` (the table) and `chaos.json` (all that was counted) after every case. Exit
code 1 if a run was not right. Every case starts and kills real processes; all of them take a quarter of an
hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.cases import CASES
from tests.chaos.table import Row, markdown, run_case
from tests.chaos.world import World
from tests.support.folders import delete_leftovers, short_folder


async def _run(options: argparse.Namespace) -> int:
    rows = [Row(case) for case in CASES if any(words in case.name for words in options.only)]
    began_s = time.monotonic()
    delete_leftovers()
    with short_folder() as folder:
        async with World.open(folder) as world:
            for number, row in enumerate(rows, 1):
                print(f"[{number}/{len(rows)}] {row.case.name} ...", flush=True)
                case_began_s = time.monotonic()
                for _ in range(options.runs):
                    try:
                        row.verdicts.append(await run_case(world, row.case))
                    except Exception as error:  # noqa: BLE001 - it is a row of the table
                        row.failures.append(f"{type(error).__name__}: {error}"[:300])
                now_s = time.monotonic()
                print(
                    f"    {now_s - case_began_s:.1f} s of {now_s - began_s:.0f} s: "
                    + ", ".join(row.cells()[2:]),
                    flush=True,
                )
                if options.out is not None:
                    _write(options.out, rows[:number])
    print("\n" + markdown(rows))
    return 1 if any(row.flaws for row in rows) else 0


def _write(out: Path, rows: Sequence[Row]) -> None:
    out.with_suffix(".md").write_text(markdown(rows) + "\n")
    out.with_suffix(".json").write_text(
        json.dumps([row.details() for row in rows], indent=1) + "\n"
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="of each case")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose name has one of these in it"
    )
    parser.add_argument("--out", type=Path, help="write FILE.md and FILE.json")
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.name for case in CASES))
        return 0
    return asyncio.run(_run(options))


if __name__ == "__main__":
    sys.exit(main())
