"""Credits, debits and reversals: new lines of account, never changed ones.

Amounts are what they add to what the tenant owes: a credit is below zero. A balance is the sum of all
lines that the tenant pays for. A line is reversed at most once, which a primary key guards.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Final
from uuid import UUID

from sqlalchemy import Select, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.billing.money import format_usd, parse_usd
from loraplex_platform.billing.rollups import USAGE_SOURCE
from loraplex_platform.db import LedgerEntry, LedgerReversal
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7

ADJUSTMENT_KINDS: Final = ("credit", "debit", "reversal")
_FIRST_DAY, _LAST_DAY = date(1970, 1, 1), date(9999, 12, 31)

# Usage from the rollups: a balance must not read every request that there ever was.
_BALANCE = text(f"""
with {USAGE_SOURCE}
select (select coalesce(sum(amount_pico), 0) from source)
    + (select coalesce(sum(amount_pico), 0) from ledger
        where tenant_id = :tenant and kind = 'hours') as usage_pico,
    (select coalesce(sum(amount_pico), 0) from ledger
        where tenant_id = :tenant and kind in ('credit', 'debit', 'reversal')) as adjustments_pico
""")  # noqa: S608 # USAGE_SOURCE is ours


@dataclass(frozen=True, slots=True)
class Balance:
    """In pico-USD; above zero the tenant owes it."""

    usage_pico: int
    adjustments_pico: int

    @property
    def total_pico(self) -> int:
        """What is owed."""
        return self.usage_pico + self.adjustments_pico


def adjustments_of(tenant_id: UUID) -> Select[LedgerEntry]:
    """A tenant's lines that are no usage."""
    return select(LedgerEntry).where(
        LedgerEntry.tenant_id == tenant_id, LedgerEntry.kind.in_(ADJUSTMENT_KINDS)
    )


async def balance_of(session: AsyncSession, tenant_id: UUID) -> Balance:
    """What the tenant owes now, usage of this very moment included."""
    parameters = {"tenant": tenant_id, "first_day": _FIRST_DAY, "last_day": _LAST_DAY}
    row = (await session.execute(_BALANCE, parameters)).one()
    return Balance(int(row.usage_pico), int(row.adjustments_pico))


async def add(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    *,
    kind: str,
    amount_usd: str,
    reason: str,
) -> LedgerEntry:
    """Credit or debit a tenant.

    Raises:
        InvalidRequestError: the amount is zero.
    """
    amount_pico = parse_usd(amount_usd)
    if amount_pico == 0:
        raise InvalidRequestError("amount_usd: it must be more than zero.", param="amount_usd")
    is_credit = kind == "credit"
    return await _insert(
        session,
        actor,
        tenant_id,
        kind=kind,
        account="credit" if is_credit else "adjust",
        amount_pico=-amount_pico if is_credit else amount_pico,
        reason=reason,
    )


async def reverse(
    session: AsyncSession, actor: Actor, tenant_id: UUID, entry_id: str, reason: str
) -> LedgerEntry:
    """Take a request's charge, a credit or a debit back.

    Raises:
        NotFoundError: the tenant has no such line.
        ConflictError: it is reversed already, or there is nothing to take back.
    """
    entry = await _find(session, tenant_id, entry_id)
    if entry.kind == "reversal":
        raise ConflictError(
            "A reversal is not reversed; book a credit or a debit instead.", param="entry_id"
        )
    if entry.account == "absorbed" or entry.amount_pico == 0:
        raise ConflictError(
            "The tenant was not charged for it; there is nothing to take back.", param="entry_id"
        )
    reversal_id = uuid7()
    guard = (
        insert(LedgerReversal)
        .values(
            entry_id=entry.entry_id,
            kind=entry.kind,
            seq=entry.seq,
            tenant_id=tenant_id,
            reversal_id=reversal_id,
        )
        .on_conflict_do_nothing()
        .returning(LedgerReversal.reversal_id)
    )
    if (await session.execute(guard)).first() is None:
        raise ConflictError("It has been reversed already.", param="entry_id")
    return await _insert(
        session,
        actor,
        tenant_id,
        kind="reversal",
        account="credit" if entry.kind == "credit" else "adjust",
        amount_pico=-int(entry.amount_pico),
        reason=reason,
        entry_id=reversal_id,
        of=entry_id,
    )


async def _find(session: AsyncSession, tenant_id: UUID, entry_id: str) -> LedgerEntry:
    statement = select(LedgerEntry).where(LedgerEntry.tenant_id == tenant_id)
    try:
        if entry_id.startswith("req_"):
            statement = statement.where(LedgerEntry.kind == "usage")
            wanted = parse_id("request", entry_id)
        else:
            statement = statement.where(LedgerEntry.kind.in_(ADJUSTMENT_KINDS))
            wanted = parse_id("adjustment", entry_id)
    except MalformedIdError:
        wanted = None
    entry = None
    if wanted is not None:
        entry = await session.scalar(statement.where(LedgerEntry.entry_id == wanted))
    if entry is None:
        raise NotFoundError("The tenant has no such line of account.", param="entry_id")
    return entry


async def _insert(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    *,
    kind: str,
    account: str,
    amount_pico: int,
    reason: str,
    entry_id: UUID | None = None,
    of: str | None = None,
) -> LedgerEntry:
    entry = LedgerEntry(
        entry_id=entry_id or uuid7(),
        kind=kind,
        seq=0,
        tenant_id=tenant_id,
        account=account,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        amount_pico=amount_pico,
        description=reason,
    )
    session.add(entry)
    await session.flush()
    await session.refresh(entry)
    record(
        session,
        actor,
        f"adjustment.{kind}",
        "adjustment",
        format_id("adjustment", entry.entry_id),
        tenant_id=tenant_id,
        detail={"reason": reason} | ({} if of is None else {"reverses": of}),
        after={"amount_usd": format_usd(amount_pico)},
    )
    return entry
