"""Which left prompts go: enough or none, none that can be spared, and only blocks nobody else holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.kv.left_prompts import choose_to_drop


def once(block: int) -> int:
    return 1


def test_the_first_go_and_no_more_than_it_takes() -> None:
    left = {7: [0, 1], 3: [2], 5: [3, 4]}

    assert choose_to_drop(left, 2, once) == [7]
    assert choose_to_drop(left, 3, once) == [7, 3]
    assert choose_to_drop(left, 5, once) == [7, 3, 5]


def test_nothing_goes_in_vain() -> None:
    assert choose_to_drop({7: [0, 1], 3: [2]}, 4, once) == []
    assert choose_to_drop({}, 1, once) == []


def test_what_a_larger_one_makes_needless_stays() -> None:
    assert choose_to_drop({7: [0], 3: [1], 5: [2, 3, 4]}, 3, once) == [5]
    assert choose_to_drop({7: [0], 3: [1], 5: [2, 3, 4]}, 4, once) == [7, 5]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_block_that_somebody_runs_on_is_no_gain(num_blocks: int) -> None:
    left = {7: [0, 1], 3: [2, 3]}
    holders = {0: 2, 1: 2, 2: 2, 3: 1}

    assert choose_to_drop(left, num_blocks, holders.__getitem__) == ([3] if num_blocks == 1 else [])


def test_a_block_that_two_prompts_hold_is_free_once_both_are_gone() -> None:
    left = {7: [0, 1], 3: [0, 2]}
    holders = {0: 2, 1: 1, 2: 1}

    assert choose_to_drop(left, 1, holders.__getitem__) == [7]
    assert choose_to_drop(left, 2, holders.__getitem__) == [7, 3]
    assert choose_to_drop(left, 3, holders.__getitem__) == [7, 3]
    assert choose_to_drop(left, 4, holders.__getitem__) == []


def test_what_would_be_held_again_is_no_gain() -> None:
    assert choose_to_drop({7: [0, 1]}, 1, once, no_gain=(0,)) == [7]
    assert choose_to_drop({7: [0, 1]}, 2, once, no_gain=(0,)) == []


@given(
    st.lists(st.sets(st.integers(0, 7), min_size=1), max_size=5),
    st.sets(st.integers(0, 7)),
    st.sets(st.integers(0, 7)),
    st.integers(1, 9),
)
def test_any_prompts(
    prompts: list[set[int]], running: set[int], no_gain: set[int], num_blocks: int
) -> None:
    left = {key: sorted(blocks) for key, blocks in enumerate(prompts)}
    holders = Counter(running)
    for blocks in prompts:
        holders.update(blocks)

    def gain(keys: list[int]) -> int:
        kept = running | no_gain
        kept = kept.union(*(prompts[key] for key in left if key not in keys))
        return len(set().union(*(prompts[key] for key in keys)) - kept)

    chosen = choose_to_drop(left, num_blocks, lambda block: holders[block], no_gain)

    assert bool(chosen) == (gain(list(left)) >= num_blocks)
    assert not chosen or gain(chosen) >= num_blocks
    for key in chosen:
        assert gain([other for other in chosen if other != key]) < num_blocks
