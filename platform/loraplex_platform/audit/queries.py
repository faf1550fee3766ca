"""SQL of idempotency records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import IdempotencyRecord
from loraplex_platform.db.base import Json

_Record = IdempotencyRecord


@dataclass(frozen=True, slots=True)
class Scope:
    """What makes an Idempotency-Key unique: the same text of two callers is two keys."""

    principal: str
    route: str
    key_hash: bytes


def _is(scope: Scope) -> tuple[ColumnElement[bool], ...]:
    return (
        _Record.principal == scope.principal,
        _Record.route == scope.route,
        _Record.key_hash == scope.key_hash,
    )


async def claim(
    session: AsyncSession, scope: Scope, fingerprint: bytes, running_for: timedelta
) -> bool:
    """Insert the record as running; False if a live one is there."""
    await session.execute(delete(_Record).where(*_is(scope), _Record.expires_at <= func.now()))
    statement = (
        insert(_Record)
        .values(
            principal=scope.principal,
            route=scope.route,
            key_hash=scope.key_hash,
            fingerprint=fingerprint,
            expires_at=func.now() + running_for,
        )
        .on_conflict_do_nothing()
        .returning(_Record.principal)
    )
    return (await session.execute(statement)).first() is not None


async def find(session: AsyncSession, scope: Scope) -> IdempotencyRecord | None:
    """The record, if any."""
    return await session.scalar(select(_Record).where(*_is(scope)))


async def finish(
    session: AsyncSession, scope: Scope, status: int, response: Json, keep_until: datetime
) -> None:
    """Store the reply."""
    await session.execute(
        update(_Record)
        .where(*_is(scope))
        .values(status=status, response=response, expires_at=keep_until)
    )


async def drop(session: AsyncSession, scope: Scope) -> None:
    """Forget the record: the operation did not happen."""
    await session.execute(delete(_Record).where(*_is(scope)))
