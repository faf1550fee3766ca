"""Fixed-size blocks of the KV cache: how many hold each, and which are free, least recently used first.

Owns block numbers only. A block is free (in the list, no holder) or held by one or more holders. A freed
block keeps its contents until it is handed out again; so the list is in LRU order: blocks are taken from
its head and given back at its tail. It is doubly linked, through two arrays, so that a block in the middle
can be picked out in constant time.
Source: PagedAttention, arXiv 2309.06180, sec. 4.
"""

from __future__ import annotations

from collections.abc import Iterable


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were asked for; none was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")


class BlockPool:
    """Blocks 0 .. num_blocks - 1. All calls are O(blocks named)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}: a pool has at least one block")
        self.num_blocks = num_blocks
        self._num_free = num_blocks
        self._holders = [0] * num_blocks
        # Entry `num_blocks` is the list's sentinel: its next is the head, its previous the tail.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> list[int]:
        """Hand out the `count` least recently used free blocks, each with one holder.

        Raises:
            OutOfBlocksError: nothing was taken; the caller may preempt and retry.
        """
        if count > self._num_free:
            raise OutOfBlocksError(count, self._num_free)
        blocks = []
        head = self._next[self.num_blocks]
        for _ in range(count):
            blocks.append(head)
            self._holders[head] = 1
            head = self._next[head]
        self._link(self.num_blocks, head)
        self._num_free -= count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block; a free one leaves the list with its contents."""
        for block in blocks:
            if self._holders[block] == 0:
                self._link(self._previous[block], self._next[block])
                self._num_free -= 1
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder from each block, in order; one without holders is free, last in line.

        It can be taken again at once, so a preemption's blocks serve the row that asked for it.
        """
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._link(self._previous[self.num_blocks], block)
                self._link(block, self.num_blocks)
                self._num_free += 1

    def num_holders(self, block: int) -> int:
        return self._holders[block]

    def check(self) -> None:
        """Assert that each block is either held or in the free list once, and that the list is sound."""
        sentinel = self.num_blocks
        seen: list[int] = []
        previous, block = sentinel, self._next[sentinel]
        while block != sentinel:
            assert len(seen) < self.num_blocks, "the free list has a cycle"
            assert self._previous[block] == previous, f"block {block} has a broken back link"
            seen.append(block)
            previous, block = block, self._next[block]
        assert self._previous[sentinel] == previous, "the free list's tail is wrong"
        assert len(seen) == self._num_free, f"{len(seen)} blocks listed, {self._num_free} counted"
        unheld = [block for block, holders in enumerate(self._holders) if holders == 0]
        assert sorted(seen) == unheld, "a block is lost, or both held and free"

    def _link(self, left: int, right: int) -> None:
        self._next[left] = right
        self._previous[right] = left
