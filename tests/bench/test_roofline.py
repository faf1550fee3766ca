"""What a workload has to compute at least: each token once, shared prefixes once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from loraplex_engine import runner
from loraplex_engine.profiling import machine
from loraplex_engine.profiling.machine import MachineFigures
from loraplex_kernels.cpu.build import NativeBuildError, load_library

from bench import workload
from bench.roofline import at_least, main, steps
from bench.suite import BASE_MODEL
from bench.workload import WorkItem
from tests.support.adapter_files import native_cache_dir
from tests.support.tiny_model import TinyShape, write_tiny_model

_RANKS = {BASE_MODEL: 0, "a": 8, "b": 16}


def test_prompts_are_packed_and_each_request_then_decodes_one_less_than_it_asked_for() -> None:
    items = [
        WorkItem(0, "a", list(range(700)), 5),
        WorkItem(1, BASE_MODEL, list(range(1000, 1100)), 5),
        WorkItem(2, "b", list(range(2000, 2010)), 5),
    ]
    found = list(steps(items, 2, _RANKS.__getitem__))
    prompts, decoding = found[:2], found[2:]

    assert [list(step.num_scheduled) for step, _ in prompts] == [[512], [188, 100, 10]]
    assert [list(step.num_computed) for step, _ in prompts] == [[0], [512, 0, 0]]
    assert list(prompts[1][0].adapter_ranks) == [8, 16]
    assert list(prompts[1][0].row_ranks) == [8, 0, 16]
    assert [(list(step.num_scheduled), count) for step, count in decoding] == [
        ([1, 1], 4),
        ([1], 4),
    ]
    assert list(decoding[0][0].num_computed) == [702, 102]


def test_what_an_earlier_prompt_of_the_same_tenant_and_adapter_shares_is_not_computed_again() -> (
    None
):
    prompt = list(range(100))
    items = [
        WorkItem(0, "a", prompt, 1, tenant="t"),
        WorkItem(1, "a", [*prompt[:60], 7, 8], 1, tenant="t"),
        WorkItem(2, "a", prompt, 1, tenant="t"),
        WorkItem(3, "a", prompt, 1, tenant="u"),
        WorkItem(4, "b", prompt, 1, tenant="t"),
    ]
    ((step, count),) = steps(items, 4, _RANKS.__getitem__)

    assert list(step.num_scheduled) == [100, 2, 1, 100, 100]
    assert list(step.num_computed) == [0, 60, 99, 0, 0]
    assert count == 1


def test_each_figure_is_the_better_of_two_measurements() -> None:
    now = MachineFigures(read_gb_s=20.0, gemm_gflop_s=90.0, gemm_dtype="float32", num_threads=2)
    best = at_least(now, 15.0, 120.0)

    assert (best.read_gb_s, best.gemm_gflop_s, best.num_threads) == (20.0, 120.0, 2)


def test_the_floor_reads_the_weights_that_the_server_reads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    """Of a checkpoint in bf16 the native linears keep half the bytes that torch's keep in fp32."""
    cache = native_cache_dir(pytestconfig)
    try:
        load_library("linear", cache / "native")
    except NativeBuildError as error:
        pytest.skip(f"no C compiler here: {error}")
    write_tiny_model(tmp_path / "model", TinyShape(dtype=torch.bfloat16))
    workload.write([WorkItem(0, BASE_MODEL, [5, 6, 7], 2)], tmp_path / "one.jsonl")
    figures = MachineFigures(read_gb_s=1e-3, gemm_gflop_s=1e9, gemm_dtype="float32", num_threads=1)
    monkeypatch.setattr(machine, "measure_machine", lambda *_, **__: figures)
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(cache))
    settings = ("GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
    for name in settings:
        monkeypatch.setenv(name, "")  # what they were comes back
        monkeypatch.delenv(name)
    loaded: list[Any] = []
    load_model = runner.load_model

    def load(*args: Any, **named: Any) -> Any:
        loaded.append(load_model(*args, **named))
        return loaded[-1]

    monkeypatch.setattr(runner, "load_model", load)
    flags = ["--model-dir", str(tmp_path / "model"), "--dtype", "float32"]
    flags += ["--adapters", str(tmp_path), f"{tmp_path}/one.jsonl:1"]
    monkeypatch.setattr("sys.argv", ["roofline", *flags])

    main()

    assert set(settings) <= os.environ.keys()
    ((model, _),) = loaded
    assert model.linear_name == "native"
    assert json.loads(capsys.readouterr().out)["floor_s"]["one"] > 0
