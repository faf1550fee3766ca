"""The script for a GPU, rehearsed without one: every part runs, and one that fails stops nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine.attention.base import AttentionBatch
from loraplex_engine.attention.triton_attention import TritonAttention, TritonPlan
from loraplex_engine.lora.triton_backend import TritonLora
from loraplex_engine.runner import ModelRunner
from loraplex_engine.step import Step
from loraplex_kernels import reference_attention
from loraplex_kernels.gemm import gemm

from bench.gpu_check import command, device_only, machine, model_size, numerics, speed
from bench.gpu_check.command import Outcome, PartSpec
from bench.gpu_check.figures import Figure, Recorder, format_table, read_figures

ROOT = Path(__file__).parents[2]


def rehearse(part: str, folder: Path) -> dict[str, Figure]:
    path = folder / "figures.jsonl"
    command.run_part(part, path, is_rehearsal=True)
    return {figure.name: figure for figure in read_figures(path)}


def test_numerics(tmp_path: Path) -> None:
    figures = rehearse("numerics", tmp_path)

    kernels = (
        *("rms_norm", "gated", "head_norm", "gemm", "rope_kv kv", "paged_decode", "paged_prefill"),
        *("lora few rows", "lora decode", "lora prefill", "kv_blocks copy"),
    )
    assert {f"{kernel}, fast bf16" for kernel in kernels} <= figures.keys()
    assert {"sample greedy", "sample top_p"} <= figures.keys()
    assert [figure for figure in figures.values() if not figure.holds] == []


def test_a_row_of_small_numbers_is_held_to_as_much_as_its_neighbours() -> None:
    right = torch.tensor([[100.0, -50.0], [0.01, 0.02]])
    wrong = right + torch.tensor([[0.0, 0.0], [0.001, 0.0]])

    assert numerics.row_error(right, right) == 0
    assert numerics.row_error(wrong, right) == pytest.approx(0.05)
    assert numerics.row_error(torch.full_like(right, torch.nan), right) == float("inf")


def test_a_long_row_that_loses_its_last_key_is_out_of_tolerance() -> None:
    heads, dim, lengths = 6, 64, (1, 300, 1000)
    kv = torch.randn(2, 63, 2, 16, dim, generator=torch.Generator().manual_seed(0))
    q = torch.randn(3, heads * dim, generator=torch.Generator().manual_seed(1))
    for length in lengths:
        numerics.make_last_stand_out(kv[1, (length - 1) // 16, :, (length - 1) % 16], length)
    tables = [torch.arange(63)] * 3

    def attend(num_lost: int) -> torch.Tensor:
        seen = [max(0, length - 1 - num_lost) for length in lengths]
        return reference_attention.paged_attention(q, kv, tables, seen, num_heads=heads)

    errors = [
        numerics.row_error(attend(1)[row : row + 1], attend(0)[row : row + 1]) for row in (1, 2)
    ]

    assert min(errors) > 2 * numerics.TOLERANCES[torch.bfloat16]


def test_what_only_moves_must_keep_every_bit(tmp_path: Path) -> None:
    worst = numerics.Worst()
    nan = torch.tensor([1.0, torch.nan])
    worst.see("kv_blocks gather", nan, nan.clone())
    worst.see("kv_blocks copy", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2e-7]))
    worst.record(Recorder("numerics", tmp_path / "figures"), "fast fp32")

    assert [figure.holds for figure in read_figures(tmp_path / "figures")] == [True, False]


def test_model_size(tmp_path: Path) -> None:
    figures = rehearse("model-size", tmp_path)

    assert {
        *("decode, bfloat16 cache, fast", "prompts, int8 cache, fast", "lora head, fast bf16"),
        *("decode, window and soft cap, fast", "lora beside an adapter of NaN, fast bf16"),
        *(f"invariant {name}: a row in steps of 1, 3" for name in ("gemm", "lora", "attention")),
    } <= figures.keys()
    assert [figure for figure in figures.values() if not figure.holds] == []


def test_model_size_tells_a_lost_key_a_leak_and_a_row_that_its_neighbours_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_a_key(self: TritonAttention, batch: AttentionBatch) -> TritonPlan:
        plan = prepare(self, batch)
        self._entry.host[: plan.num_entries, 1] -= batch.num_computed_B[: plan.num_entries] > 0
        return plan

    def leak(self: TritonLora, y: torch.Tensor, x: torch.Tensor, *others: Any) -> None:
        add(self, y, x, *others)
        y[0] += 0 * y.sum()  # nothing, unless a neighbour is not a number

    def by_rows(x: torch.Tensor, *others: Any) -> torch.Tensor:
        return gemm(x, *others) * (1 + 0.01 * (len(x) > 1))

    prepare, add = TritonAttention.prepare, TritonLora.add
    monkeypatch.setattr(TritonAttention, "prepare", lose_a_key)
    monkeypatch.setattr(TritonLora, "add", leak)
    monkeypatch.setattr(model_size, "gemm", by_rows)
    small = replace(
        model_size.REHEARSAL,
        kv_dtypes=(torch.bfloat16,),
        lora_rows=(3,),
        prompts=(((2, 3, True),),),
    )
    monkeypatch.setattr(model_size, "REHEARSAL", small)

    wrong = {name for name, figure in rehearse("model-size", tmp_path).items() if not figure.holds}

    assert {
        "decode, bfloat16 cache, fast",
        "lora beside an adapter of NaN, fast bf16",
        "invariant gemm: a row in steps of 1, 3",
    } <= wrong
    assert "lora qkv, fast bf16" not in wrong
    assert "prompts, bfloat16 cache, fast" not in wrong


@pytest.mark.parametrize(
    ("kv_dtype", "numbers", "half_step"),
    [(torch.int8, [127.0, 1.5], 0.5 / 127), (torch.float8_e4m3fn, [448.0, 432.0], 16 / 448)],
    ids=["int8", "fp8"],
)
def test_a_quantized_cache_may_be_off_by_half_a_step_of_its_format(
    kv_dtype: torch.dtype, numbers: list[float], half_step: float
) -> None:
    """The worst that rounding to the nearest does, and beside it what bf16 did before."""
    head = torch.tensor([numbers])

    codes, scale = reference_attention.quantize(head, kv_dtype)

    error = numerics.row_error(codes.float() * scale[:, None], head)
    assert error == pytest.approx(half_step, rel=1e-5)
    assert model_size.cache_tolerance(kv_dtype) == pytest.approx(half_step + 2**-7)
    assert model_size.cache_tolerance(torch.bfloat16) == 2**-7


def test_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = rehearse("staging", tmp_path)
    monkeypatch.setattr(device_only.Staging, "flush", lambda self: None)
    wrong = rehearse("staging", tmp_path)

    name = "steps of 256 staged numbers that were written over too early"
    assert figures[name].value == 0
    assert figures[name].holds
    assert wrong[name].holds is False


def test_gemm_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = rehearse("gemm-order", tmp_path)
    rounds = iter([0.0, 1.0])
    monkeypatch.setattr(device_only, "gemm", lambda *given: gemm(*given) + next(rounds))
    wrong = rehearse("gemm-order", tmp_path)

    name = "decode and prefill products, invariant bf16"
    assert figures[name].holds
    assert figures[name].unit == "of 120 numbers differ"
    assert wrong[name].holds is False


def test_memory_holds_steps_to_what_the_trial_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Step] = []

    class Meter(machine._NoMeter):
        """A kilobyte for every position that is sampled."""

        def peak(self) -> int:
            return 1000 * (1 + sum(map(len, launched[-1].drafts.values())))

    def without_drafts_at_first(self: ModelRunner, step: Step) -> None:
        launched.append(step if launched else replace(step, drafts={}))
        launch(self, step)

    launch = ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "launch", without_drafts_at_first)
    monkeypatch.setattr(machine, "_NoMeter", Meter)

    figures = rehearse("memory", tmp_path)

    # As if the trial had no drafts: steps that have some take more, and only they.
    assert {name: figure.holds for name, figure in figures.items()} == {
        "a crowd with drafts and adapters, drawn": False,
        "the same, all but one row with log-probabilities": False,
        "the same, every row with log-probabilities": False,
        "one prompt of all tokens": True,
    }


def test_parity(tmp_path: Path) -> None:
    figures = rehearse("parity", tmp_path)

    assert [figure for figure in figures.values() if figure.holds is False] == []
    assert figures["tiny float32: graph replays"].value >= 1
    assert figures["tiny float32: tokens as in torch"].value == 4


def test_bandwidth(tmp_path: Path) -> None:
    figures = rehearse("bandwidth", tmp_path)

    assert len(figures) == 7
    assert {f"decode attention, batch 2, 20 keys, {kind} cache" for kind in ("int8", "fp8")} <= (
        figures.keys()
    )
    assert figures["decode attention, one row of 20 keys among 1 of 5"].value > 0
    assert all(figure.value > 0 for figure in figures.values())
    lora = [figure for name, figure in figures.items() if name.startswith("LoRA")]
    # An adapter that the cache holds says nothing of the memory's bandwidth.
    assert [figure.unit for figure in lora] == ["ms", "% of read bandwidth"]


@pytest.mark.slow  # a minute of interpreted steps; test_invariant goes its way in short
def test_decode(tmp_path: Path) -> None:
    figures = rehearse("decode", tmp_path)

    assert {"LoRA off, batch 1", "LoRA idle, batch 2", "2 x r16, batch 2"} <= figures.keys()
    assert "2 of ranks 8..16, batch 2" in figures
    assert figures["LoRA idle, batch 1"].target == 98.6
    assert "over 1 turns" in figures["LoRA idle, batch 1"].note
    assert "a prompt of 5 among 1 decoding rows, 2 x r16" in figures
    assert figures["batch 1 with graphs, of the weight-read roofline"].target == 75.0
    assert all(figure.value > 0 for figure in figures.values())


def test_invariant(tmp_path: Path) -> None:
    figures = rehearse("invariant", tmp_path)

    assert {"base, batch 1", "base, batch 2", "2 x r16, batch 2"} == figures.keys() - {
        "1 x r16, batch 1"
    }


def test_in_turns_a_clock_that_drifts_counts_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    now, speed_of_clock = [0.0], [1.0]
    monkeypatch.setattr("bench.gpu_check.machine.time.perf_counter", lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds * speed_of_clock[0]
        speed_of_clock[0] *= 1.05

    pair = speed.in_turns(lambda: work(1.0), lambda: work(1.25), turns=10, repeats=1)

    assert len(pair.bases) == 10
    assert pair.percent == pytest.approx(80, rel=0.06)
    assert pair.spread.endswith("over 10 turns")


def test_device_time_holds_no_launch_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("event")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: object) -> float:
            del end
            return 0.8  # milliseconds

    class Graph:
        def __init__(self, run: Callable[[], None]) -> None:
            self.run = run

        def replay(self) -> None:
            calls.append("replay")
            self.run()

    class Backend:
        capture = staticmethod(Graph)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("busy"))
    gpu = object.__new__(machine.CudaMachine)
    monkeypatch.setattr(gpu, "graph_backend", Backend)

    microseconds = gpu.time_us(lambda: calls.append("run"), repeats=24)

    assert microseconds == pytest.approx(100)  # of each of the eight in a graph
    one = ["busy", "event", "replay", *["run"] * 8, "event"]
    assert calls == ["replay", *["run"] * 8, *one * 3]


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
    monkeypatch.setattr(command, "gpu_files", list)

    assert command.main([]) == 0
    assert "No NVIDIA GPU here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("imports", "said"),
    [(("torch",), "sees no CUDA device"), (("torch", "no_such_wheel"), "lacking: no_such_wheel")],
    ids=["torch-without-cuda", "a-wheel-lacks"],
)
def test_a_gpu_that_python_cannot_use_is_a_failure(
    imports: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    monkeypatch.setattr(command, "gpu_files", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(command, "_IMPORTS", imports)

    assert command.main([]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"/dev/nvidia0 is there, but {sys.executable} cannot use it: ")
    assert said in told


def test_make_gpu_check_installs_nothing_and_takes_the_python_that_is_named() -> None:
    done = subprocess.run(
        # The suite itself may be running under make, whose inner ones announce themselves.
        [
            *("make", "--no-print-directory", "-n", "gpu-check"),
            *("GPU_PYTHON=/opt/torch/bin/python", "ARGS=--only decode"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == [
        "exec",
        "/opt/torch/bin/python",
        "-m",
        "bench.gpu_check",
        "--only",
        "decode",
    ]


def test_every_part_that_is_listed_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def note(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(command.subprocess, "run", note)

    assert command.main(["--rehearse"]) == 0
    names = {arguments[arguments.index("--part") + 1] for arguments in started}
    assert names == {part.name for part in command.PARTS} == set(command.part_runs())
    assert all("--rehearse" in arguments for arguments in started)


def test_wrong_numbers_are_a_failure_and_missed_speed_is_not() -> None:
    missed = Figure("x", "y", 1.0, "", target=0.0, bound="<=")

    failing = {
        part.name
        for part in command.PARTS
        if command._is_wrong(Outcome(part.name, 1.0, "", [missed]))
    }

    assert failing == {"numerics", "model-size", "parity", "staging", "gemm-order", "memory"}


def test_the_limits_of_the_parts_add_up_to_what_there_is() -> None:
    untimed = max(part.limit_s for part in command.PARTS if not part.is_timed)
    assert (
        untimed + sum(part.limit_s for part in command.PARTS if part.is_timed) <= command._TOTAL_S
    )


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
        "a crowd with drafts and adapters, drawn",
        "one prompt of all tokens",
        "decode attention, batch 64, 8192 keys",
        "decode attention, batch 64, 8192 keys, fp8 cache",
        "decode attention, one row of 32768 keys among 63 of 512",
        "LoRA, batch 64, 64 x r16, all layers",
        "a prompt of 512 among 63 decoding rows, 8 x r16",
        "64 of ranks 8..64, batch 256",
        "prefill of 8192, 1 x r16",
        "64 x r16, batch 256",
    } <= names
