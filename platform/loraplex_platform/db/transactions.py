"""Run a short transaction again when Postgres says that it lost a race."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.errors import LOST_RACES, DatabaseUnavailableError
from loraplex_platform.db.session import SessionFactory

log = structlog.get_logger(__name__)

MAX_TRIES = 8

Result = TypeVar("Result")


async def run_transaction(
    sessions: SessionFactory,
    work: Callable[[AsyncSession], Awaitable[Result]],
    *,
    is_idempotent: bool = False,
) -> Result:
    """`work` in one transaction, tried again with the same arguments after a lost race.

    Args:
        is_idempotent: also try once more when the connection broke, perhaps during COMMIT: `work`
            must then tell by itself whether its first run was committed.

    Raises:
        DatabaseUnavailableError: the database is down. Whether the work was committed is unknown.
    """

    async def attempt() -> Result:
        async with sessions.begin() as session:
            return await work(session)

    try:
        return await retry_lost_races(attempt)
    except DatabaseUnavailableError:
        if not is_idempotent:
            raise
    return await retry_lost_races(attempt)


async def retry_lost_races(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """`attempt`, which is one transaction, again for as long as it loses races; at most 8 times.

    Raises:
        DBAPIError: it lost the last one too, or something else was wrong.
    """
    for tries in range(1, MAX_TRIES + 1):
        try:
            return await attempt()
        except exc.DBAPIError as error:
            sqlstate = getattr(error.orig, "sqlstate", None)
            if sqlstate not in LOST_RACES or tries == MAX_TRIES:
                raise
            log.info("transaction_retried", sqlstate=sqlstate)
        # Losers of one race must not meet again in step.
        await asyncio.sleep(random.uniform(0.001, 0.005) * 2**tries)  # noqa: S311 # not a secret
    raise AssertionError("the last try returns or raises")
