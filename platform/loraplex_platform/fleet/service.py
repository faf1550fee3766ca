"""What the fleet does right now, added up; and what the operator has it keep."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.billing.money import format_usd
from loraplex_platform.errors import ConflictError, EngineUnavailableError
from loraplex_platform.fleet.engines import UNREACHABLE, EngineFleet, ReplicaView
from loraplex_platform.fleet.queries import Counts
from loraplex_platform.fleet.schemas import OverviewResource, PinOutcomeResource, PinResource


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
    )


async def set_pin(
    session: AsyncSession, actor: Actor, fleet: EngineFleet, digest: str, *, is_wanted: bool
) -> PinResource:
    """Pin an adapter on every replica, or take that back. Done where at least one replica did it.

    Raises:
        EngineUnavailableError: there is no replica, or none answers.
        ConflictError: all that answer refuse.
    """
    outcomes = await fleet.set_pin(digest, is_wanted=is_wanted)
    if not any(outcome.pinned is not None for outcome in outcomes):
        reasons = "; ".join(f"{outcome.replica_id}: {outcome.message}" for outcome in outcomes)
        if all(outcome.refusal == UNREACHABLE for outcome in outcomes):
            raise EngineUnavailableError(reasons or "no engine replica is known")
        raise ConflictError(reasons)
    action = "adapter_digest.pin" if is_wanted else "adapter_digest.unpin"
    # By digest, since no tenant's adapter is meant: whoever uses this content finds it in memory.
    record(session, actor, action, "adapter_digest", None, detail={"digest": digest})
    return PinResource(
        digest=digest,
        replicas=[
            PinOutcomeResource(
                replica_id=outcome.replica_id,
                pinned=outcome.pinned,
                refusal=outcome.refusal,
                message=outcome.message,
            )
            for outcome in outcomes
        ],
    )
