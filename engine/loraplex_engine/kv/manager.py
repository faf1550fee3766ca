"""Block tables: which blocks hold each sequence's keys and values, in order.

Owns the tables; the blocks belong to `BlockPool`. A table only grows, until it is freed whole.
"""

from __future__ import annotations

from collections import Counter

from loraplex_engine.kv.block_pool import BlockPool


class KvManager:
    """Tables by an integer key that the caller chooses (the request's `seq`)."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least one token")
        self._pool = pool
        self._tables: dict[int, list[int]] = {}
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, key: int) -> int:
        """The length of `key`'s table; 0 when it has none."""
        return len(self._tables.get(key, ()))

    def grow(self, key: int, num_tokens: int) -> list[int] | None:
        """Make `key`'s table hold `num_tokens` tokens in all.

        Returns:
            The blocks appended, possibly none; None when too few are free (nothing has changed).
        """
        table = self._tables.get(key)
        missing = self.blocks_for(num_tokens) - (len(table) if table is not None else 0)
        if missing <= 0:
            return []
        if missing > self._pool.num_free:
            return None
        blocks = self._pool.take(missing)
        if table is None:
            self._tables[key] = blocks.copy()
        else:
            table.extend(blocks)
        return blocks

    def free(self, key: int) -> None:
        """Give up `key`'s table, last block first, so that the start of a sequence is reused last.

        Raises:
            KeyError: there is no such table.
        """
        self._pool.release(reversed(self._tables.pop(key)))

    def check(self) -> None:
        """Assert the pool's invariants, and that blocks have as many holders as tables name them."""
        self._pool.check()
        held = Counter(block for table in self._tables.values() for block in table)
        for block in range(self._pool.num_blocks):
            holders = self._pool.num_holders(block)
            assert holders >= held[block], f"block {block}: {held[block]} tables, {holders} holders"
