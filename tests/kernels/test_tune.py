"""The tuner's choices, with a clock of its own: candidate -> timing -> choice -> file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loraplex_kernels import tune
from loraplex_kernels.plans import COLUMNS, Plan, PlanTable, open_plans
from loraplex_kernels.tune import (
    MIN_GAIN,
    Choice,
    TuneCase,
    candidates,
    choose,
    find_cases,
    rewrite,
)

PRESENT = Plan({"BLOCK": 1}, 4, 1, "as it is")


def timings(
    us_by_block: dict[int, float],
) -> tuple[TuneCase, Callable[[Callable[[], object]], float]]:
    """A case whose launch under a plan takes what is said of its BLOCK; missing: it does not launch."""

    def bind(plan: Plan) -> Callable[[], object]:
        return lambda: us_by_block[plan.config["BLOCK"]]

    blocks = [block for block in (*us_by_block, 99) if block != 1]
    case = TuneCase("k", 1, "T=1", candidates({"BLOCK": blocks}, warps=(8,)), bind)
    return case, lambda launch: float(launch())


def test_the_quickest_candidate_is_chosen_and_what_fails_is_skipped() -> None:
    case, timer = timings({1: 10.0, 2: 6.0, 3: 5.0, 4: 7.0})

    choice = choose(case, PRESENT, timer)

    assert choice.is_changed
    assert choice.best.config == {"BLOCK": 3}
    assert (choice.present_us, choice.best_us) == (10.0, 5.0)
    assert choice.skipped == ("block=99 warps=8 stages=1: KeyError: 99",)


@pytest.mark.parametrize("others", [{}, {2: 11.0}, {2: 10.0 * (1 - MIN_GAIN / 2)}])
def test_noise_changes_nothing(others: dict[int, float]) -> None:
    case, timer = timings({1: 10.0, **others})

    choice = choose(case, PRESENT, timer)

    assert not choice.is_changed
    assert choice.best is PRESENT
    assert choice.best_us == 10.0


def test_a_present_plan_that_does_not_launch_is_an_error() -> None:
    case, timer = timings({2: 1.0})

    with pytest.raises(KeyError):
        choose(case, PRESENT, timer)


def test_every_combination_is_a_candidate() -> None:
    plans = candidates({"A": (1, 2), "B": (3,)}, warps=(4, 8), stages=(2, 3))

    assert len({(*plan.config.items(), plan.num_warps, plan.num_stages) for plan in plans}) == 8
    assert all(set(plan.config) == {"A", "B"} and plan.config["B"] == 3 for plan in plans)


def test_only_the_fast_column_of_what_changed_is_rewritten(tmp_path: Path) -> None:
    old = {"config": {"BLOCK": 1}, "num_warps": 4, "num_stages": 1, "reason": "as it is"}
    entries = [
        {"when": {"max_k": 8}, "fast": old, "invariant": old},
        {"when": {}, "fast": old, "invariant": old},
    ]
    path = tmp_path / "sm_90" / "k.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"kernel": "k", "arch": "sm_90", "entries": entries}))
    case, timer = timings({1: 10.0, 2: 5.0})
    unchanged = Choice(TuneCase("missing", 0, "", (), case.bind), PRESENT, PRESENT, 1.0, 1.0, ())

    rewrite([unchanged, choose(case, PRESENT, timer)], arch="sm_90", gpu="H200", folder=tmp_path)

    document = json.loads(path.read_text())
    assert document["entries"][0] == entries[0]
    assert document["entries"][1]["invariant"] == old
    last = PlanTable("sm_90", "fast", tmp_path).entries("k")[1].plan
    assert (last.config, last.num_warps) == ({"BLOCK": 2}, 8)
    assert last.reason == "measured on H200 at T=1: 5.0 us, 10.0 us before"


def test_a_case_of_both_columns_rewrites_both(tmp_path: Path) -> None:
    old = {"config": {"BLOCK": 1}, "num_warps": 4, "num_stages": 1, "reason": "as it is"}
    path = tmp_path / "sm_90" / "k.json"
    path.parent.mkdir()
    entries = [
        {"when": {"max_k": 8}, "fast": old, "invariant": old},
        {"when": {}, "fast": old, "invariant": old},
    ]
    path.write_text(json.dumps({"kernel": "k", "arch": "sm_90", "entries": entries}))
    case, timer = timings({1: 10.0, 2: 5.0})
    case = replace(case, columns=COLUMNS)

    rewrite([choose(case, PRESENT, timer)], arch="sm_90", gpu="H200", folder=tmp_path)

    assert json.loads(path.read_text())["entries"][0] == entries[0]
    for column in COLUMNS:
        assert PlanTable("sm_90", column, tmp_path).entries("k")[1].plan.config == {"BLOCK": 2}


def test_kernels_offer_cases_that_launch(device: torch.device) -> None:
    table = open_plans("sm_90", "fast")

    cases = list(find_cases(table, device, ["rms_norm"]))

    assert [case.entry_index for case in cases] == list(range(len(table.entries("rms_norm"))))
    for case in cases:
        assert len(case.candidates) > 1
        assert callable(case.bind(case.candidates[0]))


def test_without_a_gpu_the_command_says_so_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert tune.main([]) == os.EX_OK
    assert capsys.readouterr().out == "No CUDA device here: nothing to tune.\n"
