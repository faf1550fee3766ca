"""Single statements, each a transaction of its own in one round trip.

For what every request does (`loraplex_reserve`, `loraplex_settle`): the driver is used as it is, on
connections that commit by themselves. Nothing is asked of a connection before it is used; a broken one
is found by using it, and the statement is run once more on a new one. So every statement here must be
safe to repeat.

Borrowing a connection from the engine's pool and handing it back takes more of our CPU than the statement
does. So one that is free again is kept at hand for a while, unless somebody waits for it at the pool.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from time import monotonic
from typing import Any, TypeAlias, cast

import psycopg
import structlog
from psycopg.errors import QueryCanceled
from psycopg.pq import TransactionStatus
from sqlalchemy import PoolProxiedConnection, QueuePool
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from loraplex_platform.db.errors import (
    LOST_RACES,
    NoAnswerError,
    means_unavailable,
    unavailable_error,
)

log = structlog.get_logger(__name__)

MAX_TRIES = 8
# Then it goes back to the pool all the same, which replaces it when it has grown old.
KEPT_S = 10.0

Row: TypeAlias = tuple[Any, ...]


class CallPool:
    """See the module's header.

    Args:
        engine: in autocommit, without a ping before use and without a rollback after it.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        # Free ones with when they were borrowed (monotonic); the last one that was used is used next.
        self._at_hand: list[tuple[PoolProxiedConnection, float]] = []

    async def call(self, query: str, parameters: Mapping[str, object]) -> Row:
        """The one row of a statement that has one; raises what `find` does."""
        row = await self.find(query, parameters)
        if row is None:
            raise AssertionError("a call has a row")
        return row

    async def find(self, query: str, parameters: Mapping[str, object]) -> Row | None:
        """The statement's first row, if it has one; raises what `rows` does."""
        rows = await self.rows(query, parameters)
        return rows[0] if rows else None

    async def rows(self, query: str, parameters: Mapping[str, object]) -> list[Row]:
        """All rows of the statement.

        Args:
            query: with %(name)s for parameters; prepared by the server on first use.

        Raises:
            DatabaseUnavailableError: the database is down, or has no connection or no time for us.
                Whether it was done is unknown.
            psycopg.Error: the statement is at fault.
        """
        has_reconnected = False
        for tries in range(1, MAX_TRIES + 1):
            try:
                return await self._once(query, parameters)
            except psycopg.Error as error:
                if error.sqlstate in LOST_RACES and tries < MAX_TRIES:
                    log.info("call_retried", sqlstate=error.sqlstate)
                elif not means_unavailable(error):
                    raise
                elif has_reconnected or isinstance(error, NoAnswerError | QueryCanceled):
                    # A server that has no time, or stands still, is not waited for twice; nor is one that
                    # stands still by those who come next, on connections like this one.
                    if isinstance(error, NoAnswerError):
                        await self.close()
                    raise unavailable_error(error) from error
                else:
                    has_reconnected = True
                    # What is idle was connected to the same server: as a rule it is broken as well.
                    await self.close()
            # Losers of one race must not meet again in step.
            await asyncio.sleep(random.uniform(0.001, 0.005) * 2**tries)  # noqa: S311 # not a secret
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Close all connections that are not in use; the next statement makes new ones."""
        at_hand, self._at_hand = self._at_hand, []
        for lent, _ in at_hand:
            await _give_back(lent, is_usable=False)
        await self._engine.dispose()

    async def _once(self, query: str, parameters: Mapping[str, object]) -> list[Row]:
        at_hand = self._at_hand
        lent, borrowed_s = await self._borrow()
        connection: psycopg.AsyncConnection[Any] = lent.driver_connection  # type: ignore[assignment] # psycopg's, see `create_database_engine`
        try:
            cursor = await connection.execute(query, parameters, prepare=True)
            return await cursor.fetchall()
        finally:
            # If all were closed meanwhile, its pool is nobody's.
            is_open = at_hand is self._at_hand
            is_usable = is_open and connection.info.transaction_status == TransactionStatus.IDLE
            has_stayed = monotonic() - borrowed_s >= KEPT_S
            if is_usable and not (has_stayed or self._is_crowded):
                at_hand.append((lent, borrowed_s))
            else:
                await _give_back(lent, is_usable=is_usable)

    async def _borrow(self) -> tuple[PoolProxiedConnection, float]:
        """One that is at hand and not too old, else one of the pool's."""
        while self._at_hand:
            lent, borrowed_s = self._at_hand.pop()
            if monotonic() - borrowed_s < KEPT_S:
                return lent, borrowed_s
            # The pool knows how long it may be idle, and makes a new one instead.
            await _give_back(lent, is_usable=True)
        return await self._engine.raw_connection(), monotonic()

    @property
    def _is_crowded(self) -> bool:
        """Whether somebody may be waiting at the pool, which has no more to lend."""
        pool = cast(QueuePool, self._engine.pool)
        return pool.checkedout() >= pool.size()


async def _give_back(lent: PoolProxiedConnection, *, is_usable: bool) -> None:
    if not is_usable:
        await greenlet_spawn(lent.invalidate)
    await greenlet_spawn(lent.close)
