"""SQL of what is known of a request's answer: rows that were immutable, or that keep their own history."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import (
    Adapter,
    AdapterVersion,
    Attempt,
    EngineBuild,
    LedgerEntry,
    LedgerReversal,
    PinEvent,
)

_PRICES = text("select * from loraplex_prices_of_request(:id)")


async def ledger_of(session: AsyncSession, request_id: UUID) -> Sequence[LedgerEntry]:
    """Every line of account of it: its use, attempts that came late, and what took it back."""
    reversals = select(LedgerReversal.reversal_id).where(LedgerReversal.entry_id == request_id)
    statement = (
        select(LedgerEntry)
        .where(or_(LedgerEntry.entry_id == request_id, LedgerEntry.entry_id.in_(reversals)))
        .order_by(LedgerEntry.occurred_at, LedgerEntry.kind.desc(), LedgerEntry.seq)
    )
    return (await session.scalars(statement)).all()


async def attempts_of(session: AsyncSession, request_id: UUID) -> Sequence[Attempt]:
    """In order."""
    statement = select(Attempt).where(Attempt.request_id == request_id).order_by(Attempt.attempt)
    return (await session.scalars(statement)).all()


async def find_adapter(
    session: AsyncSession, version_id: UUID
) -> tuple[Adapter, AdapterVersion] | None:
    """A version and whose it is."""
    statement = (
        select(Adapter, AdapterVersion)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(AdapterVersion.id == version_id)
    )
    row = (await session.execute(statement)).first()
    return None if row is None else (row[0], row[1])


async def find_build(session: AsyncSession, fingerprint: str) -> EngineBuild | None:
    """By what it is told apart by."""
    return await session.scalar(select(EngineBuild).where(EngineBuild.fingerprint == fingerprint))


async def find_pin_at(
    session: AsyncSession, tenant_id: UUID, deployment_id: UUID, at: datetime
) -> PinEvent | None:
    """What the tenant's pin said last, then; None: it never had one."""
    statement = (
        select(PinEvent)
        .where(
            PinEvent.tenant_id == tenant_id,
            PinEvent.deployment_id == deployment_id,
            PinEvent.at <= at,
        )
        .order_by(PinEvent.at.desc(), PinEvent.id.desc())
        .limit(1)
    )
    return await session.scalar(statement)


async def prices_of(session: AsyncSession, request_id: UUID) -> Row[Any] | None:
    """The book by which it is billed, and that book's prices for it: pico-USD per token and request."""
    return (await session.execute(_PRICES, {"id": request_id})).first()
