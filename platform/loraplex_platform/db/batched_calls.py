"""Calls of one kind that arrive while another is at the server, together in the next one.

A statement costs a switch of processes on both sides, a transaction its flush of the log: under load most
of what a small call costs. So one statement at a time takes all that has gathered. Nobody waits for
others to come, and nobody for a statement that takes long: then the next one goes beside it.

The statement itself sees to it that no item touches another's; one that it cannot decide together with
others has no row in its answer, and is for its caller to ask for alone. What a statement does to keep items
apart is for nothing where only one has come: an item may bring its own way to be done (`alone`). That may
wait for locks, so the next statement waits for it only briefly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog

from loraplex_platform.db.calls import CallPool, Row
from loraplex_platform.db.errors import DatabaseUnavailableError

log = structlog.get_logger(__name__)

MAX_ITEMS = 32
# How long a statement may take before the next one no longer waits for it, and how many may be under
# way: a connection that hangs must not hold up everybody.
PATIENCE_S = 0.1
MAX_SENDING = 4
ALONE_PATIENCE_S = 0.03  # of those there may be any number: they wait for locks, not for the server

Alone = Callable[[], Awaitable[Row]]
_Item = tuple[bytes, "asyncio.Future[Row | None]", Alone | None]


class BatchedCalls:
    """See the module's header.

    Args:
        query: takes %(batch)s, a JSON array of objects, each an item and its place as `item`; has
            a row for each item that it has decided, whose first column is that place. Safe to repeat.
    """

    def __init__(self, calls: CallPool, query: str) -> None:
        self._calls = calls
        self._query = query
        self._waiting: deque[_Item] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._num_prompt = (
            0  # senders that do what waits; the others are late, and nobody counts on them
        )
        self._num_late_alone = 0  # senders

    async def call(self, item: Mapping[str, object], alone: Alone | None = None) -> Row | None:
        """The item's row, its place included; None: it was not decided, ask for it alone.

        Cancelled before its turn it is not sent; later it may have been done.

        Args:
            item: not empty; of what `msgspec` takes.
            alone: does the same, if no other item has come; its row is as the statement's would be, and what
                it raises is raised here.

        Raises:
            DatabaseUnavailableError: as `CallPool.rows`; or closed. Whether it was done is unknown.
        """
        if self._is_closed:
            raise DatabaseUnavailableError()
        answer: asyncio.Future[Row | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((msgspec.json.encode(item), answer, alone))
        self._send_on()
        return await answer

    async def close(self) -> None:
        """End what is under way; whoever still waits hears that the database is not available."""
        self._is_closed = True
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        while self._waiting:
            _fail(self._waiting.popleft()[1], DatabaseUnavailableError())

    def _send_on(self) -> None:
        if self._num_prompt == 0 and len(self._senders) - self._num_late_alone < MAX_SENDING:
            self._num_prompt += 1
            sender = asyncio.create_task(self._send_all(), name="batched calls")
            self._senders.add(sender)

    async def _send_all(self) -> None:
        sender = asyncio.current_task()
        is_late = is_alone = False

        def be_late() -> None:
            nonlocal is_late
            is_late = True
            self._num_prompt -= 1
            self._num_late_alone += is_alone
            if self._waiting:
                self._send_on()

        try:
            while self._waiting and not (is_late and self._num_prompt > 0):
                if is_late:  # and back again
                    is_late = False
                    self._num_prompt += 1
                batch = self._take()
                is_alone = len(batch) == 1 and batch[0][2] is not None
                patience_s = ALONE_PATIENCE_S if is_alone else PATIENCE_S
                timer = asyncio.get_running_loop().call_later(patience_s, be_late)
                try:
                    await self._send(batch)
                finally:
                    timer.cancel()
                    self._num_late_alone -= is_late and is_alone
        finally:
            # Here, with no turn of the loop between: what comes now starts a sender of its own.
            self._num_prompt -= not is_late
            self._senders.discard(sender)

    def _take(self) -> list[_Item]:
        batch: list[_Item] = []
        while self._waiting and len(batch) < MAX_ITEMS:
            waiting = self._waiting.popleft()
            if not waiting[1].done():  # else its caller has left
                batch.append(waiting)
        return batch

    async def _send(self, batch: list[_Item]) -> None:
        if not batch:
            return
        if len(batch) == 1 and batch[0][2] is not None:
            await self._send_alone(batch[0][1], batch[0][2])
            return
        try:
            rows = await self._calls.rows(
                self._query, {"batch": _join([item for item, _, _ in batch])}
            )
        except DatabaseUnavailableError as error:
            for _, answer, _ in batch:
                _fail(answer, DatabaseUnavailableError(error.message))
        except asyncio.CancelledError:
            for _, answer, _ in batch:
                _fail(answer, DatabaseUnavailableError())
            raise
        except Exception as error:  # noqa: BLE001 - the others' senders and items must not end with it
            # One of them is at fault, or somebody holds a lock: alone, each has its own outcome.
            state = getattr(error, "sqlstate", None)
            log.info("batch_broken_up", reason=state or type(error).__name__, num_items=len(batch))
            for _, answer, _ in batch:
                _answer(answer, None)
        else:
            found = {row[0]: row for row in rows}
            for place, (_, answer, _) in enumerate(batch):
                _answer(answer, found.get(place))

    async def _send_alone(self, answer: asyncio.Future[Row | None], alone: Alone) -> None:
        try:
            row = await alone()
        except asyncio.CancelledError:
            _fail(answer, DatabaseUnavailableError())
            raise
        except Exception as error:  # noqa: BLE001 - its caller's; the sender goes on
            _fail(answer, error)
        else:
            _answer(answer, row)


def one_item(item: Mapping[str, object]) -> str:
    """A batch of this alone, for `CallPool`."""
    return _join([msgspec.json.encode(item)])


def _join(encoded: list[bytes]) -> str:
    """As one array, in which each object knows its place."""
    items = [b'{"item":%d,%b' % (place, item[1:]) for place, item in enumerate(encoded)]
    return "[" + b",".join(items).decode() + "]"


def _answer(answer: asyncio.Future[Row | None], row: Row | None) -> None:
    if not answer.done():
        answer.set_result(row)


def _fail(answer: asyncio.Future[Row | None], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
