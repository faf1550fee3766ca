"""What the KV cache gets, in numbers; and an error that says where the memory went."""

from __future__ import annotations

from dataclasses import replace

import pytest
from loraplex_engine.device.graphs import DecodeGraphs, GraphKey
from loraplex_engine.device.memory_profile import (
    MemoryUse,
    estimate_graphs,
    largest_step,
    plan_memory,
    trial_keys,
)
from loraplex_engine.errors import ConfigError

GIB = 1024**3
USE = MemoryUse(
    weights=15 * GIB,
    lora=2 * GIB,
    staging=GIB // 4,
    activations=3 * GIB,
    graphs=GIB,
    outside=GIB // 2,
)


def test_the_kv_cache_gets_what_everything_else_leaves_of_the_engines_share() -> None:
    plan = plan_memory(device_bytes=100 * GIB, utilization=0.9, use=USE, needed_kv_bytes=GIB)

    assert plan.budget_bytes == 90 * GIB
    assert plan.kv_bytes == int(68.25 * GIB)
    by_use = plan.by_use()
    assert by_use["weights"] == 15 * GIB
    assert by_use["unused"] == 10 * GIB
    assert sum(by_use.values()) == 100 * GIB


def test_just_enough_is_enough() -> None:
    plan = plan_memory(
        device_bytes=22 * GIB, utilization=1.0, use=USE, needed_kv_bytes=int(0.25 * GIB)
    )

    assert plan.kv_bytes == int(0.25 * GIB)


def test_nothing_left_is_an_error_with_every_number_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_memory(device_bytes=24 * GIB, utilization=0.9, use=USE, needed_kv_bytes=GIB // 2)

    text = str(caught.value)
    for part in (
        "gpu_memory_utilization 0.9 of 24.00 GiB is 21.60 GiB",
        "weights 15.00 GiB",
        "adapter slots (max_loras, max_lora_rank) 2.00 GiB",
        "the largest step (max_num_batched_tokens, max_num_seqs, num_speculative_tokens) 3.00 GiB",
        "graphs 1.00 GiB",
        "staging and attention's workspace (max_num_seqs, max_model_len) 0.25 GiB",
        "CUDA and other processes 0.50 GiB",
        "leave -0.15 GiB, where 0.50 GiB are needed",
        "Raise gpu_memory_utilization; or lower max_loras or max_lora_rank; or lower",
        "use --no-cuda-graphs",
    ):
        assert part in text


def test_an_error_recommends_nothing_that_would_not_help() -> None:
    use = replace(USE, lora=0, graphs=0)

    with pytest.raises(ConfigError) as caught:
        plan_memory(device_bytes=10 * GIB, utilization=1.0, use=use, needed_kv_bytes=GIB)

    text = str(caught.value)
    assert "raise gpu_memory_utilization" not in text.lower()
    assert "max_loras" not in text
    assert "cuda-graphs" not in text
    assert "graphs 0" not in text


def test_the_graphs_that_are_tried_have_adapters_where_there_are_any() -> None:
    with_adapters = DecodeGraphs(None, (1, 2, 4), (1, 2, 3)).keys
    without = DecodeGraphs(None, (1, 2, 4)).keys

    assert trial_keys(with_adapters) == (GraphKey(4, 3), GraphKey(1, 1))
    assert trial_keys(without) == (GraphKey(4, 0), GraphKey(1, 0))


def test_graphs_of_one_pool_are_estimated_from_two_of_them() -> None:
    assert estimate_graphs(500, 20, 1) == 500
    assert estimate_graphs(500, 20, 101) == 2500
    assert estimate_graphs(500, 20, 0) == 0
    # A driver may give memory back meanwhile; that makes no graph smaller than nothing.
    assert estimate_graphs(500, -7, 10) == 500


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "max_len"), [(64, 8, 100), (65, 8, 100), (9, 9, 5), (512, 2, 100)]
)
def test_the_largest_step_has_all_rows_and_as_many_tokens_as_fit(
    max_tokens: int, max_rows: int, max_len: int
) -> None:
    step = largest_step(max_tokens=max_tokens, max_rows=max_rows, max_len=max_len, num_slots=3)

    assert step.num_tokens == min(max_tokens, max_rows * max_len)
    assert len(step.new_rows) == len(step.rows_B) == max_rows
    assert max(step.num_scheduled_B) <= max_len
    assert step.samples_B.all()
    assert {row.adapter_slot for row in step.new_rows} == set(range(min(3, max_rows)))
    assert all(
        len(row.token_ids) == n for row, n in zip(step.new_rows, step.num_scheduled_B, strict=True)
    )


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "num_drafts", "guessed"),
    [(64, 8, 3, [3] * 8), (19, 8, 7, [2, 2, 2, 1, 1, 1, 1, 1]), (8, 8, 7, [0] * 8)],
)
def test_the_largest_step_has_as_many_drafts_as_tokens_are_left_for(
    max_tokens: int, max_rows: int, num_drafts: int, guessed: list[int]
) -> None:
    step = largest_step(
        max_tokens=max_tokens, max_rows=max_rows, max_len=100, num_slots=0, num_drafts=num_drafts
    )

    assert step.num_tokens == max_tokens
    assert [len(step.drafts.get(row, ())) for row in range(max_rows)] == guessed
    assert [
        len(row.token_ids) + drafted for row, drafted in zip(step.new_rows, guessed, strict=True)
    ] == step.num_scheduled_B.tolist()
