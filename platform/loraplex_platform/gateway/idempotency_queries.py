"""SQL of Idempotency-Keys on the data plane."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, Select, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import IdempotentRequest, LedgerEntry, Request, Tenant

_Row = IdempotentRequest


@dataclass(frozen=True, slots=True)
class Claim:
    """An Idempotency-Key (its hash) within its scope, and the body (its hash) it came with."""

    tenant_id: UUID
    key_id: UUID
    endpoint: str
    key_hash: bytes
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """Whom the key stands for, and what has become of it.

    Attributes:
        state: of the request; None: its partition is gone.
        account: of its line in the ledger; None: it has none.
    """

    request_id: UUID
    fingerprint: bytes
    is_expired: bool
    sealed_answer: bytes | None
    state: str | None
    account: str | None
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def is_billed(self) -> bool:
        """It has ended, and the tenant paid for it."""
        return self.account == "revenue"

    @property
    def is_free(self) -> bool:
        """It is over and cost nothing, or is forgotten: the key may stand for another."""
        return self.is_expired or not (self.is_billed or self.state == "reserved")


def _is(claim: Claim) -> tuple[ColumnElement[bool], ...]:
    return (
        _Row.tenant_id == claim.tenant_id,
        _Row.key_id == claim.key_id,
        _Row.endpoint == claim.endpoint,
        _Row.key_hash == claim.key_hash,
    )


async def keeps_answers(session: AsyncSession, tenant_id: UUID) -> bool:
    """Whether the tenant has its answers kept for retries."""
    statement = select(Tenant.replays_answers).where(Tenant.id == tenant_id)
    return bool(await session.scalar(statement))


async def find_first(session: AsyncSession, claim: Claim) -> FirstRequest | None:
    """Whom the key stands for now."""
    row = (await session.execute(_first(claim))).first()
    return None if row is None else FirstRequest(*row)


async def lock_first(session: AsyncSession, claim: Claim) -> FirstRequest | None:
    """The same, and nobody else changes it meanwhile."""
    # Its state is read by a statement of its own: one that waited for the lock would still see what
    # the other tables held before.
    await session.execute(select(_Row.request_id).where(*_is(claim)).with_for_update())
    return await find_first(session, claim)


def _first(
    claim: Claim,
) -> Select[UUID, bytes, bool, bytes | None, str | None, str | None, str | None, int, int, int]:
    return (
        select(
            _Row.request_id,
            _Row.fingerprint,
            _Row.expires_at <= func.now(),
            _Row.sealed_answer,
            Request.state,
            LedgerEntry.account,
            Request.finish_reason,
            func.coalesce(Request.prompt_tokens, 0),
            func.coalesce(Request.cached_tokens, 0),
            func.coalesce(Request.completion_tokens, 0),
        )
        .outerjoin(Request, (Request.id == _Row.request_id) & (Request.tenant_id == _Row.tenant_id))
        .outerjoin(
            LedgerEntry,
            (LedgerEntry.entry_id == _Row.request_id)
            & (LedgerEntry.kind == "usage")
            & (LedgerEntry.tenant_id == _Row.tenant_id),
        )
        .where(*_is(claim))
    )


async def insert_claim(
    session: AsyncSession, claim: Claim, request_id: UUID, keep: timedelta
) -> bool:
    """Claim a key that stands for nothing yet. False: it does."""
    statement = (
        insert(_Row)
        .values(
            tenant_id=claim.tenant_id,
            key_id=claim.key_id,
            endpoint=claim.endpoint,
            key_hash=claim.key_hash,
            fingerprint=claim.fingerprint,
            request_id=request_id,
            expires_at=func.now() + keep,
        )
        .on_conflict_do_nothing()
        .returning(_Row.request_id)
    )
    return (await session.execute(statement)).first() is not None


async def take_over(session: AsyncSession, claim: Claim, request_id: UUID, keep: timedelta) -> None:
    """Let a locked row stand for this request instead."""
    await session.execute(
        update(_Row)
        .where(*_is(claim))
        .values(
            fingerprint=claim.fingerprint,
            request_id=request_id,
            created_at=func.now(),
            expires_at=func.now() + keep,
            sealed_answer=None,
        )
        .execution_options(synchronize_session=False)
    )


async def keep_answer(session: AsyncSession, claim: Claim, request_id: UUID, sealed: bytes) -> None:
    """Store the answer of the request that the key still stands for."""
    await session.execute(
        update(_Row)
        .where(*_is(claim), _Row.request_id == request_id)
        .values(sealed_answer=sealed)
        .execution_options(synchronize_session=False)
    )


async def delete_expired(session: AsyncSession) -> None:
    """Forget keys whose day is over, and the answers that were kept for them."""
    await session.execute(delete(_Row).where(_Row.expires_at <= func.now()))
