"""What a bench found: its JSON, its tables, its chart.

    python -m bench.report bench/results/latest.json --chart docs/bench.svg

Medians over rounds; a ratio is ours over a peer's in the same round, then the median; the spread is the
lowest and the highest of the rounds. A round in which requests failed gives no speed: who answers less is
quicker. One that was only cut off at the limit gives the least that it can have been, and is marked; if not even
a token for each request had come by then, it gives no speed either: a ratio to next to nothing says nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import chart, load
from bench.peers.names import OURS

_WIDTH = 165  # in a file; a terminal knows its own
_CUT = "†"
_LEAST = "≥"
Run = Mapping[str, Any]


class Results:
    """Reads the content of a results file (written by bench/run.py)."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    @property
    def workloads(self) -> Mapping[str, Any]:
        """By name, in order."""
        found: Mapping[str, Any] = self.content["workloads"]
        return found

    def contenders(self, workload: str) -> list[str]:
        """Those that were asked to do it, in the order of the table."""
        return [name for name in self.content["contenders"] if self.runs(workload, name)]

    def runs(self, workload: str, contender: str) -> list[Run]:
        """All of its rounds, the failed too."""
        return [
            run
            for run in self.content["runs"]
            if (run["workload"], run["contender"]) == (workload, contender)
        ]

    def good_runs(self, workload: str, contender: str) -> list[Run]:
        """The rounds whose figures count: no request failed but by the time limit."""
        return [run for run in self.runs(workload, contender) if not has_faults(run)]

    def speeds(self, workload: str, contender: str) -> dict[int, float]:
        """Tokens per second by round, of those that count."""
        key = f"{self.workloads[workload]['counts']}_tokens_per_s"
        runs = self.good_runs(workload, contender)
        return {
            run["round"]: run[key]
            for run in runs
            if run[key] > 0 and not self._has_too_little(workload, run)
        }

    def weights(self, contender: str) -> str | None:
        """The type of its weights; None: the file does not say."""
        known = self.content["contenders"][contender].get("weights")
        return known if known is None else str(known or self.content["dtype"])

    def ratio(self, workload: str, contender: str) -> float | None:
        """Ours over theirs."""
        ours, theirs = self.speeds(workload, OURS), self.speeds(workload, contender)
        ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
        return statistics.median(ratios) if ratios else None

    def adapter_cost(self, contender: str) -> float | None:
        """How many times as long `mixed` takes as `base`, the same prompts without adapters."""
        if not {"mixed", "base"} <= self.workloads.keys():
            return None
        mixed, base = self.speeds("mixed", contender), self.speeds("base", contender)
        ratios = [base[number] / mixed[number] for number in base if number in mixed]
        return statistics.median(ratios) if ratios else None

    def roofline_share(self, workload: str, contender: str) -> float | None:
        """Its speed as a share of what the machine could do at most.

        None of another type of weights than the floor was computed for: it has other bytes to read.
        """
        facts = self.workloads[workload]
        speeds = self.speeds(workload, contender)
        is_same = self.weights(contender) == self.content["dtype"]
        if not facts.get("floor_s") or not speeds or not is_same:
            return None
        most = facts[f"{facts['counts']}_tokens"] / facts["floor_s"]
        return statistics.median(speeds.values()) / float(most)

    def median(self, workload: str, contender: str, key: str) -> float | None:
        """Of one figure over the rounds that count and have it."""
        runs = self.good_runs(workload, contender)
        values = [run[key] for run in runs if run.get(key) is not None]
        return statistics.median(values) if values else None

    def failure(self, workload: str, contender: str) -> str | None:
        """Why no round gave a speed, or None."""
        if self.speeds(workload, contender):
            return None
        runs = self.runs(workload, contender)
        reason = next((str(run["failed"]) for run in runs if "failed" in run), None)
        failed, total = self.faults(workload, contender)
        if reason or failed:
            return reason or f"{failed} of {total} failed"
        cut = next((run for run in runs if self._has_too_little(workload, run)), None)
        if cut is None:
            return "no token came"
        return (
            f"{cut['output_tokens']} of {self.workloads[workload]['output_tokens']} tokens came "
            f"within {self.content['limit_s']:.0f} s"
        )

    def _has_too_little(self, workload: str, run: Run) -> bool:
        """Whether it was cut off before as many tokens as requests had come."""
        is_of_output = self.workloads[workload]["counts"] == "output"
        return bool(run.get("is_cut")) and is_of_output and run["output_tokens"] < run["requests"]

    def unanswered(self, workload: str, contender: str) -> tuple[int, int]:
        """Requests that were not answered with exactly the tokens asked for, of all."""
        runs = [run for run in self.runs(workload, contender) if "failed" not in run]
        return sum(run["errors"] for run in runs), sum(run["requests"] for run in runs)

    def faults(self, workload: str, contender: str) -> tuple[int, int]:
        """As `unanswered`, of the rounds that do not count."""
        runs = [
            run for run in self.runs(workload, contender) if "failed" not in run and has_faults(run)
        ]
        return sum(run["errors"] for run in runs), sum(run["requests"] for run in runs)

    def is_cut(self, workload: str, contender: str) -> bool:
        """Whether a round that counts took longer than the limit."""
        return any(run.get("is_cut") for run in self.good_runs(workload, contender))


def has_faults(run: Run) -> bool:
    """Whether it failed, or requests of it did for another reason than the time limit."""
    if "failed" in run:
        return True
    if "faults" in run:
        return bool(run["faults"])
    # A file of before `faults` was counted.
    examples = run.get("error_examples", ())
    return any(e != load.NOT_FINISHED for e in examples) or bool(
        run["errors"] and not run.get("is_cut")
    )


def _cell(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def table(results: Results, workload: str) -> Table:
    """All contenders at one workload."""
    facts = results.workloads[workload]
    made = Table(title=Text(f"{workload}: {facts['title']}"), title_justify="left")
    unit = "prompt tok/s" if facts["counts"] == "prompt" else "output tok/s"
    made.add_column("", min_width=34, no_wrap=True)
    for column in (
        "weights",
        unit,
        "spread",
        "ours is",
        "% of\nroofline",
        "TTFT s\np50 / p95",
        "ITL ms\np50 / p95",
        "GiB, all\n(one process)",
        "start s",
    ):
        made.add_column(column, justify="right")
    made.add_column("failed")
    for name in results.contenders(workload):
        title = results.content["contenders"][name]["title"]
        reason = results.failure(workload, name)
        if reason is not None:
            made.add_row(Text(title), results.weights(name) or "-", *["-"] * 8, Text(reason))
            continue
        speeds = list(results.speeds(workload, name).values())
        failed, total = results.unanswered(workload, name)
        ratio = None if name == OURS else results.ratio(workload, name)

        def of(key: str, scale: float = 1.0, digits: int = 2, name: str = name) -> str:
            return _cell(results.median(workload, name, key), scale, digits)

        is_cut = results.is_cut(workload, name)
        least, cut = (_LEAST, _CUT) if is_cut else ("", "")
        cut_ratio = _CUT if is_cut or results.is_cut(workload, OURS) else ""
        made.add_row(
            Text(title),
            results.weights(name) or "-",
            f"{least}{statistics.median(speeds):.1f}{cut}",
            f"{min(speeds):.1f}-{max(speeds):.1f}" if len(speeds) > 1 else "-",
            "" if ratio is None else f"{ratio:.2f}x{cut_ratio}",
            _cell(results.roofline_share(workload, name), 100, 0),
            f"{of('ttft_p50_s')} / {of('ttft_p95_s')}",
            f"{of('inter_token_p50_s', 1e3, 0)} / {of('inter_token_p95_s', 1e3, 0)}",
            f"{of('peak_memory_gib')} ({of('peak_process_gib')})",
            of("startup_s", 1.0, 1),
            f"{failed} of {total}" if failed else "none",
        )
    return made


def scale_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Ours as adapters and concurrency grow."""
    made = Table(title="scale: output tok/s of ours, prompts 64, output 32", title_justify="left")
    levels = sorted({cell["concurrency"] for cell in cells})
    made.add_column("adapters used (registered)")
    for level in levels:
        made.add_column(f"{level} in flight", justify="right")
    for column in ("GiB, all (one process)", "start s", "failed"):
        made.add_column(column, justify="right")
    for adapters, registered in sorted({(c["adapters"], c["registered"]) for c in cells}):
        row = [c for c in cells if (c["adapters"], c["registered"]) == (adapters, registered)]
        by_level = {cell["concurrency"]: cell["output_tokens_per_s"] for cell in row}
        failed = sum(cell["errors"] for cell in row)
        made.add_row(
            f"{adapters} ({registered})",
            *(_cell(by_level.get(level), digits=1) for level in levels),
            f"{max(c['peak_memory_gib'] for c in row):.2f} "
            f"({max(c['peak_process_gib'] for c in row):.2f})",
            _cell(row[0]["startup_s"], digits=1),
            str(failed) if failed else "none",
        )
    return made


def notes(results: Results) -> list[str]:
    """What has to be said under the tables."""
    content = results.content
    machine = content.get("machine", {})
    lines = [
        f"{content['rounds']} round(s), dtype {content['dtype']}, {content['num_threads']} threads each; "
        f"memory {machine.get('read_gb_s', 0):.1f} GB/s, GEMM {machine.get('gemm_gflop_s', 0):.0f} GFLOP/s"
    ]
    if any(run.get("is_cut") for run in content["runs"]):
        lines.append(
            f"{_CUT} cut off after {content['limit_s']:.0f} s: the speed until then, in which more prompts fall "
            f"than in the rest; {_LEAST} at least, since frames were counted, which may hold several tokens; a "
            "ratio with it is one of these; what was not answered counts as failed"
        )
    costs = {name: results.adapter_cost(name) for name in content["contenders"]}
    told = [
        f"{content['contenders'][name]['title']} {cost:.2f}x"
        for name, cost in costs.items()
        if cost is not None
    ]
    if told:
        lines.append(f"what the adapters of mixed cost, in time of base: {', '.join(told)}")
    if any("failed" not in run and has_faults(run) for run in content["runs"]):
        lines.append("a round in which requests failed gives no speed, ratio or share")
    if any(results.weights(name) != content["dtype"] for name in content["contenders"]):
        lines.append(
            f"% of roofline: of weights in {content['dtype']}, for which the floor was computed; '-' for others"
        )
    if content.get("is_quick"):
        lines.append("--quick: few requests and tokens; these figures count for nothing")
    for facts in content["contenders"].values():
        lines += [f"{facts['title']}: {text}" for text in facts["cannot"]]
    return lines


def print_report(content: Mapping[str, Any], console: Console) -> None:
    """Tables and notes."""
    results = Results(content)
    for name in results.workloads:
        console.print(table(results, name))
    if content.get("scale"):
        console.print(scale_table(content["scale"]))
    for line in notes(results):
        console.print(Text(line), soft_wrap=True)


def chart_groups(results: Results) -> list[chart.Group]:
    """One group of bars per workload."""
    groups = []
    for name, facts in results.workloads.items():
        bars = []
        for contender in results.contenders(name):
            title = results.content["contenders"][contender]["title"]
            speeds = results.speeds(name, contender)
            is_ours = contender.startswith(OURS)
            failed, total = results.faults(name, contender)
            if not speeds:
                reason = (results.failure(name, contender) or "").splitlines()[0]
                bars.append(chart.Bar(title, None, reason[:70], is_ours=is_ours))
                continue
            ratio = None if contender == OURS else results.ratio(name, contender)
            is_cut = results.is_cut(name, contender)
            mark = _CUT if is_cut or results.is_cut(name, OURS) else ""
            said = [
                "" if ratio is None else f"ours: {ratio:.1f}x{mark}",
                f"{_CUT} cut off, at least" if is_cut else "",
                f"{failed} of {total} failed" if failed else "",
            ]
            note = " ".join(filter(None, said))
            bars.append(chart.Bar(title, statistics.median(speeds.values()), note, is_ours=is_ours))
        groups.append(chart.Group(name, facts["title"], "tok/s", bars))
    return groups


def write_chart(content: Mapping[str, Any], path: Path, console: Console) -> bool:
    """The SVG, and whether it was written: not so if ours failed, which is said on the console."""
    results = Results(content)
    ours = [run for run in content["runs"] if run["contender"].startswith(OURS)]
    bad = sorted({f"{run['workload']}, {run['contender']}" for run in ours if has_faults(run)})
    if bad:
        text = f"no chart written to {path}: requests to ours failed ({'; '.join(bad)}); see the tables"
        console.print(Text(text), soft_wrap=True)
        return False
    machine = content.get("machine", {})
    title = (
        f"Tokens per second, {content['num_threads']} CPU threads, {content['dtype']} "
        f"({machine.get('gemm_gflop_s', 0):.0f} GFLOP/s, {machine.get('read_gb_s', 0):.0f} GB/s)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart.draw(chart_groups(results), title))
    return True


def make_console() -> Console:
    """As wide as the terminal, or wide enough for the tables in a file."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


def main() -> None:
    """Print a results file again, and draw its chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--chart", type=Path, help="write the SVG there")
    args = parser.parse_args()
    content = json.loads(args.results.read_text())
    console = make_console()
    print_report(content, console)
    if args.chart is not None and not write_chart(content, args.chart, console):
        sys.exit(1)


if __name__ == "__main__":
    main()
