"""SQL of the checks of the fleet and of the books. Ages are by the database's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import Gateway, InvariantRun, Replica


@dataclass(frozen=True, slots=True)
class Seen:
    """A process, and how long ago it gave its last sign."""

    name: str
    age_s: float
    record: dict[str, Any]


async def gateways_seen(session: AsyncSession) -> list[Seen]:
    """Those of the last day, newest sign first."""
    age_s = func.extract("epoch", func.now() - Gateway.last_seen_at)
    statement = select(Gateway.gateway_id, age_s).where(age_s < 86_400).order_by(age_s).limit(100)
    return [Seen(row[0], float(row[1]), {}) for row in await session.execute(statement)]


async def replicas_seen(session: AsyncSession) -> list[Seen]:
    """Those of the last day, newest sign first, as the worker has seen them."""
    age_s = func.extract("epoch", func.now() - Replica.last_seen_at)
    statement = (
        select(Replica.replica_id, age_s, Replica.record)
        .where(age_s < 86_400)
        .order_by(age_s)
        .limit(100)
    )
    return [Seen(row[0], float(row[1]), row[2]) for row in await session.execute(statement)]


async def worker_age_s(session: AsyncSession) -> float | None:
    """Seconds since a worker last left a trace: a mirrored replica, or a check of the books; None: none ever."""
    mirrored = select(func.max(Replica.last_seen_at)).scalar_subquery()
    checked = (
        select(func.max(InvariantRun.checked_at))
        .where(InvariantRun.checked_by == "worker")
        .scalar_subquery()
    )
    newest = func.greatest(mirrored, checked)
    age_s = await session.scalar(select(func.extract("epoch", func.now() - newest)))
    return None if age_s is None else float(age_s)


_STUCK = text("""
select count(*), coalesce(max(extract(epoch from now() - lease_until)), 0), min(id::text)
from requests where state = 'reserved' and lease_until < now() - make_interval(secs => :grace_s)
""")


async def stuck_leases(session: AsyncSession, grace_s: float) -> tuple[int, float, str | None]:
    """Reservations that nobody settled: how many, the oldest's age in seconds since its lease ended, one's id."""
    row = (await session.execute(_STUCK, {"grace_s": grace_s})).one()
    return int(row[0]), float(row[1]), row[2]
