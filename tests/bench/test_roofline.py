"""What a workload has to compute at least: each token once, shared prefixes once."""

from __future__ import annotations

from loraplex_engine.profiling.machine import MachineFigures

from bench.roofline import at_least, steps
from bench.suite import BASE_MODEL
from bench.workload import WorkItem

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
