"""Connections to Postgres: engines, session factories, and what they raise when it is down.

Every serving process uses `open_database`: an async engine whose connections run as the non-owner
role and under a statement timeout. A database that cannot be reached, is shutting down or has no
free connection raises `DatabaseUnavailableError` (503, Retry-After) wherever a session is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.types.numeric import Int8Dumper
from sqlalchemy import Engine, create_engine, event, exc
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import AsyncAdaptedQueuePool, QueuePool
from sqlalchemy.pool.base import ConnectionPoolEntry

from loraplex_platform.db.batched_calls import BatchedCalls
from loraplex_platform.db.calls import CallPool
from loraplex_platform.db.errors import (
    DatabaseUnavailableError as DatabaseUnavailableError,  # noqa: PLC0414 # caught from here
)
from loraplex_platform.db.errors import NoAnswerError, means_unavailable, unavailable_error
from loraplex_platform.db.stored_json import to_stored_json
from loraplex_platform.settings import DatabaseSettings

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 15.0
# A server that stands still does not enforce its own statement timeout: this much later the client
# gives the connection up.
ANSWER_SLACK_S = 5.0
# As long as a statement may take: in a burst, waiting for one's turn beats telling clients to retry.
POOL_TIMEOUT_S = STATEMENT_TIMEOUT_S


class SessionFactory(async_sessionmaker[AsyncSession]):
    """Sessions of one database. They keep loaded values after commit.

    Attributes:
        calls: for single statements of the hot path, on connections of their own.
    """

    def __init__(self, engine: AsyncEngine, calls: CallPool) -> None:
        super().__init__(engine, expire_on_commit=False)
        self.calls = calls
        self._batched: dict[str, BatchedCalls] = {}

    def batched(self, query: str) -> BatchedCalls:
        """Single statements of a kind, those that come together in one; `query` as there."""
        batched = self._batched.get(query)
        if batched is None:
            batched = self._batched[query] = BatchedCalls(self.calls, query)
        return batched

    async def close(self) -> None:
        """End what is under way in statements of its own."""
        for batched in self._batched.values():
            await batched.close()
        await self.calls.close()


class _AsyncPool(AsyncAdaptedQueuePool):
    def _do_get(self) -> ConnectionPoolEntry:
        try:
            return super()._do_get()
        except exc.TimeoutError as error:
            raise DatabaseUnavailableError("All database connections are in use.") from error


class _SyncPool(QueuePool):
    def _do_get(self) -> ConnectionPoolEntry:
        try:
            return super()._do_get()
        except exc.TimeoutError as error:
            raise DatabaseUnavailableError("All database connections are in use.") from error


_Answer = TypeVar("_Answer")


def _impatient_connection(answer_deadline_s: float) -> type[psycopg.AsyncConnection[Any]]:
    """A connection that is closed once the server has left it without an answer for so long.

    The server's statement timeout does not end the wait for a server that is stopped, frozen with its
    machine, or cut off by a network that drops packets; and what is waited for includes COMMIT.
    """

    class ImpatientConnection(psycopg.AsyncConnection[Any]):
        async def wait(
            self,
            gen: PQGen[_Answer],
            interval: float = 0.1,
            timeout: float | None = None,  # noqa: ASYNC109 # psycopg's own signature
        ) -> _Answer:
            limit_s = answer_deadline_s if timeout is None else timeout
            try:
                return await super().wait(gen, interval, limit_s)
            except psycopg.errors._WaitTimeout as error:
                # Whatever was under way may be done or not: nobody can use the connection again.
                self.pgconn.finish()
                raise NoAnswerError(f"no answer within {limit_s:g} s") from error

    return ImpatientConnection


def _connect_args(
    settings: DatabaseSettings,
    statement_timeout_s: float | None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> dict[str, object]:
    options = ["-c timezone=UTC", "-c idle_in_transaction_session_timeout=30s"]
    if settings.database_role is not None:
        # Set before the first statement, so that no query ever runs with the login's own rights.
        options.append(f"-c role={settings.database_role}")
    if statement_timeout_s is not None:
        options.append(f"-c statement_timeout={round(statement_timeout_s * 1000)}")
    return {
        "connect_timeout": max(2, round(connect_timeout_s)),  # libpq takes whole seconds from 2 on
        "application_name": "loraplex",
        "options": " ".join(options),
    }


def create_database_engine(
    settings: DatabaseSettings,
    *,
    statement_timeout_s: float | None = STATEMENT_TIMEOUT_S,
    answer_deadline_s: float | None = None,
    is_for_calls: bool = False,
) -> AsyncEngine:
    """An async engine; dispose it when done.

    Args:
        is_for_calls: as a `CallPool` needs it: a statement is a transaction, and nothing is asked of a
            connection before or after it.
        answer_deadline_s: how long a connection waits for a server that says nothing, see
            `open_database`; by default a little longer than a statement may take, and for ever where
            statements may.
    """
    if answer_deadline_s is None and statement_timeout_s is not None:
        answer_deadline_s = statement_timeout_s + ANSWER_SLACK_S
    connect_args = _connect_args(
        settings,
        statement_timeout_s,
        min(CONNECT_TIMEOUT_S, answer_deadline_s or CONNECT_TIMEOUT_S),
    )
    if answer_deadline_s is not None:
        connect_args["async_creator_fn"] = _impatient_connection(answer_deadline_s).connect
    engine = create_async_engine(
        settings.sqlalchemy_url(),
        connect_args=connect_args,
        json_serializer=to_stored_json,
        poolclass=_AsyncPool,
        pool_size=settings.database_pool_size,
        max_overflow=0,  # an overflow connection is closed after each use: a fork per request
        pool_timeout=POOL_TIMEOUT_S,
        pool_pre_ping=not is_for_calls,
        pool_reset_on_return=None if is_for_calls else "rollback",
        pool_use_lifo=is_for_calls,  # few backends with warm caches, not all of them in turn
        pool_recycle=1800,
        **({"isolation_level": "AUTOCOMMIT"} if is_for_calls else {}),
    )
    event.listen(engine.sync_engine, "handle_error", _translate)
    if is_for_calls:
        event.listen(engine.sync_engine, "connect", _send_whole_numbers_alike)
    return engine


def _send_whole_numbers_alike(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
    """Else the driver sends them as smallint, integer or bigint by value, and each combination of
    these would be a prepared statement of its own."""
    del record
    driver: Any = connection.driver_connection
    driver.adapters.register_dumper(int, Int8Dumper)


def create_sync_database_engine(
    settings: DatabaseSettings, *, statement_timeout_s: float | None = STATEMENT_TIMEOUT_S
) -> Engine:
    """The same for code that is not async."""
    engine = create_engine(
        settings.sqlalchemy_url(),
        connect_args=_connect_args(settings, statement_timeout_s),
        json_serializer=to_stored_json,
        poolclass=_SyncPool,
        pool_size=settings.database_pool_size,
        max_overflow=0,  # an overflow connection is closed after each use: a fork per request
        pool_timeout=POOL_TIMEOUT_S,
        pool_pre_ping=True,
        pool_recycle=1800,
    )
    event.listen(engine, "handle_error", _translate)
    return engine


def _translate(context: ExceptionContext) -> None:
    """Raise our error instead of one that means "not there"; all others stay what they are."""
    if context.is_pre_ping:
        return  # the pool itself replaces the stale connection
    if not isinstance(context.original_exception, Exception):
        return  # somebody cancelled the task: that is no word about the server, and must not be lost
    if context.is_disconnect or means_unavailable(context.original_exception):
        raise unavailable_error(context.original_exception)


@dataclass(frozen=True, slots=True)
class Database:
    """An engine and its session factory."""

    engine: AsyncEngine
    sessions: SessionFactory

    @classmethod
    def connected(
        cls,
        settings: DatabaseSettings,
        *,
        statement_timeout_s: float | None = STATEMENT_TIMEOUT_S,
        answer_deadline_s: float | None = None,
    ) -> Database:
        """See `open_database`, which closes it as well."""
        engine, calls = (
            create_database_engine(
                settings,
                statement_timeout_s=statement_timeout_s,
                answer_deadline_s=answer_deadline_s,
                is_for_calls=is_for_calls,
            )
            for is_for_calls in (False, True)
        )
        return cls(engine, SessionFactory(engine, CallPool(calls)))

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.dispose()
        await self.sessions.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        async with self.sessions.begin() as session:
            yield session


@asynccontextmanager
async def open_database(
    settings: DatabaseSettings,
    *,
    statement_timeout_s: float | None = STATEMENT_TIMEOUT_S,
    answer_deadline_s: float | None = None,
) -> AsyncIterator[Database]:
    """The database for as long as the block lasts. Connects lazily: the first use may raise.

    Args:
        answer_deadline_s: after so long without a word from the server a statement or a COMMIT raises
            `DatabaseUnavailableError`, and its connection is closed.
    """
    database = Database.connected(
        settings, statement_timeout_s=statement_timeout_s, answer_deadline_s=answer_deadline_s
    )
    try:
        yield database
    finally:
        await database.close()
