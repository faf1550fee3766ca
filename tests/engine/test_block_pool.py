"""BlockPool: order of reuse, refusals, and no block lost or doubled after any sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loraplex_engine.kv.block_pool import BlockPool, OutOfBlocksError


def test_take_raises_and_takes_nothing_when_too_few_are_free() -> None:
    pool = BlockPool(2)

    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.take(3)

    assert pool.num_free == 2
    pool.check()


def test_blocks_are_reused_least_recently_freed_first() -> None:
    pool = BlockPool(4)
    assert pool.take(4) == [0, 1, 2, 3]

    pool.release([2])
    pool.release([3, 0])

    assert pool.take(2) == [2, 3]
    pool.release([2])
    assert pool.take(2) == [0, 2]
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.share([block])

    pool.release([block])
    assert pool.num_holders(block) == 1
    assert pool.num_free == 2

    pool.release([block])
    assert pool.num_free == 3
    pool.check()


def test_sharing_a_free_block_picks_it_out_of_the_middle_of_the_list() -> None:
    pool = BlockPool(5)

    pool.share([2])

    assert pool.num_free == 4
    assert pool.take(4) == [0, 1, 3, 4]
    pool.check()


def test_freeing_a_free_block_is_caught() -> None:
    pool = BlockPool(2)

    with pytest.raises(AssertionError, match="block 1 is free already"):
        pool.release([1])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


@pytest.mark.parametrize("damage", ["lost", "doubled", "back_link", "cycle"])
def test_check_notices_a_damaged_pool(damage: str) -> None:
    pool = BlockPool(4)
    pool.take(1)
    if damage == "lost":
        pool._holders[0] = 0
    elif damage == "doubled":
        pool._holders[2] = 1
    elif damage == "back_link":
        pool._previous[2] = 3
    else:
        pool._next[3], pool._previous[1] = 1, 3

    with pytest.raises(AssertionError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list in LRU order and a dict of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.free = list(range(7))
        self.holders: dict[int, int] = {}

    @rule(count=st.integers(0, 8))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocksError):
                self.pool.take(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(count) == expected
        self.holders.update(dict.fromkeys(expected, 1))

    @rule(block=st.integers(0, 6))
    def share(self, block: int) -> None:
        self.pool.share([block])
        if block in self.free:
            self.free.remove(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.holders)), unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                del self.holders[block]
                self.free.append(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert all(self.pool.num_holders(b) == n for b, n in self.holders.items())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_sequence_of_calls = PoolMachine.TestCase
