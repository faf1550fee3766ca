"""Fixed-size blocks of the KV cache: how many hold each, and which are free, least recently used first.

Owns block numbers only. A block is free (no holder) or held by one or more holders. A freed block keeps its
contents until it is handed out again; so the list of free ones is in LRU order: blocks are taken from its
head and given back at its tail. It is doubly linked, through two arrays, so that a block in the middle can
be picked out in constant time.

A block whose contents somebody wants to find again is *kept*: it counts as free when nobody holds it, but
is in no list and never handed out until `unkeep`; which of those goes first is its keeper's business.
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
        self._num_listed = num_blocks
        self._num_kept_free = 0
        self._is_kept = [False] * num_blocks
        self._holders = [0] * num_blocks
        # Entry `num_blocks` is the list's sentinel: its next is the head, its previous the tail.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, kept ones included."""
        return self._num_listed + self._num_kept_free

    @property
    def num_listed(self) -> int:
        """Free blocks that `take` can hand out."""
        return self._num_listed

    def take(self, count: int) -> list[int]:
        """Hand out the `count` least recently used free blocks, each with one holder.

        Raises:
            OutOfBlocksError: nothing was taken; the caller may unkeep some, or preempt, and retry.
        """
        if count > self._num_listed:
            raise OutOfBlocksError(count, self._num_listed)
        blocks = []
        head = self._next[self.num_blocks]
        for _ in range(count):
            blocks.append(head)
            self._holders[head] = 1
            head = self._next[head]
        self._link(self.num_blocks, head)
        self._num_listed -= count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block; a free one leaves the list with its contents."""
        for block in blocks:
            if self._holders[block] == 0:
                if self._is_kept[block]:
                    self._num_kept_free -= 1
                else:
                    self._link(self._previous[block], self._next[block])
                    self._num_listed -= 1
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder from each block, in order; one without holders is free, last in line.

        It can be taken again at once, so a preemption's blocks serve the row that asked for it.
        """
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._is_kept[block]:
                    self._num_kept_free += 1
                else:
                    self._list_last(block)

    def keep(self, block: int) -> None:
        """From now on hand this block, which is held, out to nobody who does not ask for it by number."""
        assert self._holders[block] > 0, f"block {block} is free: its contents are not certain"
        assert not self._is_kept[block], f"block {block} is kept already"
        self._is_kept[block] = True

    def unkeep(self, block: int) -> None:
        """An ordinary block again: last in line if nobody holds it."""
        assert self._is_kept[block], f"block {block} is not kept"
        self._is_kept[block] = False
        if self._holders[block] == 0:
            self._num_kept_free -= 1
            self._list_last(block)

    def is_kept(self, block: int) -> bool:
        return self._is_kept[block]

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
        assert len(seen) == self._num_listed, (
            f"{len(seen)} blocks listed, {self._num_listed} counted"
        )
        unheld = [block for block, holders in enumerate(self._holders) if holders == 0]
        listed = [block for block in unheld if not self._is_kept[block]]
        assert sorted(seen) == listed, "a block is lost, or both held and free"
        assert self._num_kept_free == len(unheld) - len(listed), "a kept block is lost"

    def _list_last(self, block: int) -> None:
        self._link(self._previous[self.num_blocks], block)
        self._link(block, self.num_blocks)
        self._num_listed += 1

    def _link(self, left: int, right: int) -> None:
        self._next[left] = right
        self._previous[right] = left
