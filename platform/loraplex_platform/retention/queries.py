"""SQL of retention. What the runtime role may not do itself, functions of the database do for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

from sqlalchemy import CursorResult, func, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import RetentionSetting

# Which rows are due, by rule; `:days` old. The ctid is what a batch is deleted by.
_DUE: Final = {
    "audit_log": ("audit_log", "at < now() - make_interval(days => :days)"),
    "invariant_runs": (
        "invariant_runs",
        "checked_at < now() - make_interval(days => :days)"
        " and id <> (select id from invariant_runs order by id desc limit 1)",
    ),
    "webhook_deliveries": (
        "webhook_deliveries",
        "created_at < now() - make_interval(days => :days) and status <> 'pending'",
    ),
    "sessions": ("sessions", "expires_at < now() - make_interval(days => :days)"),
    "alerts": ("alerts", "at < now() - make_interval(days => :days)"),
}


@dataclass(frozen=True, slots=True)
class MonthDue:
    """A month of requests that is older than what is kept."""

    month: date
    blocked_by: str | None
    requests: int


async def keep_days(session: AsyncSession, names: Sequence[str]) -> dict[str, int | None]:
    """How long each is kept; None: for ever."""
    statement = text(
        "select name, loraplex_keep_days(name) from unnest(cast(:names as text[])) as name"
    )
    rows = (await session.execute(statement, {"names": list(names)})).all()
    return {row[0]: row[1] for row in rows}


async def set_keep_days(session: AsyncSession, name: str, days: int | None) -> None:
    """Set, instead of the default."""
    statement = insert(RetentionSetting).values(name=name, keep_days=days)
    await session.execute(
        statement.on_conflict_do_update(
            index_elements=[RetentionSetting.name],
            set_={"keep_days": days, "updated_at": func.now()},
        )
    )


async def months_due(session: AsyncSession) -> list[MonthDue]:
    """Months of requests to drop, oldest first, up to the first that may not go yet."""
    statement = text(
        "select month, blocked_by, requests from loraplex_months_to_drop(null) order by month"
    )
    return [MonthDue(*row) for row in (await session.execute(statement)).all()]


async def drop_month(session: AsyncSession) -> int:
    """Drop the oldest of them; 0 if there is none, or others are in its way."""
    return int((await session.execute(text("select loraplex_drop_month()"))).scalar_one())


async def drop_audit(session: AsyncSession, most: int) -> int:
    """Cut one audit chain where retention says, at most so many rows; how many. 0: none is due."""
    statement = text("select loraplex_drop_audit(:most)")
    return int((await session.execute(statement, {"most": most})).scalar_one())


async def count_due(session: AsyncSession, name: str) -> int:
    """How many rows a rule would delete."""
    days = (await keep_days(session, [name]))[name]
    if days is None:
        return 0
    table, condition = _DUE[name]
    statement = text(f"select count(*) from {table} where {condition}")  # noqa: S608 # our own
    return int((await session.execute(statement, {"days": days})).scalar_one())


async def delete_due(session: AsyncSession, name: str, limit: int) -> int:
    """Delete what is due, at most `limit` rows; how many."""
    days = (await keep_days(session, [name]))[name]
    if days is None:
        return 0
    table, condition = _DUE[name]
    statement = text(
        f"delete from {table} where ctid = any(array(select ctid from {table}"  # noqa: S608 # our own
        f" where {condition} limit :limit))"
    )
    result = await session.execute(statement, {"days": days, "limit": limit})
    assert isinstance(result, CursorResult)  # noqa: S101 # what a DELETE returns
    return result.rowcount
