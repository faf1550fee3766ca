"""What one task has to tell another: a queue whose reader takes everything that is there at once."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EventQueue(Generic[Item]):
    """Unbounded, first in, first out; one reader. A cancelled reader loses nothing.

    A writer that puts several items in before the reader runs wakes it once.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, item: Item) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Item:
        """The oldest item."""
        await self._wait()
        return self._items.popleft()

    async def get_all(self) -> list[Item]:
        """All items, oldest first; at least one."""
        await self._wait()
        items = list(self._items)
        self._items.clear()
        return items

    async def _wait(self) -> None:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
