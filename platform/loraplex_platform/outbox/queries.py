"""SQL of the outbox. Times are the database's.

Never "id > last seen": a slow transaction becomes visible behind the cursor. A message is due while
it is neither done nor dead and its `next_at` has come; claiming it moves `next_at`, so that nobody
else delivers it meanwhile and a relay that dies leaves it to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import CursorResult, delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import OutboxMessage
from loraplex_platform.db.base import Json

_CLAIM = text("""
with due as (
    select id from outbox
    where topic = :topic and done_at is null and dead_at is null and next_at <= now()
        and (cast(:left_at as timestamptz) is null or created_at = :left_at)
    order by next_at, id limit :limit for update skip locked
)
update outbox set tries = tries + 1, next_at = now() + make_interval(secs => :claim_s)
from due where outbox.id = due.id
returning outbox.id, outbox.dedupe_key, outbox.payload, outbox.tries
""")


@dataclass(frozen=True, slots=True)
class Message:
    """One claimed message. `tries` counts this one."""

    id: int
    dedupe_key: str
    payload: Json
    tries: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """What of a topic is not done: how many wait, how many were given up, the oldest one's age."""

    topic: str
    waiting: int
    dead: int
    oldest_s: float


async def claim(
    session: AsyncSession,
    topic: str,
    *,
    limit: int,
    claim_s: float,
    left_at: datetime | None = None,
) -> Sequence[Message]:
    """Take messages that are due, oldest first; nobody else gets them for `claim_s`.

    Args:
        left_at: `now()` of the transaction that left them; None: whichever did.
    """
    parameters = {"topic": topic, "limit": limit, "claim_s": claim_s, "left_at": left_at}
    rows = (await session.execute(_CLAIM, parameters)).all()
    return sorted((Message(*row) for row in rows), key=lambda message: message.id)


async def finish(session: AsyncSession, message: Message) -> None:
    """It has been delivered."""
    statement = (
        update(OutboxMessage)
        .where(OutboxMessage.id == message.id)
        .values(done_at=func.now(), error=None)
    )
    await session.execute(statement)


async def put_off(
    session: AsyncSession, message: Message, error: str, *, wait_s: float, is_dead: bool
) -> None:
    """It could not be delivered: try again in `wait_s`, or never."""
    statement = (
        update(OutboxMessage)
        .where(OutboxMessage.id == message.id, OutboxMessage.done_at.is_(None))
        .values(
            error=error,
            next_at=func.now() + timedelta(seconds=wait_s),
            dead_at=func.now() if is_dead else None,
        )
    )
    await session.execute(statement)


async def revive(session: AsyncSession, topic: str) -> int:
    """Give messages that were given up another life; how many."""
    statement = (
        update(OutboxMessage)
        .where(
            OutboxMessage.topic == topic,
            OutboxMessage.dead_at.is_not(None),
            OutboxMessage.done_at.is_(None),
        )
        .values(dead_at=None, tries=0, next_at=func.now())
    )
    return _count(await session.execute(statement))


async def purge(session: AsyncSession, *, older_than: timedelta, limit: int) -> int:
    """Delete messages that were delivered long ago; how many. Dead ones stay until somebody looks."""
    old = (
        select(OutboxMessage.id)
        .where(OutboxMessage.done_at < func.now() - older_than)
        .order_by(OutboxMessage.done_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return _count(await session.execute(delete(OutboxMessage).where(OutboxMessage.id.in_(old))))


async def backlog(session: AsyncSession) -> list[Backlog]:
    """Per topic, what is not done."""
    is_dead = OutboxMessage.dead_at.is_not(None)
    age_s = func.extract("epoch", func.now() - func.min(OutboxMessage.created_at).filter(~is_dead))
    statement = (
        select(
            OutboxMessage.topic,
            func.count().filter(~is_dead),
            func.count().filter(is_dead),
            func.coalesce(age_s, 0),
        )
        .where(OutboxMessage.done_at.is_(None))
        .group_by(OutboxMessage.topic)
    )
    rows = (await session.execute(statement)).all()
    return [Backlog(row[0], row[1], row[2], float(row[3])) for row in rows]


def _count(result: object) -> int:
    assert isinstance(result, CursorResult)  # noqa: S101 # what an UPDATE or DELETE returns
    return result.rowcount
