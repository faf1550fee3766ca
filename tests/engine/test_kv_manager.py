"""KvManager: tables grow by whole blocks, refuse without change, and are freed last block first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.kv.block_pool import BlockPool
from loraplex_engine.kv.manager import KvManager


def test_a_table_grows_only_when_its_last_block_is_full() -> None:
    kv = KvManager(BlockPool(4), block_size=4)

    first = kv.grow(1, 3)
    assert kv.grow(1, 4) == []
    assert kv.grow(1, 5) == [1]
    assert kv.grow(1, 12) == [2]
    assert kv.num_blocks_of(1) == 3
    assert first == [0]  # what was handed out does not grow with the table
    kv.check()


def test_no_room_changes_nothing() -> None:
    kv = KvManager(BlockPool(3), block_size=4)
    kv.grow(1, 8)

    assert kv.grow(2, 5) is None
    assert kv.num_tables == 1
    assert kv.num_free == 1
    kv.check()


def test_growing_past_the_pool_keeps_the_old_table() -> None:
    kv = KvManager(BlockPool(3), block_size=4)
    kv.grow(1, 8)

    assert kv.grow(1, 17) is None

    assert kv.num_blocks_of(1) == 2
    assert kv.num_free == 1


def test_the_start_of_a_freed_sequence_is_reused_last() -> None:
    kv = KvManager(BlockPool(3), block_size=4)
    kv.grow(1, 12)

    kv.free(1)

    assert kv.grow(2, 12) == [2, 1, 0]


def test_freeing_twice_raises() -> None:
    kv = KvManager(BlockPool(3), block_size=4)
    kv.grow(1, 1)
    kv.free(1)

    with pytest.raises(KeyError):
        kv.free(1)


def test_check_notices_a_table_that_names_a_free_block() -> None:
    pool = BlockPool(3)
    kv = KvManager(pool, block_size=4)
    kv.grow(1, 4)

    pool.release([0])

    with pytest.raises(AssertionError, match="block 0: 1 tables, 0 holders"):
        kv.check()


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        KvManager(BlockPool(1), block_size=0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=40))
def test_any_sequence_of_growth_and_frees(calls: list[tuple[int, int]]) -> None:
    """A length of 0 frees. Waste stays below one block per table: there is no other fragmentation."""
    pool = BlockPool(12)
    kv = KvManager(pool, block_size=4)
    lengths: dict[int, int] = {}
    for key, length in calls:
        if length == 0:
            if lengths.pop(key, None) is not None:
                kv.free(key)
        else:
            wanted = max(length, lengths.get(key, 0))
            missing = kv.blocks_for(wanted) - kv.num_blocks_of(key)
            has_room = missing <= kv.num_free
            blocks = kv.grow(key, wanted)
            assert (blocks is not None) == has_room
            if blocks is not None:
                lengths[key] = wanted
        kv.check()
        used = 12 - kv.num_free
        assert used == sum(-(-tokens // 4) for tokens in lengths.values())
    for key in lengths:
        kv.free(key)
    assert kv.num_free == 12
