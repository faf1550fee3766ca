"""What both APIs leave behind and nobody needs any more: deleted every few minutes.

Several control processes may do so at once; each statement is harmless to repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from sqlalchemy import delete, func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import IdempotencyRecord, LoginThrottle, Session
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import UnavailableError
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.idempotency_queries import delete_expired
from loraplex_platform.users import throttle

log = structlog.get_logger(__name__)

INTERVAL_S = 600.0


@contextlib.asynccontextmanager
async def running(
    sessions: SessionFactory, sweep_files: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Tidy in the background for as long as the block lasts."""
    task = asyncio.create_task(_tidy_forever(sessions, sweep_files), name="housekeeping")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def tidy(session: AsyncSession) -> None:
    """Delete expired idempotency records, spent throttle windows and long-ended sessions."""
    now = func.now()
    await session.execute(delete(IdempotencyRecord).where(IdempotencyRecord.expires_at <= now))
    await delete_expired(session)
    spent = LoginThrottle.window_start <= now - throttle.WINDOW
    await session.execute(delete(LoginThrottle).where(spent))
    # How long after their end is retention's setting; no setting of days, and they stay.
    kept = func.make_interval(0, 0, 0, func.loraplex_keep_days("sessions"))
    await session.execute(delete(Session).where(Session.expires_at <= now - kept))


async def _tidy_forever(
    sessions: SessionFactory, sweep_files: Callable[[], Awaitable[None]]
) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            async with sessions.begin() as session:
                await tidy(session)
            await sweep_files()
        except UnavailableError as error:
            log.warning("housekeeping_skipped", reason=error.message)
        except Exception as error:  # noqa: BLE001 - one odd failure must not end all later rounds
            log_crash("housekeeping_crashed", error)
