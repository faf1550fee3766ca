"""`make bench`: Loraplex and its peers on the same workload files, in turns, as tables, JSON and a chart.

Each round takes every workload to every contender, one after the other, ours first in odd rounds and last in
even ones; each replay is a process tree of its own. A contender that cannot be had or fails gets a row with
the reason, and the bench goes on. Results are saved after each replay. bench/suite.py says what the workloads
are, bench/peers/ how each peer is set up. The first run installs and builds peers (about twenty minutes on two
cores, some gigabytes, in <cache>/peers); later ones find them there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from loraplex_engine.threads import usable_cpus
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import adapters, report, scale, suite, workload
from bench.peers import all_contenders
from bench.peers.base import Contender, Place, Tell, UnavailableError
from bench.peers.names import OURS
from bench.processes import StartError

_SCHEMA = 1
_OUT = Path("bench/results/latest.json")
_ROOFLINE_LIMIT_S = 600
_QUICK_LIMIT_S = 240.0
_LIMIT_S = 1200.0


def _parse(contenders: Sequence[Contender]) -> argparse.Namespace:
    peers = [contender.name for contender in contenders if contender.name != OURS]
    cache = Path(os.environ.get("LORAPLEX_CACHE_DIR") or "~/.cache/loraplex").expanduser()
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )

    def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if text in {"all", "none"}:
                return list(known) if text == "all" else []
            names = text.split(",")
            for name in names:
                if name not in known:
                    raise argparse.ArgumentTypeError(
                        f"{name!r} is not one of {', '.join(known)} (or all, or none)"
                    )
            return names

        return parse

    defaults = [name for name in suite.NAMES if name != suite.SCALE]
    parser.add_argument(
        "--workload",
        type=names_of(suite.NAMES),
        default=defaults,
        metavar="A,B",
        help=f"of {', '.join(suite.NAMES)}; all: every one. Default: all but scale",
    )
    parser.add_argument(
        "--peers",
        type=names_of(peers),
        default=peers,
        metavar="A,B",
        help=f"of {', '.join(peers)}; all or none. Default: all",
    )
    parser.add_argument("--rounds", type=int, default=2, help="Default: 2")
    parser.add_argument(
        "--once",
        type=names_of(peers),
        default=[],
        metavar="A,B",
        help="peers that are measured in the first round only: slow ones",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        help=f"a replay is cut off after so long, and its speed until then counts. "
        f"Default: {_LIMIT_S:.0f}; with --quick {_QUICK_LIMIT_S:.0f}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few requests, one round: does all of it work?"
    )
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="install, build and convert what the peers need, measure nothing; exits 1 if one cannot be had",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="of ours, transformers and vLLM. Default: what the engine takes here",
    )
    parser.add_argument("--model", type=Path, default=cache / "models" / suite.BASE_MODEL)
    parser.add_argument("--cache", type=Path, default=cache, help=f"Default: {cache}")
    parser.add_argument("--out", type=Path, default=_OUT, help=f"JSON. Default: {_OUT}")
    parser.add_argument("--chart", type=Path, help="SVG. Default: beside the JSON")
    parser.add_argument(
        "--logs", type=Path, help="keep logs and data there, not in a temporary folder"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 at least")
    if not (args.model / "config.json").exists():
        parser.error(f"--model {args.model} is no model folder: `make model` makes the default one")
    if args.prepare_only and not args.peers:
        parser.error(
            "--prepare-only prepares peers, but --peers names none: name some, or leave one out"
        )
    if args.quick:
        args.rounds = 1
    args.limit_s = args.limit_s or (_QUICK_LIMIT_S if args.quick else _LIMIT_S)
    args.chart = args.chart or args.out.with_suffix(".svg")
    return args


def main() -> None:
    """Command line of `make bench`; exits 1 if a request to ours was not answered in full."""
    # Ends what runs, which is in sessions of its own, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    contenders = all_contenders()
    args = _parse(contenders)
    chosen = [c for c in contenders if c.name == OURS or c.name in args.peers]
    console = report.make_console()
    with contextlib.ExitStack() as stack:
        if args.logs is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lpx-bench-")))
        else:
            scratch = args.logs
            scratch.mkdir(parents=True, exist_ok=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        progress = stack.enter_context(Progress(*columns, console=console))
        bench = Bench(args, chosen, scratch, console, progress)
        if args.prepare_only:
            sys.exit(0 if bench.prepare_peers() else 1)
        bench.run()
    report.print_report(bench.content, console)
    has_chart = report.write_chart(bench.content, args.chart, console)
    console.print(f"written: {args.out}" + (f", {args.chart}" if has_chart else ""))
    sys.exit(1 if _has_failed(bench.content) else 0)


def _has_failed(content: dict[str, Any]) -> bool:
    ours = [run for run in content["runs"] if run["contender"].startswith(OURS)] + content["scale"]
    return any("failed" in run or run["errors"] for run in ours)


class Bench:
    """One run of it; `content` is what the results file holds."""

    def __init__(
        self,
        args: argparse.Namespace,
        contenders: Sequence[Contender],
        scratch: Path,
        console: Console,
        progress: Progress,
    ) -> None:
        self._args = args
        self._contenders = contenders
        self._console = console
        self._progress = progress
        tokenizer = args.model / "tokenizer.json"
        self._workloads = suite.make(args.workload, tokenizer, is_quick=args.quick)
        self._has_scale = suite.SCALE in args.workload
        models = {name for one in self._workloads for _, name in one.models}
        models |= {suite.adapter_name(n) for n in range(scale.num_adapters(self._has_scale))}
        self._task = progress.add_task("preparing", total=None)
        folder = adapters.fleet(
            args.cache / "bench",
            args.model,
            [(name, suite.rank_of(name)) for name in sorted(models)],
            base_name=suite.BASE_MODEL,
        )
        self._place = Place(
            model_dir=args.model,
            adapters_dir=folder,
            cache=args.cache / "peers",
            scratch=scratch,
            dtype=args.dtype,
            num_threads=usable_cpus(),
            limit_s=args.limit_s,
        )
        self.content: dict[str, Any] = {
            "schema": _SCHEMA,
            "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv[1:]),
            "commit": _commit(),
            "is_quick": args.quick,
            "rounds": args.rounds,
            "limit_s": args.limit_s,
            "dtype": args.dtype,
            "num_threads": self._place.num_threads,
            "cpu": _cpu_name(),
            "memory_gib": psutil.virtual_memory().total / 2**30,
            "versions": {
                "python": platform.python_version(),
                **{n: importlib.metadata.version(n) for n in ("torch", "transformers", "peft")},
            },
            "machine": {},
            "workloads": {},
            "contenders": {
                c.name: {"title": c.title, "cannot": list(c.cannot), "weights": c.weights}
                for c in contenders
            },
            "runs": [],
            "scale": [],
        }

    def run(self) -> None:
        """Everything, in order."""
        self._measure_roofline()
        ready = self._prepare()
        plan = [
            (number, one, contender)
            for number in range(self._args.rounds)
            for one in self._workloads
            for contender in (ready if number % 2 == 0 else reversed(ready))
            if contender.is_for(one) and (number == 0 or contender.name not in self._args.once)
        ]
        self._progress.update(self._task, total=len(plan), completed=0)
        for number, one, contender in plan:
            self._measure(number, one, contender)
            self._progress.advance(self._task)
        if self._has_scale:
            self._scale(ready)
        self._measure_roofline()
        self._save()

    def prepare_peers(self) -> bool:
        """Only what later benches find done: not ours, whose data lives as long as one bench."""
        peers = [one for one in self._contenders if not one.name.startswith(OURS)]
        missing = [(one, reason) for one in peers if (reason := self._prepare_one(one)) is not None]
        for one, reason in missing:
            self._say(f"not to be had: {one.title}: {reason}")
        return not missing

    def _tell(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def _teller(self, label: str) -> Tell:
        return lambda text: self._tell(f"{label}: {text}")

    def _say(self, line: str) -> None:
        """A line that stays, in a terminal above the bar and in a log."""
        clock = datetime.datetime.now().astimezone().strftime("%H:%M:%S")
        self._console.print(f"{clock}  {line}", markup=False, highlight=False, soft_wrap=True)

    def _measure_roofline(self) -> None:
        """The machine at its best so far, and each workload's floor on that."""
        self._tell("measuring the machine")
        command = [sys.executable, "-m", "bench.roofline", "--dtype", self._args.dtype]
        command += ["--model-dir", str(self._args.model)]
        command += ["--adapters", str(self._place.adapters_dir)]
        for figure in ("read_gb_s", "gemm_gflop_s"):
            if figure in self.content["machine"]:
                command += [f"--{figure.replace('_', '-')}", str(self.content["machine"][figure])]
        for one in self._workloads:
            file = self._place.scratch / f"{one.name}.jsonl"
            workload.write(one.items, file)
            command.append(f"{file}:{one.concurrency}")
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ROOFLINE_LIMIT_S
        )
        if done.returncode:
            raise SystemExit(f"measuring the machine failed:\n{done.stderr[-1500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        dtype = found["machine"]["gemm_dtype"]
        self._place = replace(self._place, dtype=dtype)
        self.content |= {"machine": found["machine"], "dtype": dtype}
        self._say(
            f"this machine: {found['machine']['read_gb_s']:.1f} GB/s, "
            f"{found['machine']['gemm_gflop_s']:.0f} GFLOP/s in {dtype}"
        )
        for one in self._workloads:
            self.content["workloads"][one.name] = {
                "title": one.title,
                "concurrency": one.concurrency,
                "counts": one.counts,
                "requests": len(one.items),
                "prompt_tokens": sum(len(item.prompt) for item in one.items),
                "output_tokens": sum(item.max_tokens for item in one.items),
                "sha256": workload.digest(one.items),
                "floor_s": found["floor_s"][one.name],
            }

    def _prepare(self) -> list[Contender]:
        """Those that can run; the others' rows say why not."""
        ready = []
        for contender in self._contenders:
            reason = self._prepare_one(contender)
            if reason is None:
                ready.append(contender)
                continue
            for one in filter(contender.is_for, self._workloads):
                self._record(0, one, contender, {"failed": reason})
        return ready

    def _prepare_one(self, contender: Contender) -> str | None:
        """Why it cannot run, if it cannot."""
        try:
            contender.prepare(self._place, self._workloads, self._teller(contender.title))
        except (UnavailableError, StartError, OSError, subprocess.SubprocessError) as error:
            return str(error)
        self._say(f"ready: {contender.title}")
        return None

    def _measure(self, number: int, one: suite.Workload, contender: Contender) -> None:
        label = f"round {number + 1}, {one.name}, {contender.title}"
        try:
            figures = contender.replay(self._place, one, self._teller(label))
        except (UnavailableError, StartError, OSError) as error:
            figures = {"failed": str(error)}
        self._record(number, one, contender, figures)

    def _record(
        self, number: int, one: suite.Workload, contender: Contender, figures: dict[str, Any]
    ) -> None:
        run = {"workload": one.name, "contender": contender.name, "round": number, **figures}
        self.content["runs"].append(run)
        if "failed" in figures:
            said = str(figures["failed"])
        else:
            said = f"{figures[f'{one.counts}_tokens_per_s']:.1f} tok/s in {figures['wall_s']:.0f} s"
            if figures["errors"]:
                said += f", {figures['errors']} failed: {'; '.join(figures['error_examples'])}"
        self._say(f"round {number + 1}  {one.name:8} {contender.title}: {said}")
        self._save()

    def _scale(self, ready: Sequence[Contender]) -> None:
        ours = next((c for c in ready if c.name == OURS), None)
        if not isinstance(ours, scale.Ours):
            return

        def keep(cell: dict[str, Any]) -> None:
            self.content["scale"].append(cell)
            self._save()

        scale.run(
            ours,
            self._place,
            self._teller("scale"),
            keep,
            is_quick=self._args.quick,
        )

    def _save(self) -> None:
        out = self._args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(self.content, indent=1))
        part.replace(out)


def _commit() -> str | None:
    """Of the checkout, with a mark if it has changes; None outside one."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if found:
            return found[1]
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
