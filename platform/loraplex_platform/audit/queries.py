"""SQL of idempotency records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

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


def _is_claimed_by(scope: Scope, claim_token: UUID) -> tuple[ColumnElement[bool], ...]:
    """The record of this very call: still running, and not taken over by a later one."""
    return (*_is(scope), _Record.status.is_(None), _Record.claim_token == claim_token)


async def claim(
    session: AsyncSession,
    scope: Scope,
    fingerprint: bytes,
    claim_token: UUID,
    running_for: timedelta,
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
            claim_token=claim_token,
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
    session: AsyncSession,
    scope: Scope,
    claim_token: UUID,
    *,
    status: int,
    response: Json,
    keep_until: datetime,
) -> bool:
    """Store the reply; False if the claim is no longer ours."""
    statement = (
        update(_Record)
        .where(*_is_claimed_by(scope, claim_token))
        .values(status=status, response=response, expires_at=keep_until)
        .returning(_Record.principal)
    )
    return (await session.execute(statement)).first() is not None


async def drop(session: AsyncSession, scope: Scope, claim_token: UUID) -> None:
    """Forget the claim: the operation did not happen. A stored reply says that it did, and stays."""
    await session.execute(delete(_Record).where(*_is_claimed_by(scope, claim_token)))
