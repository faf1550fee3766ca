"""What the tuner measures of the LoRA kernels: every entry, with launches that run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loraplex_kernels.lora_tune import tune_cases
from loraplex_kernels.plans import open_plans
from loraplex_kernels.tune import Launch, choose


def test_every_entry_of_the_main_dtype_is_measured() -> None:
    table = open_plans("sm_90", "fast")

    cases = list(tune_cases(table, torch.device("cpu"), num_inputs=16, widths=(16,)))

    for kernel in ("lora_shrink", "lora_expand", "lora_rows_shrink", "lora_rows_expand"):
        measured = {case.entry_index for case in cases if case.kernel == kernel}
        bf16 = {i for i, entry in enumerate(table.entries(kernel)) if entry.when.dtype is None}
        # Only wider inputs than the site's lead to the last entry.
        assert measured == (bf16 - {1} if kernel == "lora_rows_shrink" else bf16)
        assert all(case.candidates for case in cases)


@pytest.mark.parametrize("kernel", ["lora_rows_shrink", "lora_rows_expand"])
def test_a_candidate_is_launched_with_its_partner(kernel: str) -> None:
    table = open_plans("sm_90", "fast")
    cases = tune_cases(table, torch.device("cpu"), num_inputs=16, widths=(16,))
    case = next(case for case in cases if case.kernel == kernel)
    case = replace(case, candidates=case.candidates[:1])
    present = table.entries(kernel)[case.entry_index].plan
    num_launched = 0

    def timer(launch: Launch) -> float:
        nonlocal num_launched
        launch()
        num_launched += 1
        return 100.0 / num_launched

    choice = choose(case, present, timer)

    assert num_launched == 2
    assert choice.best is case.candidates[0]
    assert choice.skipped == ()
