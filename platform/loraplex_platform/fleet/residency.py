"""Residency: adapters that every replica of their base keeps in memory, as durable desired state.

Here it is changed, and the replicas that are there are told. The worker (worker/residency.py) makes every replica
so that comes later: started again, or cut off when the others were told.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import AdapterVersion, ResidentAdapter
from loraplex_platform.errors import ConflictError, NotFoundError
from loraplex_platform.fleet import residency_queries as queries
from loraplex_platform.fleet.engines import (
    UNREACHABLE,
    EngineFleet,
    PinOutcome,
)
from loraplex_platform.ids import MalformedIdError, format_id, parse_id


async def put(
    session: AsyncSession, actor: Actor, fleet: EngineFleet, version_id: str, reason: str
) -> tuple[ResidentAdapter, list[PinOutcome]]:
    """Keep a version in every replica's memory, those of now and those to come.

    Without a replica that answers it is desired all the same: it holds from when one does.

    Raises:
        NotFoundError: there is no such version.
        ConflictError: it is retired; or all replicas that answer refuse, and then it is not desired.
    """
    version = await _get_version(session, version_id)
    if version.status != "ready":
        raise ConflictError("version_id: this version is retired; unretire it first.")
    before = await queries.find(session, version.id)
    old_reason = None if before is None else before.reason
    resident = await queries.put(session, version, reason, _name_of(actor))
    outcomes = await fleet.set_pin(version.digest, is_wanted=True)
    answers = [outcome for outcome in outcomes if outcome.refusal != UNREACHABLE]
    if answers and all(outcome.pinned is None for outcome in answers):
        raise ConflictError("; ".join(f"{item.replica_id}: {item.message}" for item in answers))
    if old_reason != reason:
        _record(session, actor, "resident_adapter.put", resident, old_reason, reason)
    return resident, outcomes


async def remove(
    session: AsyncSession, actor: Actor, fleet: EngineFleet, version_id: str
) -> list[PinOutcome]:
    """Let every replica evict it like any other.

    Raises:
        NotFoundError: it is not desired.
    """
    resident = None
    try:
        resident = await queries.find(session, parse_id("adapter_version", version_id))
    except MalformedIdError:
        resident = None
    if resident is None:
        raise NotFoundError("This version is not kept in memory.")
    _record(session, actor, "resident_adapter.delete", resident, resident.reason, None)
    digest = resident.digest
    await session.delete(resident)
    await session.flush()
    if await queries.is_desired(session, digest):
        return []  # another tenant's version has the same content
    return await fleet.set_pin(digest, is_wanted=False)


async def _get_version(session: AsyncSession, version_id: str) -> AdapterVersion:
    version = None
    try:
        version = await queries.find_version(
            session, parse_id("adapter_version", version_id), to_use=True
        )
    except MalformedIdError:
        version = None
    if version is None:
        raise NotFoundError("No such adapter version.")
    return version


def _name_of(actor: Actor) -> str:
    return actor.kind if actor.id is None else f"{actor.kind} {actor.id}"


def _record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    resident: ResidentAdapter,
    before: str | None,
    after: str | None,
) -> None:
    record(
        session,
        actor,
        action,
        "adapter_version",
        format_id("adapter_version", resident.version_id),
        # The operator's word on the operator's memory, in the tenant's log: it is about its adapter.
        tenant_id=resident.tenant_id,
        detail={"digest": resident.digest},
        before=None if before is None else {"reason": before},
        after=None if after is None else {"reason": after},
    )
