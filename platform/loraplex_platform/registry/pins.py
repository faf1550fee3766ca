"""Pins: a tenant's word that a deployment stays at a revision until a time, whatever is rolled out.

A pin is of one tenant and one deployment, its own or the platform's (the base model). Gateways follow it from
the next request on, and stop by the clock when it is over. Nobody finds that out by surprise: a week and a
day before its end, and at its end, there is a line in the log, an audit row, a metric and an alert.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

import structlog
from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import SYSTEM, Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import Deployment, Pin
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import format_id
from loraplex_platform.outbox.service import enqueue
from loraplex_platform.registry import deployments, pin_queries, queries, revisions
from loraplex_platform.registry.pin_queries import PinFacts
from loraplex_platform.registry.pin_schemas import NewPin

log = structlog.get_logger(__name__)

WARN_BEFORE: Final = (timedelta(days=7), timedelta(days=1))
_BATCH = 100

Told = Literal["expiring", "expired"]


async def put(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    name: str,
    new: NewPin,
    if_match: int | None,
) -> PinFacts:
    """Keep the tenant's requests for `name` at a revision, from the next one on.

    Raises:
        NotFoundError: no such deployment or revision.
        InvalidRequestError: `until` is over already.
        ConflictError: the revision's version is retired; the pin has changed since it was read.
    """
    deployment = await deployments.get_reachable(session, tenant_id, name)
    await queries.lock_name(session, "pin", str(tenant_id), str(deployment.id))
    revision = await revisions.get(session, deployment, new.revision_id, param="revision_id")
    if revision.adapter_version_id is not None:
        version = await queries.find_version(
            session, tenant_id, revision.adapter_version_id, to_use=True
        )
        if version is None or version.status != "ready":
            raise ConflictError(
                "revision_id: this revision's adapter version is retired; unretire it first.",
                param="revision_id",
            )
    until = None if new.until is None else datetime.fromtimestamp(new.until, UTC)
    if until is not None and until <= datetime.now(UTC):
        raise InvalidRequestError(
            "until: it is over already; give a time to come, or null: for good.", param="until"
        )
    pin = await pin_queries.find(session, tenant_id, deployment.id, for_update=True)
    before = None if pin is None else _facts(pin)
    changes = {
        "revision_id": format_id("deployment_revision", revision.id),
        "until": new.until,
        "reason": new.reason,
    }
    check_version(if_match, 0 if pin is None else pin.row_version, changes, before or _NOTHING)
    if pin is None:
        pin = Pin(
            tenant_id=tenant_id,
            deployment_id=deployment.id,
            revision_id=revision.id,
            until=until,
            reason=new.reason,
            created_by=_name_of(actor),
        )
        session.add(pin)
    elif before != changes or pin.expired_at is not None:
        pin.revision_id, pin.until, pin.reason = revision.id, until, new.reason
        pin.created_by, pin.created_at = _name_of(actor), func.now()
        pin.warned_at = pin.expired_at = None
        pin.row_version += 1
    await session.flush()
    await session.refresh(pin)
    if before != changes:
        _record(session, actor, "pin.put", pin, deployment, before=before, after=_facts(pin))
    [facts] = await pin_queries.facts_of(session, [pin])
    return facts


async def get(session: AsyncSession, tenant_id: UUID, name: str) -> PinFacts:
    """The tenant's pin of what it reaches by `name`.

    Raises:
        NotFoundError: no such deployment, or it has no pin.
    """
    deployment = await deployments.get_reachable(session, tenant_id, name)
    pin = await pin_queries.find(session, tenant_id, deployment.id)
    if pin is None:
        raise NotFoundError(f"{name} has no pin.")
    [facts] = await pin_queries.facts_of(session, [pin])
    return facts


async def remove(
    session: AsyncSession, actor: Actor, tenant_id: UUID, name: str, if_match: int | None
) -> None:
    """Let the deployment's current revision answer again, from the next request on.

    Raises:
        NotFoundError: no such deployment, or it has no pin.
        ConflictError: the pin has changed since it was read.
    """
    deployment = await deployments.get_reachable(session, tenant_id, name)
    pin = await pin_queries.find(session, tenant_id, deployment.id, for_update=True)
    if pin is None:
        raise NotFoundError(f"{name} has no pin.")
    check_version(if_match, pin.row_version, {}, _facts(pin))
    _record(session, actor, "pin.delete", pin, deployment, before=_facts(pin), after=None)
    await pin_queries.remove(session, tenant_id, deployment.id)


class PinWatch:
    """Tells of pins that end. Any number may run: each pin is one's at a time.

    Args:
        on_told: called with "expiring" or "expired", once for each that was told of.
    """

    def __init__(
        self, sessions: SessionFactory, on_told: Callable[[Told], object] = lambda told: None
    ) -> None:
        self._sessions = sessions
        self._on_told = on_told

    async def run_once(self) -> list[Told]:
        """Warn of what ends soon and report what has ended, in one transaction."""
        told: list[Told] = []
        async with self._sessions.begin() as session:
            now = await session.scalar(func.now().select()) or datetime.now(UTC)
            pins = await pin_queries.claim_ending(session, max(WARN_BEFORE), _BATCH)
            for facts in await pin_queries.facts_of(session, pins):
                due = _due(facts.pin, now)
                if due is not None:
                    await _tell(session, facts, *due)
                    told.append(due[0])
        for what in told:
            self._on_told(what)
        return told


def _due(pin: Pin, now: datetime) -> tuple[Told, timedelta] | None:
    """What there is to tell of a pin, and how long before its end that is due. A warning for which it was too
    late when the pin was made is none.
    """
    assert pin.until is not None  # noqa: S101 # of those that end
    if pin.until <= now:
        return "expired", timedelta(0)
    passed = [before for before in WARN_BEFORE if pin.until - before <= now]
    if not passed:
        return None
    due_at = pin.until - min(passed)
    if due_at <= pin.created_at or (pin.warned_at is not None and pin.warned_at >= due_at):
        return None
    return "expiring", min(passed)


async def _tell(session: AsyncSession, facts: PinFacts, what: Told, before: timedelta) -> None:
    pin, deployment = facts.pin, facts.deployment
    assert pin.until is not None  # noqa: S101 # of those that end
    if what == "expired":
        pin.expired_at = func.now()
    else:
        pin.warned_at = func.now()
    until = int(pin.until.timestamp())
    payload: dict[str, Any] = {
        "kind": f"pin_{what}",
        "tenant_id": str(pin.tenant_id),
        "deployment": deployment.public_name,
        "deployment_id": str(deployment.id),
        "pinned_revision_id": str(pin.revision_id),
        "current_revision_id": str(deployment.current_revision_id),
        "until": until,
        "reason": pin.reason,
    }
    # A pin is known by when it was made: of another one of the same deployment it is told again.
    made = int(pin.created_at.timestamp() * 1e6)
    name = f"pin_{what}:{pin.tenant_id.hex}:{deployment.id.hex}:{made}:{before.days}"
    await enqueue(session, "alert", name, payload)
    _record(session, SYSTEM, f"pin.{what}", pin, deployment, before=None, after=None)
    say = log.error if what == "expired" else log.warning
    say(
        f"pin_{what}",
        tenant_id=str(pin.tenant_id),
        deployment=deployment.public_name,
        revision=facts.revision.number,
        until=until,
        reason=pin.reason,
    )


_NOTHING: Final = {"revision_id": None, "until": None, "reason": None}


def _facts(pin: Pin) -> dict[str, Any]:
    return {
        "revision_id": format_id("deployment_revision", pin.revision_id),
        "until": None if pin.until is None else int(pin.until.timestamp()),
        "reason": pin.reason,
    }


def _name_of(actor: Actor) -> str:
    return actor.kind if actor.id is None else f"{actor.kind} {actor.id}"


def _record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    pin: Pin,
    deployment: Deployment,
    *,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> None:
    record(
        session,
        actor,
        action,
        "pin",
        format_id("deployment", deployment.id),
        tenant_id=pin.tenant_id,
        detail={"deployment": deployment.public_name, **_facts(pin)},
        before=before,
        after=after,
    )
