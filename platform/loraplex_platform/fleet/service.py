"""What the fleet does right now, added up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.billing.money import format_usd
from loraplex_platform.fleet import queries
from loraplex_platform.fleet.engines import ReplicaView
from loraplex_platform.fleet.queries import Counts, Recent
from loraplex_platform.fleet.schemas import OverviewResource

COUNTED_PER_S = 50_000


class CountKeeper:
    """The counts of objects, kept for a while where they are many: everybody looks at them each second.

    Few are counted each time, so that what somebody has just made is there.
    """

    def __init__(
        self,
        counted_per_s: int = COUNTED_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counted_per_s = counted_per_s
        self._clock = clock
        self._counting = asyncio.Lock()
        self._counts: Counts | None = None
        self._until_s = 0.0  # by the clock
        self._day: date | None = None

    async def get(self, session: AsyncSession) -> Counts:
        """As they are, or were a second ago for each `counted_per_s` of them."""
        # One counts, and the others who look just then have its counts, where they are kept at all.
        async with self._counting:
            day = datetime.now(UTC).date()
            if self._counts is None or self._day != day or self._clock() >= self._until_s:
                counts = await queries.count_objects(session)
                num_counted = counts.tenants + counts.keys + counts.adapters + counts.entries_today
                keep_s = num_counted // self._counted_per_s
                self._counts, self._until_s, self._day = counts, self._clock() + keep_s, day
            return self._counts


def overview(views: Sequence[ReplicaView], counts: Counts, recent: Recent) -> OverviewResource:
    """Sums over the replicas that answered; KV use is over all their blocks."""
    stats = [view.stats for view in views if view.stats is not None]
    blocks = sum(s.kv_blocks_total for s in stats)
    used = blocks - sum(s.kv_blocks_free for s in stats)
    resident = {digest for s in stats for digest in s.adapters_resident}
    return OverviewResource(
        requests_per_s=round(sum(view.rates.requests_per_s for view in views), 3),
        tokens_per_s=round(sum(view.rates.generation_tokens_per_s for view in views), 3),
        running=sum(s.num_running for s in stats),
        waiting=sum(s.num_waiting for s in stats),
        kv_usage=round(used / blocks, 6) if blocks else 0.0,
        resident_adapters=len(resident),
        tenants=counts.tenants,
        keys=counts.keys,
        adapters=counts.adapters,
        deployments=counts.deployments,
        cost_today_usd=format_usd(counts.cost_today_pico),
        recent_requests=recent.began,
        recent_failed=recent.failed,
    )
