"""Daily rollups: what every report and invoice reads instead of a month's requests.

A settle marks its bucket (tenant, day in the tenant's zone) in `rollup_dirty`, with its request; here
whole buckets are made again from the books, never incremented, so that doing it twice changes nothing.
A bucket and its marks are always of one snapshot: what is rolled up and the requests of the marks make
the whole. So readers add these to those (`USAGE_SOURCE`), in one snapshot, and what they say is never
stale; of a bucket with a mark that names no request they compute the whole day.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from uuid import UUID

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction

log = structlog.get_logger(__name__)

# A bucket that took long to make is left alone for so many times as long: what a tenant does all day
# must not keep a core busy with counting it.
REST_FACTOR = 20.0
# A round ends after this; what is left waits for the next one.
ROUND_S = 30.0

# Rows of usage_daily as they must be now. Needs :first_day and :last_day, which bound `day`, and
# :tenant, a tenant or null; row-level security narrows both halves further.
USAGE_SOURCE = """
dirty as materialized (
    select distinct tenant_id, day from rollup_dirty
    where day between :first_day and :last_day and entry_id is null
        and (cast(:tenant as uuid) is null or tenant_id = cast(:tenant as uuid))
), source as (
    select u.tenant_id, u.day, u.project_id, u.key_id, u.deployment_id, u.model,
        u.adapter_version_id, u.price_book_id, u.requests, u.billed_requests, u.prompt_tokens,
        u.cached_tokens, u.completion_tokens, u.absorbed_tokens, u.amount_pico, u.absorbed_pico
    from usage_daily u
    where u.day between :first_day and :last_day
        and (cast(:tenant as uuid) is null or u.tenant_id = cast(:tenant as uuid))
        and not exists (
            select from dirty where dirty.tenant_id = u.tenant_id and dirty.day = u.day)
    union all
    select m.* from loraplex_usage_of_marks(cast(:tenant as uuid), :first_day, :last_day) m
    where not exists (select from dirty where dirty.tenant_id = m.tenant_id and dirty.day = m.day)
    union all
    select dirty.tenant_id, dirty.day, live.* from dirty,
        lateral loraplex_usage_of(dirty.tenant_id, dirty.day) as live
)
"""

_MARKED = text("""
select tenant_id, day from rollup_dirty group by tenant_id, day order by day, tenant_id
""")
_CLAIM = text("select pg_try_advisory_xact_lock(hashtextextended(:bucket, 7155))")
_UNMARK = text("delete from rollup_dirty where tenant_id = :tenant and day = :day")
_ROLL_UP = text("select loraplex_roll_up(:tenant, :day)")


async def roll_up(session: AsyncSession, tenant_id: UUID, day: date) -> bool:
    """Make a bucket again and take its marks away: the first thing in the caller's transaction.

    False: somebody else is at it. Marks that come meanwhile stay, and what they stand for is not in
    what is made here: that takes one snapshot, which may cost the transaction (40001) when another
    worker has just been at the bucket.
    """
    await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
    if not await session.scalar(_CLAIM, {"bucket": f"{tenant_id}/{day}"}):
        return False
    parameters = {"tenant": tenant_id, "day": day}
    await session.execute(_UNMARK, parameters)
    if not await session.scalar(_ROLL_UP, parameters):
        log.warning("rollup_kept", tenant_id=str(tenant_id), day=str(day))
    return True


@dataclass(slots=True)
class RollupWorker:
    """Rolls up whatever is marked, each bucket in a transaction of its own."""

    sessions: SessionFactory
    clock_s: Callable[[], float] = time.monotonic
    _not_before_s: dict[tuple[UUID, date], float] = field(default_factory=dict)

    async def run_once(self) -> int:
        """How many buckets were made; 0: there is nothing to do."""
        async with self.sessions() as session:
            marked = [(row.tenant_id, row.day) for row in await session.execute(_MARKED)]
        now_s = self.clock_s()
        self._not_before_s = {
            bucket: at_s for bucket, at_s in self._not_before_s.items() if at_s > now_s
        }
        count = 0
        for tenant_id, day in marked:
            if (tenant_id, day) in self._not_before_s:
                continue
            began_s = self.clock_s()
            if began_s > now_s + ROUND_S:
                break
            count += await run_transaction(
                self.sessions, partial(roll_up, tenant_id=tenant_id, day=day)
            )
            took_s = self.clock_s() - began_s
            self._not_before_s[tenant_id, day] = self.clock_s() + REST_FACTOR * took_s
        return count
