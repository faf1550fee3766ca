"""What a bench found: its JSON, its tables, its chart.

    python -m bench.report bench/results/latest.json --chart docs/bench.svg

Medians over rounds; a ratio is ours over a peer's in the same round, then the median; the spread is the
lowest and the highest of the rounds.
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

from bench import chart
from bench.peers.names import OURS

_WIDTH = 150  # in a file; a terminal knows its own
_CUT = "†"
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

    def speeds(self, workload: str, contender: str) -> dict[int, float]:
        """Tokens per second by round, without the failed ones."""
        key = f"{self.workloads[workload]['counts']}_tokens_per_s"
        return {
            run["round"]: run[key]
            for run in self.runs(workload, contender)
            if "failed" not in run and run[key] > 0
        }

    def ratio(self, workload: str, contender: str) -> float | None:
        """Ours over theirs."""
        ours, theirs = self.speeds(workload, OURS), self.speeds(workload, contender)
        ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
        return statistics.median(ratios) if ratios else None

    def roofline_share(self, workload: str, contender: str) -> float | None:
        """Its speed as a share of what the machine could do at most."""
        facts = self.workloads[workload]
        speeds = self.speeds(workload, contender)
        if not facts.get("floor_s") or not speeds:
            return None
        most = facts[f"{facts['counts']}_tokens"] / facts["floor_s"]
        return statistics.median(speeds.values()) / float(most)

    def median(self, workload: str, contender: str, key: str) -> float | None:
        """Of one figure over the rounds that have it."""
        values = [run[key] for run in self.runs(workload, contender) if run.get(key) is not None]
        return statistics.median(values) if values else None

    def failure(self, workload: str, contender: str) -> str | None:
        """Why no round gave a speed, or None."""
        if self.speeds(workload, contender):
            return None
        runs = self.runs(workload, contender)
        return next((str(run["failed"]) for run in runs if "failed" in run), "no token came")

    def unanswered(self, workload: str, contender: str) -> tuple[int, int]:
        """Requests that were not answered with exactly the tokens asked for, of all."""
        runs = [run for run in self.runs(workload, contender) if "failed" not in run]
        return sum(run["errors"] for run in runs), sum(run["requests"] for run in runs)

    def is_cut(self, workload: str, contender: str) -> bool:
        """Whether a round took longer than the limit."""
        return any(run.get("is_cut") for run in self.runs(workload, contender))


def _cell(value: float | None, scale: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def table(results: Results, workload: str) -> Table:
    """All contenders at one workload."""
    facts = results.workloads[workload]
    made = Table(title=Text(f"{workload}: {facts['title']}"), title_justify="left")
    unit = "prompt tok/s" if facts["counts"] == "prompt" else "output tok/s"
    made.add_column("", min_width=34, no_wrap=True)
    for column in (
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
            made.add_row(Text(title), *["-"] * 8, Text(reason))
            continue
        speeds = list(results.speeds(workload, name).values())
        failed, total = results.unanswered(workload, name)
        ratio = None if name == OURS else results.ratio(workload, name)

        def of(key: str, scale: float = 1.0, digits: int = 2, name: str = name) -> str:
            return _cell(results.median(workload, name, key), scale, digits)

        cut = _CUT if results.is_cut(workload, name) else ""
        made.add_row(
            Text(title),
            f"{statistics.median(speeds):.1f}{cut}",
            f"{min(speeds):.1f}-{max(speeds):.1f}" if len(speeds) > 1 else "-",
            "" if ratio is None else f"{ratio:.2f}x{cut}",
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
            "than in the rest; what was not answered counts as failed"
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
            if not speeds:
                reason = (results.failure(name, contender) or "").splitlines()[0]
                bars.append(chart.Bar(title, None, reason[:70], is_ours=is_ours))
                continue
            ratio = None if contender == OURS else results.ratio(name, contender)
            cut = f" {_CUT} cut off" if results.is_cut(name, contender) else ""
            note = ("" if ratio is None else f"ours: {ratio:.1f}x") + cut
            bars.append(chart.Bar(title, statistics.median(speeds.values()), note, is_ours=is_ours))
        groups.append(chart.Group(name, facts["title"], "tok/s", bars))
    return groups


def write_chart(content: Mapping[str, Any], path: Path) -> None:
    """The SVG."""
    results = Results(content)
    machine = content.get("machine", {})
    title = (
        f"Tokens per second, {content['num_threads']} CPU threads, {content['dtype']} "
        f"({machine.get('gemm_gflop_s', 0):.0f} GFLOP/s, {machine.get('read_gb_s', 0):.0f} GB/s)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart.draw(chart_groups(results), title))


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
    print_report(content, make_console())
    if args.chart is not None:
        write_chart(content, args.chart)


if __name__ == "__main__":
    main()
