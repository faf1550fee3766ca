"""The bench goes on whatever a contender does, and says what it did."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from bench import run
from bench.peers.base import Contender, Figures, Place, Tell, UnavailableError
from bench.processes import StartError
from bench.suite import Workload


class _Fake(Contender):
    def __init__(self, name: str, speed: float = 10.0, fault: str = "") -> None:
        self.name = name
        self.title = name.title()
        self.cannot = ("fly",)
        self.speed = speed
        self.fault = fault

    def prepare(self, place: Place, workloads: Sequence[Workload], tell: Tell) -> None:
        if self.fault == "prepare":
            raise UnavailableError("needs AVX512")

    def is_for(self, workload: Workload) -> bool:
        return self.fault != "single" or workload.concurrency == 1

    def replay(self, place: Place, workload: Workload, tell: Tell) -> Figures:
        _ORDER.append((workload.name, self.name))
        if self.fault == "replay":
            raise StartError("it ended with 1 at its start")
        total = len(workload.items)
        return {
            "requests": total,
            "errors": 2 if self.fault == "errors" else 0,
            "error_examples": ["HTTP 500"],
            "wall_s": 1.0,
            "output_tokens_per_s": self.speed,
            "prompt_tokens_per_s": self.speed,
        }


_ORDER: list[tuple[str, str]] = []
_MEASURED: list[list[str]] = []  # commands that measure the machine


@pytest.fixture
def bench(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(contenders, workloads, rounds) -> content after a whole run with an invented machine.

    With `prepare_only` -> whether all peers could be prepared.
    """
    _ORDER.clear()
    machine = {"read_gb_s": 20.0, "gemm_gflop_s": 150.0, "gemm_dtype": "float32"}
    answer = json.dumps({"machine": machine, "floor_s": {"mixed": 1.0, "single": 1.0}})
    _MEASURED.clear()

    def measure(command: list[str], **_: Any) -> SimpleNamespace:
        if "bench.roofline" in command:
            _MEASURED.append(command)
        return SimpleNamespace(returncode=0, stdout=answer, stderr="")

    monkeypatch.setattr(run.subprocess, "run", measure)
    monkeypatch.setattr(run.adapters, "fleet", lambda cache, *_args, **_more: cache)
    args = argparse.Namespace(
        model=tokenizer_json.parent,
        workload=["mixed"],
        cache=tmp_path,
        dtype="auto",
        rounds=1,
        once=[],
        limit_s=5.0,
        quick=True,
        out=tmp_path / "out" / "results.json",
    )

    def go(contenders: list[_Fake], *, prepare_only: bool = False, **changed: Any) -> Any:
        for name, value in changed.items():
            setattr(args, name, value)
        console = Console(file=io.StringIO())
        with Progress(console=console) as progress:
            made = run.Bench(args, contenders, tmp_path, console, progress)
            if prepare_only:
                return made.prepare_peers()
            made.run()
        assert json.loads(args.out.read_text()) == json.loads(json.dumps(made.content))
        return made.content

    return go


def test_who_cannot_be_had_or_fails_has_the_reason_and_the_others_go_on(bench: Any) -> None:
    content = bench(
        [_Fake("loraplex"), _Fake("a", fault="prepare"), _Fake("b", fault="replay"), _Fake("c")]
    )
    reasons = {one["contender"]: one.get("failed") for one in content["runs"]}

    assert reasons == {
        "loraplex": None,
        "a": "needs AVX512",
        "b": "it ended with 1 at its start",
        "c": None,
    }
    assert not run._has_failed(content)
    assert content["contenders"]["a"] == {"title": "A", "cannot": ["fly"], "weights": ""}


def test_peers_can_be_prepared_alone_and_nothing_is_measured_or_written(
    bench: Any, tmp_path: Path
) -> None:
    assert bench([_Fake("loraplex", fault="prepare"), _Fake("a")], prepare_only=True)
    assert not bench([_Fake("loraplex"), _Fake("a", fault="prepare")], prepare_only=True)
    assert not _MEASURED
    assert not _ORDER
    assert not (tmp_path / "out").exists()


def test_a_request_of_ours_that_failed_fails_the_bench(bench: Any) -> None:
    assert run._has_failed(bench([_Fake("loraplex", fault="errors"), _Fake("a")]))
    assert not run._has_failed(bench([_Fake("loraplex"), _Fake("a", fault="errors")]))


def test_rounds_take_turns_and_slow_ones_can_be_left_to_the_first(bench: Any) -> None:
    bench(
        [_Fake("loraplex"), _Fake("a"), _Fake("b", fault="single")],
        workload=["mixed", "single"],
        rounds=2,
        once=["a"],
    )

    assert _ORDER == [
        ("mixed", "loraplex"),
        ("mixed", "a"),
        ("single", "loraplex"),
        ("single", "a"),
        ("single", "b"),
        ("mixed", "loraplex"),
        ("single", "b"),
        ("single", "loraplex"),
    ]


def test_the_file_says_what_was_measured_on_what(bench: Any) -> None:
    content = bench([_Fake("loraplex")])
    facts = content["workloads"]["mixed"]

    assert (content["dtype"], content["machine"]["gemm_gflop_s"]) == ("float32", 150.0)
    assert (facts["requests"], facts["output_tokens"], facts["floor_s"]) == (16, 128, 1.0)
    assert len(facts["sha256"]) == 64
    assert content["contenders"]["loraplex"]["weights"] == ""


def test_the_second_measurement_computes_its_floors_on_the_better_figures(bench: Any) -> None:
    bench([_Fake("loraplex")])
    first, second = _MEASURED

    assert "--read-gb-s" not in first
    assert second[second.index("--read-gb-s") + 1] == "20.0"
    assert second[second.index("--gemm-gflop-s") + 1] == "150.0"


def test_a_name_that_is_not_known_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer_json: Path
) -> None:
    (tokenizer_json.parent / "config.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["bench", "--peers", "ollama"])

    with pytest.raises(SystemExit):
        run._parse([_Fake("loraplex"), _Fake("a")])

    assert "'ollama' is not one of a" in capsys.readouterr().err


def test_to_prepare_no_peer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer_json: Path
) -> None:
    (tokenizer_json.parent / "config.json").write_text("{}")
    model = ["--model", str(tokenizer_json.parent)]
    monkeypatch.setattr("sys.argv", ["bench", *model, "--prepare-only", "--peers", "none"])

    with pytest.raises(SystemExit) as ended:
        run._parse([_Fake("loraplex"), _Fake("a")])

    assert ended.value.code == 2
    assert "--peers names none" in capsys.readouterr().err
