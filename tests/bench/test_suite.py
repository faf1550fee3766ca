"""The suite asks what it says it asks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bench import scale, suite
from bench.suite import BASE_MODEL, Workload
from bench.workload import PromptWriter, digest


def _made(name: str, tokenizer_json: Path) -> Workload:
    (one,) = suite.make([name], tokenizer_json)
    return one


def test_mixed(tokenizer_json: Path) -> None:
    one = _made("mixed", tokenizer_json)
    lengths = [len(item.prompt) for item in one.items]
    models = {item.model for item in one.items}

    assert (len(one.items), one.concurrency) == (64, 16)
    assert min(lengths) >= 16
    assert max(lengths) <= 256
    assert max(lengths) - min(lengths) > 200
    assert {item.max_tokens for item in one.items} == {64}
    assert BASE_MODEL in models
    assert len(models) > 16
    assert {suite.adapter_rank(n) for n in range(suite.NUM_ADAPTERS)} == {8, 16, 32, 64}
    assert len({item.prompt[0] for item in one.items}) == 64


def test_base_has_the_prompts_of_mixed_and_no_adapter(tokenizer_json: Path) -> None:
    one, like = _made("base", tokenizer_json), _made("mixed", tokenizer_json)

    assert [item.prompt for item in one.items] == [item.prompt for item in like.items]
    assert one.models == []


def test_prefix_shares_512_tokens_within_a_tenant_and_nothing_between_tenants(
    tokenizer_json: Path,
) -> None:
    one = _made("prefix", tokenizer_json)
    by_tenant: dict[str, list[list[int]]] = {}
    for item in one.items:
        by_tenant.setdefault(item.tenant, []).append(item.prompt)

    assert len(by_tenant) == 8
    assert {(item.tenant, item.model) for item in one.items} == set(one.models)
    assert len(one.models) == 8
    for prompts in by_tenant.values():
        for before, after in pairwise(prompts):
            assert before[:512] == after[:512]
            assert before[512] != after[512]
    assert len({prompts[0][0] for prompts in by_tenant.values()}) == 8


@pytest.mark.parametrize(
    ("name", "prompt", "output", "has_adapter"),
    [("single", 128, 128, True), ("prefill", 1024, 1, False)],
)
def test_one_stream_at_a_time(
    tokenizer_json: Path, name: str, prompt: int, output: int, has_adapter: bool
) -> None:
    one = _made(name, tokenizer_json)

    assert one.concurrency == 1
    assert {len(item.prompt) for item in one.items} == {prompt}
    assert {item.max_tokens for item in one.items} == {output}
    assert bool(one.models) is has_adapter


def test_scale_uses_each_adapter_and_fills_what_is_in_flight(tokenizer_json: Path) -> None:
    items = scale.cell_items(PromptWriter(tokenizer_json, 0), 32, 64)

    assert len(items) == 128
    assert len({item.model for item in items}) == 32
    assert (scale.LEVELS, scale.ADAPTERS, scale.REGISTERED) == (
        (1, 4, 16, 64),
        (1, 8, 32, 128),
        2000,
    )


@pytest.mark.parametrize("name", suite.MAKERS)
def test_quick_is_smaller_and_every_file_is_the_same_twice(tokenizer_json: Path, name: str) -> None:
    whole = suite.MAKERS[name](tokenizer_json)
    quick = suite.MAKERS[name](tokenizer_json, is_quick=True)

    assert len(quick.items) < len(whole.items)
    assert digest(whole.items) == digest(suite.MAKERS[name](tokenizer_json).items)
