"""The request log: metadata of every request, never its text."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import DeploymentRevision, Request, Rollout
from loraplex_platform.ids import uuid7_floor
from loraplex_platform.metering.records import MAX_CLOCK_SKEW_S, Arm


async def requests_of(
    session: AsyncSession,
    tenant_id: UUID | None,
    *,
    revision_id: UUID | None = None,
    rollout_id: UUID | None = None,
    arm: Arm | None = None,
) -> Select[Request]:
    """A tenant's requests; None: everybody's. Besides, only what has these; None: whatever it has."""
    statement = select(Request)
    if revision_id is not None:
        revision = await session.get(DeploymentRevision, revision_id)
        statement = statement.where(Request.revision_id == revision_id)
        if revision is not None:
            # There is no index by revision: its tenant and its age say which rows are looked at.
            statement = statement.where(Request.id >= _first_id(revision.created_at))
            tenant_id = tenant_id or revision.tenant_id
    if rollout_id is not None:
        statement = statement.where(Request.rollout_id == rollout_id)
        rollout = await session.get(Rollout, rollout_id)
        if rollout is not None:  # months before it are not looked into
            statement = statement.where(Request.id >= _first_id(rollout.created_at))
    if arm is not None:
        statement = statement.where(Request.arm == arm)
    return statement if tenant_id is None else statement.where(Request.tenant_id == tenant_id)


def _first_id(at: datetime) -> UUID:
    """A request's id has its maker's clock in it."""
    return uuid7_floor(int((at.timestamp() - MAX_CLOCK_SKEW_S) * 1000))
