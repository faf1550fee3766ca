"""Workload files: the same for the same seed, exact lengths, nothing shared by accident, Zipf's law."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest

from bench import workload
from bench.workload import PromptWriter, WorkItem, zipf_counts, zipf_models


def test_prompts_have_exactly_the_length_asked_for(tokenizer_json: Path) -> None:
    writer = PromptWriter(tokenizer_json, seed=0)

    assert [len(writer.write(n)) for n in (1, 2, 16, 257)] == [1, 2, 16, 257]
    with pytest.raises(ValueError, match="num_tokens is 0"):
        writer.write(0)


def test_the_same_seed_writes_the_same_and_another_seed_something_else(
    tokenizer_json: Path,
) -> None:
    def written(seed: int) -> list[list[int]]:
        writer = PromptWriter(tokenizer_json, seed)
        return [writer.write(40) for _ in range(5)]

    assert written(3) == written(3)
    assert written(3) != written(4)


def test_no_two_prompts_begin_alike_until_the_vocabulary_is_used_up(tokenizer_json: Path) -> None:
    writer = PromptWriter(tokenizer_json, seed=0)
    first = [writer.write(1)[0] for _ in range(600)]

    assert len(set(first)) == len(first)
    with contextlib.suppress(ValueError):
        for _ in range(1000):
            writer.write(1)
    with pytest.raises(ValueError, match="more prompts than"):
        writer.write(1)


def test_zipf_counts_are_the_law_rounded_and_add_up() -> None:
    counts = zipf_counts(33, 64)
    harmonic = sum(1 / k for k in range(1, 34))

    assert sum(counts) == 64
    assert counts == sorted(counts, reverse=True)
    for position, count in enumerate(counts, 1):
        assert abs(count - 64 / position / harmonic) < 1


def test_requests_are_mixed_and_follow_the_counts() -> None:
    models = [f"m{n}" for n in range(10)]
    chosen = zipf_models(models, 200, seed=1)

    assert [Counter(chosen)[model] for model in models] == zipf_counts(10, 200)
    assert chosen == zipf_models(models, 200, seed=1)
    assert chosen != sorted(chosen)


def test_a_file_comes_back_as_it_was_and_its_digest_names_its_content(tmp_path: Path) -> None:
    items = [WorkItem(0, "a", [1, 2], 3), WorkItem(1, "b", [4], 5, tenant="t")]
    workload.write(items, tmp_path / "w.jsonl")

    assert workload.read(tmp_path / "w.jsonl") == items
    assert workload.digest(items) == workload.digest(list(items))
    assert workload.digest(items) != workload.digest(items[::-1])
