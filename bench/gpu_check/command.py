"""What the command line of `python -m bench.gpu_check` does; torch is imported by the parts alone."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_check.figures import Figure, Recorder, format_table, read_figures

if TYPE_CHECKING:
    from bench.gpu_check.machine import Machine
    from bench.gpu_check.sizes import Sizes

_ROOT = Path(__file__).resolve().parents[2]
# All parts together; the issue gives five minutes.
_TOTAL_S = 285.0
# What the parts import: torch with its Triton, and deploy/gpu-requirements.txt.
_IMPORTS = ("torch", "triton", "msgspec", "numpy", "safetensors", "structlog")


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part and the seconds it may take."""

    name: str
    limit_s: float
    # It must have the machine to itself. The others are about what is right, and what is not is a failure.
    is_timed: bool = True


# The limits add up to what there is, so that none starves another; the untimed parts count once, for their longest.
PARTS = (
    PartSpec("numerics", 100, is_timed=False),
    PartSpec("model-size", 100, is_timed=False),
    PartSpec("parity", 90, is_timed=False),
    PartSpec("staging", 40, is_timed=False),
    PartSpec("gemm-order", 60, is_timed=False),
    PartSpec("memory", 90, is_timed=False),
    PartSpec("bandwidth", 30),
    PartSpec("decode", 90),
    PartSpec("invariant", 35),
    PartSpec("prefill", 30),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended, and what it had measured."""

    part: str
    seconds: float
    problem: str  # empty: none
    figures: list[Figure]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0: all parts ran and every target that concerns correctness holds, or there is no GPU at all."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument(
        "--rehearse", action="store_true", help="run all of it on the CPU, tiny and interpreted"
    )
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS])
    parser.add_argument("--json", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rehearse:
        # Read by Triton when it is first imported, here or in the parts' processes.
        os.environ["TRITON_INTERPRET"] = "1"
    if options.part:
        run_part(options.part, options.figures, is_rehearsal=options.rehearse)
        return 0
    if not options.rehearse:
        reason = why_no_gpu()
        if reason is not None:
            is_there, text = reason
            (sys.stderr if is_there else sys.stdout).write(text + "\n")
            return int(is_there)
    specs = [part for part in PARTS if not options.only or part.name in options.only]
    facts = machine_facts(is_rehearsal=options.rehearse)
    # The interpreter takes its time, and a rehearsal is not what the limits are for.
    patience = 10.0 if options.rehearse else 1.0
    outcomes = run_parts(
        [replace(spec, limit_s=patience * spec.limit_s) for spec in specs],
        lambda spec, path: _command(spec, path, options.rehearse),
        total_s=patience * _TOTAL_S,
    )
    sys.stdout.write(report(facts, outcomes) + "\n")
    if options.json:
        options.json.write_text(json.dumps(as_json(facts, outcomes), indent=1) + "\n")
    return int(any(outcome.problem or _is_wrong(outcome) for outcome in outcomes))


def run_part(name: str, figures: Path, *, is_rehearsal: bool) -> None:
    """Run one part in this process."""
    from bench.gpu_check.machine import CudaMachine, RehearsalMachine
    from bench.gpu_check.sizes import FULL, REHEARSAL

    machine = RehearsalMachine() if is_rehearsal else CudaMachine()
    part_runs()[name](machine, REHEARSAL if is_rehearsal else FULL, Recorder(name, figures))


def part_runs() -> dict[str, Callable[[Machine, Sizes, Recorder], None]]:
    """What each of `PARTS` does."""
    from bench.gpu_check import bandwidth, device_only, memory, model_size, numerics, parity, speed

    return {
        "numerics": numerics.run,
        "model-size": model_size.run,
        "parity": parity.run,
        "staging": device_only.run_staging,
        "gemm-order": device_only.run_gemm_order,
        "memory": memory.run,
        "bandwidth": bandwidth.run,
        "decode": speed.run_decode,
        "prefill": speed.run_prefill,
        "invariant": speed.run_invariant,
    }


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


def why_no_gpu() -> tuple[bool, str] | None:
    """None: there is a GPU and this Python can use it. Else whether there is one all the same, and what to do."""
    files = gpu_files()
    absent = [name for name in _IMPORTS if importlib.util.find_spec(name) is None]
    if not absent and has_gpu():
        return None
    if not files:
        return False, (
            "No NVIDIA GPU here: nothing to check. (--rehearse runs every part on the CPU.)"
        )
    if absent:
        remedy = f"install deploy/gpu-requirements.txt and torch; lacking: {', '.join(absent)}"
    else:
        remedy = "its torch sees no CUDA device: is it a CUDA build, and new enough for the driver?"
    return True, (
        f"{files[0]} is there, but {sys.executable} cannot use it: {remedy}."
        " (Another Python: make gpu-check GPU_PYTHON=<path>)"
    )


def gpu_files() -> list[str]:
    """The driver's device files."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def machine_facts(*, is_rehearsal: bool) -> dict[str, str]:
    """See `Machine.facts`."""
    from bench.gpu_check.machine import CudaMachine, RehearsalMachine

    return (RehearsalMachine() if is_rehearsal else CudaMachine()).facts()


def run_parts(
    specs: Sequence[PartSpec],
    command: Callable[[PartSpec, Path], list[str]],
    *,
    total_s: float = _TOTAL_S,
) -> list[Outcome]:
    """Run the parts, timed ones one after the other, each within its limit and all within `total_s`.

    Args:
        command: (part, file for its figures) -> what to start.
    """
    deadline = time.monotonic() + total_s
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:

        def run(spec: PartSpec) -> Outcome:
            path = Path(folder) / f"{spec.name}.jsonl"
            limit = min(spec.limit_s, deadline - time.monotonic())
            started = time.monotonic()
            problem = "not run: the time was spent"
            if limit > 0:
                sys.stderr.write(f"{spec.name} ...\n")
                problem = _run(command(spec, path), limit)
            return Outcome(spec.name, time.monotonic() - started, problem, read_figures(path))

        # Compiling is most of what untimed parts do, and it takes the host's cores.
        untimed = [spec for spec in specs if not spec.is_timed]
        with ThreadPoolExecutor(max(1, len(untimed))) as side_by_side:
            outcomes = list(side_by_side.map(run, untimed))
        return outcomes + [run(spec) for spec in specs if spec.is_timed]


def _run(command: list[str], limit_s: float) -> str:
    """Empty, or why it ended badly."""
    try:
        done = subprocess.run(
            command, cwd=_ROOT, timeout=limit_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"exit {done.returncode}: " + " | ".join(lines[-3:])


def _command(spec: PartSpec, path: Path, is_rehearsal: bool) -> list[str]:
    command = [sys.executable, "-m", "bench.gpu_check", "--part", spec.name]
    command += ["--figures", str(path)]
    return [*command, "--rehearse"] if is_rehearsal else command


def _is_wrong(outcome: Outcome) -> bool:
    """Speed that misses its target is a finding; numbers that are wrong are a failure."""
    is_timed = {part.name: part.is_timed for part in PARTS}[outcome.part]
    return not is_timed and any(figure.holds is False for figure in outcome.figures)


def report(facts: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """The text that is printed."""
    lines = ["  ".join(f"{name}: {value}" for name, value in facts.items()), ""]
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    lines += [format_table(figures), ""]
    lines.append(", ".join(f"{outcome.part} {outcome.seconds:.0f} s" for outcome in outcomes))
    lines += [
        f"PROBLEM {outcome.part}: {outcome.problem}" for outcome in outcomes if outcome.problem
    ]
    missed = [figure for figure in figures if figure.holds is False]
    lines.append(
        f"{len(missed)} of {len([f for f in figures if f.target is not None])} targets missed"
    )
    return "\n".join(lines)


def as_json(facts: dict[str, str], outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The same, for programs."""
    return {
        "machine": facts,
        "parts": [
            {
                "name": outcome.part,
                "seconds": outcome.seconds,
                "problem": outcome.problem,
                "figures": [
                    {**asdict(figure), "holds": figure.holds} for figure in outcome.figures
                ],
            }
            for outcome in outcomes
        ],
    }
