"""How long somebody waits for the database, whatever it is that takes so long there.

A statement is bounded by its connection (`session.py`), but a request may wait for a free connection,
for one to be made, and for a second try besides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from loraplex_platform.db.session import DatabaseUnavailableError

Result = TypeVar("Result")


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is given up after so long.

    It is not waited for then: a driver that is cancelled first asks a server that does not answer to
    stop, for seconds. Whether the work was done is unknown, as after any lost connection.

    Raises:
        DatabaseUnavailableError: the time is over.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _give_up(task)
        raise
    if not done:
        _give_up(task)
        raise DatabaseUnavailableError(f"The database did not answer within {seconds:g} s.")
    return task.result()


def _give_up(task: asyncio.Task[Any]) -> None:
    # Its connection is known to the event loop, and it to its connection: nothing collects it.
    task.cancel()
    task.add_done_callback(_read)


def _read(task: asyncio.Task[Any]) -> None:
    """Nobody else looks at how it ended; asyncio complains of what nobody looked at."""
    if not task.cancelled():
        task.exception()
