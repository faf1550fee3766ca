"""Limits for tests, set as the control API sets them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from loraplex_platform.audit.service import SYSTEM
from loraplex_platform.db import Limit, QuotaWindow
from loraplex_platform.db.session import Database
from loraplex_platform.ids import format_id, parse_id
from loraplex_platform.quotas import service
from loraplex_platform.quotas.schemas import LimitChanges, NewLimit
from sqlalchemy import select

from tests.support.metering import Customer

USD = 10**12


async def set_limit(
    db: Database,
    customer: Customer,
    metric: str,
    value: str,
    period: str | None = "day",
    *,
    scope_kind: str = "tenant",
    scope_id: str | None = None,
    **fields: Any,
) -> UUID:
    """A limit of the customer's tenant, or of its key, or of what is named."""
    ids = {
        "tenant": format_id("tenant", customer.tenant_id),
        "key": format_id("api_key", customer.key_id),
    }
    body = {
        "scope_kind": scope_kind,
        "scope_id": scope_id or ids.get(scope_kind),
        "metric": metric,
        "period": period,
        "value": value,
    }
    async with db.transaction() as session:
        made = await service.create_limit(
            session, SYSTEM, NewLimit.model_validate(body | fields), sessions=db.sessions
        )
    return made.limit.id


async def change_limit(db: Database, limit_id: UUID, **changes: Any) -> None:
    """As a PATCH does."""
    async with db.transaction() as session:
        await service.update_limit(
            session,
            SYSTEM,
            format_id("limit", limit_id),
            LimitChanges.model_validate(changes),
            None,
        )


async def remove_limit(db: Database, limit_id: UUID) -> None:
    """As a DELETE does."""
    async with db.transaction() as session:
        await service.delete_limit(session, SYSTEM, format_id("limit", limit_id), None)


async def use_of(db: Database, limit_id: UUID) -> tuple[int, int]:
    """What is committed and held of a quota in its period of now."""
    async with db.sessions() as session:
        counted = await service.get_limit(session, format_id("limit", limit_id))
    assert counted.use is not None
    return counted.use.committed, counted.use.held


async def all_limits(db: Database) -> list[Limit]:
    """Every limit."""
    async with db.sessions() as session:
        return list((await session.scalars(select(Limit))).all())


async def all_windows(db: Database) -> list[QuotaWindow]:
    """Every window."""
    async with db.sessions() as session:
        return list((await session.scalars(select(QuotaWindow))).all())


def limit_uuid(limit_id: str) -> UUID:
    """Of an id as the API shows it."""
    return parse_id("limit", limit_id)
