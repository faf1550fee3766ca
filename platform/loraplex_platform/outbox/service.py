"""Leave a message in the transaction of its cause."""

from __future__ import annotations

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import OutboxMessage
from loraplex_platform.db.base import Json

MAX_DEDUPE_KEY = 200


async def enqueue(session: AsyncSession, topic: str, dedupe_key: str, payload: Json) -> bool:
    """Have the relay deliver `payload` once the caller's transaction has committed.

    Args:
        session: the transaction of the cause.
        topic: whose handler gets it, see `relay.Topic`.
        dedupe_key: the event's own name: a second message of this name is not kept.
        payload: what the handler needs; no secrets.

    Returns:
        Whether it is new.
    """
    statement = (
        insert(OutboxMessage)
        .values(topic=topic, dedupe_key=dedupe_key, payload=payload)
        .on_conflict_do_nothing()
        .returning(OutboxMessage.id)
    )
    return await session.scalar(statement) is not None
