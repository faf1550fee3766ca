"""What the fleet does right now, added up."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_platform.billing.money import format_usd
from loraplex_platform.fleet.engines import ReplicaView
from loraplex_platform.fleet.queries import Counts
from loraplex_platform.fleet.schemas import OverviewResource


def overview(views: Sequence[ReplicaView], counts: Counts) -> OverviewResource:
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
        recent_requests=counts.recent,
        recent_failed=counts.recent_failed,
    )
