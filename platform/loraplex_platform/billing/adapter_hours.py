"""Adapter-hours: what it costs that a tenant's adapter version is deployed.

Billable from the moment a deployment points at the version until none of the tenant's does any more;
under two names at once it counts once. A tenant's day, in its time zone, is one line of the ledger for
each version and each price book that was in force on it (whatever book a revision names): whole seconds x
price / 3600, in pico-USD, rounded there once, half to even. A line is made when its day is over, under an id that is made of what
it is for: booked again it is found, and a history that came late is corrected by further lines.

Lines are days already, so that reports and invoices read them as they are: there is no rollup of them.
The rules are functions of the database (`loraplex_adapter_hours_of`, `loraplex_book_adapter_hours`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import date
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy import text

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import UnavailableError

log = structlog.get_logger(__name__)

# Of reports that group by model: no deployment can be called so.
MODEL_NAME: Final = "(adapter hours)"

# A deployment that was changed just before midnight may commit after its day was booked, and a worker
# may have been away: so many days that were booked once are looked at again.
_AGAIN_DAYS = 2
_MAX_DAYS_A_TRANSACTION = 100  # so that it is short

# Rows as those of `rollups.USAGE_SOURCE`, and the seconds. Needs the same parameters.
HOURS_SOURCE: Final = f"""
    select l.tenant_id, l.day, cast(null as uuid) as project_id, cast(null as uuid) as key_id,
        cast(null as uuid) as deployment_id, '{MODEL_NAME}' as model, l.adapter_version_id,
        l.price_book_id, 0 as requests, 0 as billed_requests, 0 as prompt_tokens,
        0 as cached_tokens, 0 as completion_tokens, 0 as absorbed_tokens, l.amount_pico,
        0 as absorbed_pico, l.seconds as adapter_seconds
    from ledger l
    where l.kind = 'hours' and l.day between :first_day and :last_day
        and (cast(:tenant as uuid) is null or l.tenant_id = cast(:tenant as uuid))
"""  # noqa: S608 # the name is ours

# Days that are over, of tenants that ever had an adapter deployed; none while no book has a price for it.
_DUE = text("""
select e.tenant_id, cast(due.day as date) as day
from (select tenant_id, min(at) as first_at from deployment_events group by tenant_id) e
join tenants t on t.id = e.tenant_id
left join adapter_hours_progress p on p.tenant_id = e.tenant_id
cross join lateral generate_series(
    cast(greatest(cast(e.first_at at time zone t.billing_tz as date), p.booked_to - cast(:again as integer))
        as timestamp),
    cast(cast(now() at time zone t.billing_tz as date) - 1 as timestamp), interval '1 day'
) as due (day)
where exists (select from price_items i join price_books b on b.id = i.price_book_id
    where i.price_class = 'adapter_hour' and b.status <> 'draft')
order by e.tenant_id, due.day
""")
_BOOK = text("select loraplex_book_adapter_hours(:tenant, :day)")
_NOTE = text("""
insert into adapter_hours_progress (tenant_id, booked_to) values (:tenant, :booked_to)
on conflict (tenant_id) do update set booked_to = greatest(
    adapter_hours_progress.booked_to, excluded.booked_to)
""")


@dataclass(frozen=True, slots=True)
class AdapterHoursWorker:
    """Books days that are over, each tenant's in a transaction of its own."""

    sessions: SessionFactory

    async def run_once(self) -> int:
        """How many lines that took; 0: there was nothing new.

        What went wrong with one tenant is raised once the others have had their turn.
        """
        async with self.sessions() as session:
            rows = (await session.execute(_DUE, {"again": _AGAIN_DAYS})).all()
        due: defaultdict[UUID, list[date]] = defaultdict(list)
        for row in rows:
            due[row.tenant_id].append(row.day)
        booked = 0
        failure: Exception | None = None
        for tenant_id, days in due.items():
            try:
                for start in range(0, len(days), _MAX_DAYS_A_TRANSACTION):
                    some = days[start : start + _MAX_DAYS_A_TRANSACTION]
                    booked += await self._book(tenant_id, some)
            except UnavailableError:
                raise
            except Exception as error:  # noqa: BLE001 - the others' days are booked all the same
                log.warning("adapter_hours_failed", tenant_id=str(tenant_id), reason=str(error))
                failure = error
        if booked:
            log.info("adapter_hours_booked", lines=booked)
        if failure is not None:
            raise failure
        return booked

    async def _book(self, tenant_id: UUID, days: list[date]) -> int:
        booked = 0
        async with self.sessions.begin() as session:
            for day in days:
                booked += int(await session.scalar(_BOOK, {"tenant": tenant_id, "day": day}) or 0)
            to = date.fromordinal(days[-1].toordinal() + 1)
            await session.execute(_NOTE, {"tenant": tenant_id, "booked_to": to})
        return booked
