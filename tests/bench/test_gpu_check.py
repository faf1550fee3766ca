"""The script for a GPU, rehearsed without one: every part runs, and one that fails stops nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_check import command
from bench.gpu_check.command import Outcome, PartSpec
from bench.gpu_check.figures import Figure, Recorder, format_table, read_figures

ROOT = Path(__file__).parents[2]


def rehearse(part: str, folder: Path) -> dict[str, Figure]:
    path = folder / "figures.jsonl"
    command.run_part(part, path, is_rehearsal=True)
    return {figure.name: figure for figure in read_figures(path)}


def test_numerics(tmp_path: Path) -> None:
    figures = rehearse("numerics", tmp_path)

    assert {
        *("rms_norm", "gated", "head_norm", "gemm", "rope_kv kv", "paged_decode", "paged_prefill"),
        *("lora few rows", "lora decode", "lora prefill", "sample greedy", "sample top_p"),
    } <= figures.keys()
    assert [figure for figure in figures.values() if not figure.holds] == []


def test_parity(tmp_path: Path) -> None:
    figures = rehearse("parity", tmp_path)

    assert [figure for figure in figures.values() if figure.holds is False] == []
    assert figures["tiny float32: graph replays"].value >= 1
    assert figures["tiny float32: tokens as in torch"].value == 4


def test_bandwidth(tmp_path: Path) -> None:
    figures = rehearse("bandwidth", tmp_path)

    assert len(figures) == 4
    assert all(figure.value > 0 for figure in figures.values())


def test_decode(tmp_path: Path) -> None:
    figures = rehearse("decode", tmp_path)

    assert {"LoRA off, batch 1", "LoRA idle, batch 2", "2 x r16, batch 2"} <= figures.keys()
    assert "2 of ranks 8..16, batch 2" in figures
    assert figures["LoRA idle, batch 1"].target == 98.6
    assert figures["batch 1 with graphs, of the weight-read roofline"].target == 75.0
    assert all(figure.value > 0 for figure in figures.values())


def test_invariant(tmp_path: Path) -> None:
    figures = rehearse("invariant", tmp_path)

    assert {"base, batch 1", "base, batch 2", "2 x r16, batch 2"} == figures.keys() - {
        "1 x r16, batch 1"
    }


# What comes with torch and Triton, and what deploy/gpu-requirements.txt names.
_BLOCKER = """
import runpy, sys
allowed = {"torch", "torchgen", "functorch", "triton", "numpy", "typing_extensions", "sympy", "mpmath",
    "networkx", "jinja2", "markupsafe", "filelock", "setuptools", "pkg_resources", "cuda",
    "msgspec", "safetensors", "structlog", "bench", "loraplex_engine", "loraplex_kernels"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names and top[0] != "_":
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
sys.meta_path.insert(0, Blocker())
sys.argv[:1] = ["gpu_check"]
runpy.run_module("bench.gpu_check", run_name="__main__")
"""


def test_prefill_needs_only_the_wheels_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"

    done = subprocess.run(
        [sys.executable, "-c", _BLOCKER, "--rehearse", "--part", "prefill", "--figures", str(path)],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert {figure.unit for figure in read_figures(path)} == {"tokens/s", "% of base", "ms"}
    named = (ROOT / "deploy" / "gpu-requirements.txt").read_text()
    assert all(wheel in named for wheel in ("msgspec", "numpy", "safetensors", "structlog"))


# ---------------------------------------------------------------------------- the command


def child(spec: PartSpec, path: Path) -> list[str]:
    """A part without torch: it leaves one figure and then ends as its name says."""
    line = json.dumps({"part": spec.name, "name": "x", "value": 1.0, "unit": "s"})
    ends = {
        "fine": "",
        "hangs": "import signal; signal.pause()",
        "breaks": "raise SystemExit('no such kernel')",
    }
    code = f"open({str(path)!r}, 'w').write({line!r}); {ends[spec.name]}"
    return [sys.executable, "-S", "-c", code]


def test_a_part_that_hangs_or_breaks_keeps_its_figures_and_stops_no_other() -> None:
    specs = [
        PartSpec("hangs", 3, is_timed=False),
        PartSpec("breaks", 60, is_timed=False),
        PartSpec("fine", 60),
    ]

    hung, broken, fine = command.run_parts(specs, child)

    assert hung.problem == "stopped after 3 s"
    assert broken.problem == "exit 1: no such kernel"
    assert fine.problem == ""
    assert [len(outcome.figures) for outcome in (hung, broken, fine)] == [1, 1, 1]


def test_no_part_starts_when_the_time_is_spent() -> None:
    (outcome,) = command.run_parts([PartSpec("fine", 60)], child, total_s=0.0)

    assert outcome.problem == "not run: the time was spent"
    assert outcome.figures == []


def test_without_a_gpu_it_says_so_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: False)

    assert command.main([]) == 0
    assert "No CUDA device here" in capsys.readouterr().out


def test_the_report_has_every_figure_its_target_and_every_problem(tmp_path: Path) -> None:
    recorder = Recorder("decode", tmp_path / "figures")
    recorder.add("idle", 99.1, "% of base", at_least=98.6)
    recorder.add("swap", 12.0, "ms", at_most=10.0, note="84 MB")
    recorder.add("speed", float("nan"), "tokens/s", at_least=1.0)
    figures = read_figures(tmp_path / "figures")
    outcomes = [Outcome("decode", 3.0, "", figures), Outcome("prefill", 1.0, "exit 1: oh", [])]

    text = command.report({"gpu": "H200"}, outcomes)

    lines = text.splitlines()
    assert lines[0] == "gpu: H200"
    assert [line.split()[-1] for line in lines if line.startswith("decode  ")] == [
        "pass",
        "MB",
        "FAIL",
    ]
    assert "PROBLEM prefill: exit 1: oh" in lines
    assert lines[-1] == "2 of 3 targets missed"
    document = json.loads(json.dumps(command.as_json({"gpu": "H200"}, outcomes)))
    assert [figure["holds"] for figure in document["parts"][0]["figures"]] == [True, False, False]


def test_the_table_aligns_its_columns() -> None:
    figures = [Figure("a", "short", 0.0, "s"), Figure("a", "much longer", 123_456.7, "tokens/s")]

    lines = format_table(figures).splitlines()

    assert lines[2].rindex("s") == lines[3].index("tokens/s")
    assert "123,457" in lines[3]


@pytest.mark.slow  # compiles every kernel of the timed parts
def test_the_timed_parts_hold_their_full_batches_contexts_and_adapters(tmp_path: Path) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    path = tmp_path / "figures.jsonl"

    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.dry_run", str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    names = {figure.name for figure in read_figures(path)}
    assert {
        "decode attention, batch 64, 8192 keys",
        "LoRA, batch 64, 64 x r16, all layers",
        "64 of ranks 8..64, batch 256",
        "prefill of 8192, 1 x r16",
        "64 x r16, batch 256",
    } <= names
