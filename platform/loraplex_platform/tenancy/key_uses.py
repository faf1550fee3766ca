"""When keys were last used: gathered in memory, written every now and then, never on a request's path.

What a process that dies had gathered is lost: `last_used_at` is for people who tidy up, not for bills.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

import structlog

from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory
from loraplex_platform.tenancy import key_queries

log = structlog.get_logger(__name__)

FLUSH_EVERY_S = 20.0
EVERY_S = 60.0  # at most one write per key in this time, over all gateways
BATCH = 5000


def _utc_now() -> datetime:
    return datetime.now(UTC)


class KeyUses:
    """Uses since the last flush. `now` is replaced in tests."""

    def __init__(self, now: Callable[[], datetime] = _utc_now) -> None:
        self._now = now
        self._last: dict[UUID, datetime] = {}

    def note(self, key_id: UUID) -> None:
        """A key was used just now."""
        self._last[key_id] = self._now()

    async def flush(self, sessions: SessionFactory) -> None:
        """Write what was gathered; without a database it stays for the next time."""
        uses, self._last = self._last, {}
        try:
            items = list(uses.items())
            for start in range(0, len(items), BATCH):
                batch = dict(items[start : start + BATCH])
                async with sessions.begin() as session:
                    await key_queries.note_uses(session, batch, every_s=EVERY_S)
        except DatabaseUnavailableError as error:
            self._last = uses | self._last
            log.warning("key_uses_not_written", keys=len(uses), reason=error.message)

    async def flush_forever(self, sessions: SessionFactory) -> None:
        """`flush` until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(FLUSH_EVERY_S)
                await self.flush(sessions)
        finally:
            await self.flush(sessions)
