"""Whether the adapter store can be reached: looked at every few seconds, told by /ready and a metric."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import structlog
from loraplex_engine.artifact import AdapterStore
from prometheus_client import Gauge

log = structlog.get_logger(__name__)

INTERVAL_S: Final = 15.0


class StoreWatch:
    """The last look; before the first one the store counts as reachable."""

    def __init__(self, store: AdapterStore, gauge: Gauge) -> None:
        self._store = store
        self._gauge = gauge
        self.is_reachable = True
        gauge.set(1)

    async def look(self) -> None:
        """Ask the store now."""
        try:
            await asyncio.to_thread(self._store.check)
        except OSError as error:
            if self.is_reachable:
                log.warning("adapter_store_unavailable", reason=str(error))
            self.is_reachable = False
        else:
            if not self.is_reachable:
                log.info("adapter_store_reachable_again")
            self.is_reachable = True
        self._gauge.set(self.is_reachable)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look again and again while the block lasts; what is away at the start is said, and waited for."""
        task = asyncio.create_task(self._look_forever(), name="store-watch")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)
