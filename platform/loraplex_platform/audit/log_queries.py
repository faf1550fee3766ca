"""SQL of the audit log: searched, never changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import ColumnElement, Select, collate, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import AuditHead, AuditLog
from loraplex_platform.db.audit import NO_TENANT
from loraplex_platform.ids import uuid7_floor

# An id is made by the process that writes, its time by the database: clocks may differ by this much.
_SKEW_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries. `action` may end with `.` or `*` and then names all that begin so."""

    tenant_ids: Collection[UUID] | None = None  # None: everybody's, and the platform's own
    action: str | None = None
    actor_id: str | None = None
    object_kind: str | None = None
    object_id: str | None = None
    request_id: str | None = None
    start: datetime | None = None  # inclusive
    end: datetime | None = None  # exclusive


def _does(action: str) -> tuple[ColumnElement[bool], ...]:
    """An action, or all that begin so, compared as the index of them is ordered.

    A range and no LIKE: under a member's policy that would read all of their tenant's log.
    """
    by_bytes = collate(AuditLog.action, "C")
    if not action.endswith(("*", ".")):
        return (by_bytes == action,)
    prefix = action.rstrip("*")
    # The last character there is; no action has it.
    return (by_bytes >= prefix, by_bytes < f"{prefix}\U0010ffff")


def entries(wanted: AuditFilter) -> Select[AuditLog]:
    """The entries of a search."""
    statement = select(AuditLog)
    if wanted.tenant_ids is not None:
        statement = statement.where(AuditLog.tenant_id.in_(wanted.tenant_ids))
    if wanted.action is not None:
        statement = statement.where(*_does(wanted.action))
    for column, value in (
        (AuditLog.actor_id, wanted.actor_id),
        (AuditLog.object_kind, wanted.object_kind),
        (AuditLog.object_id, wanted.object_id),
        (AuditLog.request_id, wanted.request_id),
    ):
        if value is not None:
            statement = statement.where(column == value)
    # By time, and by id as well, which the indexes are ordered by: made a moment before its row.
    if wanted.start is not None:
        statement = statement.where(
            AuditLog.at >= wanted.start,
            AuditLog.id >= uuid7_floor(max(0, int(wanted.start.timestamp() * 1000) - _SKEW_MS)),
        )
    if wanted.end is not None:
        statement = statement.where(
            AuditLog.at < wanted.end,
            AuditLog.id < uuid7_floor(int(wanted.end.timestamp() * 1000) + _SKEW_MS),
        )
    return statement


def chains(tenant_ids: Collection[UUID] | None) -> Select[AuditHead]:
    """The heads of the chains of these tenants; None: of all, the platform's with them."""
    statement = select(AuditHead)
    if tenant_ids is not None:
        statement = statement.where(AuditHead.chain.in_(tenant_ids))
    return statement


async def find_link(session: AsyncSession, chain: UUID, seq: int) -> bytes | None:
    """The hash of a row of a chain."""
    statement = select(AuditLog.hash).where(AuditLog.chain == chain, AuditLog.seq == seq)
    return await session.scalar(statement)


def chain_of(tenant_id: UUID | None) -> UUID:
    """The chain of a tenant, or the platform's."""
    return tenant_id or NO_TENANT
