"""What the tuner measures of the sampling kernels: every entry, with launches that run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loraplex_kernels.plans import COLUMNS, open_plans
from loraplex_kernels.sample_tune import tune_cases
from loraplex_kernels.tune import Launch, choose

KERNELS = ("sample_cutoff", "sample_draw", "sample_pick")


def test_every_entry_is_measured_in_both_columns() -> None:
    table = open_plans("sm_90", "fast")

    cases = list(tune_cases(table, torch.device("cpu")))

    for kernel in KERNELS:
        entries = [case.entry_index for case in cases if case.kernel == kernel]
        assert entries == list(range(len(table.entries(kernel))))
    for case in cases:
        present = table.entries(case.kernel)[case.entry_index].plan
        assert case.columns == COLUMNS
        assert any(
            (plan.config, plan.num_warps) == (present.config, present.num_warps)
            for plan in case.candidates
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidate_is_launched(kernel: str) -> None:
    table = open_plans("sm_90", "fast")
    cases = tune_cases(table, torch.device("cpu"), size=300, most_rows=2)
    case = next(case for case in cases if case.kernel == kernel)
    case = replace(case, candidates=case.candidates[:1])
    num_launched = 0

    def timer(launch: Launch) -> float:
        nonlocal num_launched
        launch()
        num_launched += 1
        return 100.0 / num_launched

    choice = choose(case, table.entries(kernel)[0].plan, timer)

    assert num_launched == 2
    assert choice.best is case.candidates[0]
    assert choice.skipped == ()
