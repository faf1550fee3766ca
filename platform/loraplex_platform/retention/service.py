"""Retention: requests by dropping months, the rest by deleting what is old.

| what | default | least | how |
|---|---|---|---|
| requests, their attempts and landed journal entries | 400 days | 62 | a month at a time, `DROP TABLE` |
| audit log | for ever | 3650 days | from the oldest on, in pieces; the chain goes on from where it was cut |
| kept checks of the books | 90 days | 7 | delete; the newest stays |
| webhook deliveries | 30 days | 1 | delete, once they are done |
| sessions | 30 days past their end | 1 | delete |

A month of requests goes only as a whole, the oldest first, and only when nothing in it is reserved and
every day of it is rolled up. Ledger, invoices, rollups and price books are never deleted: no code here,
and no right of the runtime role, can. Revisions, rollouts and the histories of deployments, aliases and pins
have no rule: they stay as long as their tenant, for the answers that name them. The leasts are kept by the database (migration 0008), so that
nobody who serves can go below them. What has its own clock is purged by its owner: outbox messages a day after
delivery (outbox/relay.py), refusals and ended quota windows (quotas/queries.py), and replies kept for an
Idempotency-Key exactly when the protocol says (control/housekeeping.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.retention import queries

log = structlog.get_logger(__name__)

RuleName = Literal[
    "requests",
    "audit_log",
    "invariant_runs",
    "webhook_deliveries",
    "sessions",
    "alerts",
]
NAMES: Final[tuple[RuleName, ...]] = get_args(RuleName)
# The database has them too (ck_retention_settings_least); these make the message.
LEAST_DAYS: Final[dict[RuleName, int]] = {
    "requests": 62,
    "audit_log": 3650,
    "invariant_runs": 7,
    "webhook_deliveries": 1,
    "sessions": 1,
    "alerts": 7,
}
BATCH = 10_000


@dataclass(frozen=True, slots=True)
class Due:
    """What a rule would delete now.

    Attributes:
        keep_days: None: for ever.
        rows: how many rows are due.
        months: of requests, the months that would be dropped, as YYYY-MM.
        blocked: months that are due but may not go yet, with the reason.
    """

    name: RuleName
    keep_days: int | None
    least_days: int
    rows: int
    months: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()


async def look(session: AsyncSession) -> list[Due]:
    """What every rule would delete now; changes nothing."""
    keep = await queries.keep_days(session, NAMES)
    months = await queries.months_due(session)
    due = []
    for name in NAMES:
        if name == "requests":
            going = [month for month in months if month.blocked_by is None]
            due.append(
                Due(
                    name,
                    keep[name],
                    LEAST_DAYS[name],
                    sum(month.requests for month in going),
                    tuple(f"{month.month:%Y-%m}" for month in going),
                    tuple(
                        f"{month.month:%Y-%m}: {month.blocked_by}"
                        for month in months
                        if month.blocked_by is not None
                    ),
                )
            )
            continue
        rows = await queries.count_due(session, name)
        due.append(Due(name, keep[name], LEAST_DAYS[name], rows))
    return due


async def set_rule(
    session: AsyncSession, actor: Actor, name: RuleName, keep_days: int | None
) -> None:
    """Keep something for another time; None: for ever.

    Raises:
        InvalidRequestError: shorter than is allowed.
    """
    least = LEAST_DAYS[name]
    if keep_days is not None and keep_days < least:
        raise InvalidRequestError(
            f"keep_days: {name} must be kept for at least {least} days; use {least} or more, or null "
            "for ever.",
            param="keep_days",
        )
    before = (await queries.keep_days(session, [name]))[name]
    await queries.set_keep_days(session, name, keep_days)
    record(
        session,
        actor,
        "retention.update",
        "retention_rule",
        name,
        before={"keep_days": before},
        after={"keep_days": keep_days},
    )


async def clean(sessions: SessionFactory, actor: Actor) -> dict[RuleName, int]:
    """Delete everything that is due, in short transactions; rows (of requests: months) by rule.

    Safe to run from several places at once. What is done is audited, if anything was.
    """
    done: dict[RuleName, int] = {}
    for name in NAMES:
        count = 0
        while True:
            async with sessions.begin() as session:
                batch = await _clean_batch(session, name)
                if batch:
                    record(
                        session,
                        actor,
                        "retention.apply",
                        "retention_rule",
                        name,
                        detail={"months" if name == "requests" else "rows": batch},
                    )
            count += batch
            # A batch of these is a month, or a piece of one chain.
            is_last = batch == 0 if name in ("requests", "audit_log") else batch < BATCH
            if is_last:
                break
        if count:
            log.info("retention_applied", rule=name, count=count)
            done[name] = count
    return done


async def _clean_batch(session: AsyncSession, name: RuleName) -> int:
    if name == "requests":
        return await queries.drop_month(session)
    if name == "audit_log":
        return await queries.drop_audit(session, BATCH)
    return await queries.delete_due(session, name, BATCH)
