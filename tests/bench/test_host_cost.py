"""The bench of host costs: launches go to a GPU that does nothing, and are counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.fake_gpu import FakeDriver, FakeMachine, Launches, install
from bench.host_cost import Cost, format_table

ROOT = Path(__file__).parents[2]


def test_the_fake_counts_launches_and_leaves_tokens_where_the_host_reads_them() -> None:
    launches = Launches()
    driver = FakeDriver(launches)
    names = ["logits_ptr", "token_ptr", "status_ptr", "size"]
    source = SimpleNamespace(fn=SimpleNamespace(arg_names=names))
    logits, token, status = (torch.full((3,), 7) for _ in range(3))

    for name in ("_sample_draw", "_sample_pick"):
        launch = driver.launcher_cls(source, SimpleNamespace(name=name))
        launch(*["grid, stream, hooks"] * 9, logits, token, status, 3)
        if name == "_sample_draw":
            assert token.tolist() == [7] * 3

    assert launches.count == 2
    assert (logits.tolist(), token.tolist(), status.tolist()) == ([7] * 3, [0] * 3, [0] * 3)
    assert driver.get_current_target().arch == 90


def test_replaying_a_recording_on_the_fake_computes_nothing() -> None:
    calls = []

    graph = FakeMachine().graph_backend().capture(lambda: calls.append(1))
    graph.replay()

    assert calls == [1]


def test_under_the_interpreter_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    with pytest.raises(RuntimeError, match="unset it"):
        install()


def test_the_table_adds_up() -> None:
    cost = Cost(64, 8, True, 100.0, 20.0, 300.0, 2)

    assert format_table([cost]).splitlines()[1].split() == [
        *("64", "8", "replayed", "100", "20", "300", "420", "2")
    ]


@pytest.mark.slow  # compiles a dozen kernels
def test_a_step_is_measured_eager_and_replayed(tmp_path: Path) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    path = tmp_path / "costs.json"
    command = [sys.executable, "-m", "bench.host_cost", "--layers", "2", "--steps", "4"]
    command += ["--batch", "4", "--adapters", "0", "--adapters", "2", "--json", str(path)]

    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    eager, replayed, eager_lora, replayed_lora = json.loads(path.read_text())
    assert not eager["is_replayed"]
    assert replayed_lora["is_replayed"]
    # Only sampling is left of the launches, whatever the adapters.
    assert replayed["num_launches"] == replayed_lora["num_launches"] == 2
    assert eager_lora["num_launches"] > eager["num_launches"] > 8
