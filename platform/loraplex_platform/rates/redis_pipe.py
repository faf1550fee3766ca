"""One connection to Redis for many callers: what is asked while it is busy goes out in one write.

redis-py's own client takes a connection out of a pool for each command, which costs a gateway more than
the command itself. Here the library's connection (addresses, TLS, log-in, protocol) is used as it is, by one
task that sends what has gathered and hands the answers out in order, also to callers that have given up:
so an answer that comes too late is never read as another's. An exchange that hangs ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from redis import asyncio as redis_asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

Argument = str | bytes | int | float
_Call = tuple[tuple[Argument, ...], asyncio.Future[Any]]

MAX_BATCH = 256
HANGING_S = 0.5
# A call's deadline is Redis's: time for which this process itself was too busy to look does not count.
_LATE_S = 0.005
_MORE_S = 0.05
_MAX_EXTENSIONS = 10


class RedisPipe:
    """See the module's header. `aclose` it in the end.

    Args:
        url: redis://, rediss:// or unix://, with what redis-py takes in it.
        on_connect: called with each new connection before it is used; it may ask it things.
    """

    def __init__(
        self,
        url: str,
        on_connect: Callable[[AbstractConnection], Awaitable[None]],
        *,
        hanging_s: float = HANGING_S,
    ) -> None:
        async def prepare(connection: AbstractConnection) -> None:
            await connection.on_connect()
            await on_connect(connection)

        pool = redis_asyncio.ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=None,  # calls have deadlines
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=prepare,
        )
        self._connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        self._hanging_s = hanging_s
        self._waiting: list[_Call] = []
        self._worker: asyncio.Task[None] | None = None

    async def call(self, due_s: float, *words: Argument) -> Any:  # noqa: ANN401 # a reply of Redis
        """A command's reply. Cancelled, it is not sent, or its answer is thrown away.

        Args:
            due_s: until when, by the loop's clock; connecting and waiting for one's turn included.
            words: the command and its arguments.

        Raises:
            ResponseError: Redis refuses the command.
            TimeoutError: there is no answer in time; it may have been run, or may yet be.
            RedisError, OSError: there is no answer; it may have been run.
        """
        answer = self._send(*words)
        timer = answer.get_loop().call_at(due_s, _expire, answer, due_s, 0)
        try:
            return await answer
        finally:
            timer.cancel()

    def ask(self, *words: Argument) -> asyncio.Future[Any]:
        """The reply to come, or why there is none; no deadline but that of an exchange that hangs."""
        answer = self._send(*words)
        # Whoever asked may not look at it any more.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    def _send(self, *words: Argument) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((words, answer))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="redis pipe")
        return answer

    async def aclose(self) -> None:
        """Close the connection; whoever still waits is told that there is no answer."""
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        _fail(self._waiting, redis_asyncio.ConnectionError("The connection is closed."))
        await self._connection.disconnect(nowait=True)

    async def _work(self) -> None:
        batch: list[_Call] = []
        try:
            while self._waiting:
                batch = [call for call in self._waiting[:MAX_BATCH] if not call[1].done()]
                del self._waiting[:MAX_BATCH]
                if batch:
                    await self._exchange(batch)
        finally:
            self._worker = None
            _fail(batch, redis_asyncio.ConnectionError("The connection is closed."))

    async def _exchange(self, batch: list[_Call]) -> None:
        connection = self._connection
        try:
            async with asyncio.timeout(self._hanging_s):
                if not connection.is_connected:
                    await connection.connect()  # type: ignore[no-untyped-call]
                packed = connection.pack_commands([words for words, _ in batch])
                await connection.send_packed_command(packed, check_health=False)
                for _, answer in batch:
                    await _read(connection, answer)
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            _fail(batch, error)


def _expire(answer: asyncio.Future[Any], due_s: float, num_extensions: int) -> None:
    """End the wait, unless it is we who are late: then there may be an answer that we have not read."""
    if answer.done():
        return
    loop = answer.get_loop()
    now_s = loop.time()
    if now_s - due_s > _LATE_S and num_extensions < _MAX_EXTENSIONS:
        loop.call_at(now_s + _MORE_S, _expire, answer, now_s + _MORE_S, num_extensions + 1)
        return
    answer.set_exception(TimeoutError("Redis did not answer in time"))


async def _read(connection: AbstractConnection, answer: asyncio.Future[Any]) -> None:
    try:
        reply = await connection.read_response()
    except ResponseError as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():  # else its caller has left
            answer.set_result(reply)


def _fail(calls: list[_Call], error: Exception) -> None:
    for _, answer in calls:
        if not answer.done():
            answer.set_exception(error)
    calls.clear()
