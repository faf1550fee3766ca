"""SQL of the worker: landed journals, the replica mirror, upkeep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from loraplex_engine.protocol import JournalEntry, ReplicaRecord
from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import Attempt, EngineUsage, JournalCursor, Replica, Request

# ---------------------------------------------------------------------------- journals


async def load_cursor(session: AsyncSession, replica_id: str, journal_id: str) -> int:
    """The last sequence number that has landed; 0 at first."""
    cursor = await session.get(JournalCursor, (replica_id, journal_id))
    return 0 if cursor is None else cursor.last_seq


async def move_cursor(
    session: AsyncSession, replica_id: str, journal_id: str, last_seq: int
) -> None:
    """Only forwards: another worker may be ahead."""
    statement = insert(JournalCursor).values(
        replica_id=replica_id, journal_id=journal_id, last_seq=last_seq
    )
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[JournalCursor.replica_id, JournalCursor.journal_id],
            set_={"last_seq": func.greatest(JournalCursor.last_seq, statement.excluded.last_seq)},
        )
    )


async def land_entries(
    session: AsyncSession, replica_id: str, entries: Sequence[tuple[UUID, UUID, JournalEntry]]
) -> None:
    """Add journal entries as (request id, tenant id, entry); those that landed before stay."""
    rows = [
        {
            "request_id": request_id,
            "attempt": entry.attempt,
            "replica_id": replica_id,
            "tenant_id": tenant_id,
            "adapter_digest": entry.adapter_digest,
            "finish_reason": entry.finish_reason,
            "prompt_tokens": entry.usage.prompt_tokens,
            "cached_tokens": entry.usage.cached_tokens,
            "completion_tokens": entry.usage.completion_tokens,
            "ended_at": datetime.fromtimestamp(entry.ended_at_unix_s, UTC),
        }
        for request_id, tenant_id, entry in entries
    ]
    if rows:
        await session.execute(insert(EngineUsage).on_conflict_do_nothing(), rows)


async def closed_without_attempt(
    session: AsyncSession, request_ids: Collection[UUID]
) -> list[tuple[Request, EngineUsage]]:
    """Landed work of requests that were closed without it.

    Open and voided rows are locked, so that a void that runs at the same time either sees what has
    landed or is seen here.
    """
    await session.execute(
        select(Request.id)
        .where(Request.id.in_(request_ids), Request.state != "settled")
        .order_by(Request.id)
        .with_for_update(read=True)
    )
    statement = (
        select(Request, EngineUsage)
        .join(EngineUsage, EngineUsage.request_id == Request.id)
        .outerjoin(
            Attempt,
            (Attempt.request_id == Request.id) & (Attempt.attempt == EngineUsage.attempt),
        )
        .where(
            Request.id.in_(request_ids),
            Request.state != "reserved",
            Attempt.request_id.is_(None),
        )
        .order_by(Request.id, EngineUsage.attempt)
    )
    return [(row[0], row[1]) for row in await session.execute(statement)]


async def find_landed(session: AsyncSession, request_id: UUID, attempt: int) -> EngineUsage | None:
    """The engine's account of an attempt, if the puller has it."""
    return await session.get(EngineUsage, (request_id, attempt))


# ---------------------------------------------------------------------------- replicas


async def mirror_replica(session: AsyncSession, replica_id: str, record: ReplicaRecord) -> None:
    """Note that the replica answers now."""
    value: dict[str, Any] = msgspec.to_builtins(record)
    statement = insert(Replica).values(replica_id=replica_id, record=value)
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[Replica.replica_id],
            set_={"record": statement.excluded.record, "last_seen_at": func.now()},
        )
    )


async def seconds_unseen(session: AsyncSession, replica_id: str) -> float | None:
    """How long the replica has not answered; None: it was never seen."""
    age = func.extract("epoch", func.now() - Replica.last_seen_at)
    seconds = await session.scalar(select(age).where(Replica.replica_id == replica_id))
    return None if seconds is None else float(seconds)


# ---------------------------------------------------------------------------- upkeep

_NOTE_KEY_USE = text("""
update api_keys set last_used_at = used.at
from (
    select key_id, max(admitted_at) as at from requests
    where id >= :since and key_id is not null
    group by key_id
) as used
where api_keys.id = used.key_id
    and (api_keys.last_used_at is null or api_keys.last_used_at < used.at)
""")


async def note_key_use(session: AsyncSession, since: UUID) -> None:
    """Set `last_used_at` of keys from the requests since `since`: off the path of any request."""
    await session.execute(_NOTE_KEY_USE, {"since": since})


async def make_partitions(session: AsyncSession, months_ahead: int) -> int:
    """Make the partitions that are missing; how many those were."""
    statement = select(func.loraplex_make_partitions(months_ahead))
    return int((await session.execute(statement)).scalar_one())
