"""How a rollout goes from one state to the next: the row, its event and its audit record in one transaction.

Whoever calls holds the rollout's row (`FOR UPDATE`) and commits. Webhooks and alerts follow from the event, by
a trigger. So after a kill -9 either all of a transition is there or nothing, and its next one follows from the
row alone.

Where the deployment itself is pointed elsewhere, the caller also holds the deployment's name
(`lock_deployment`), and took it before the row: one order for everybody.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import Deployment, Rollout
from loraplex_platform.db.base import Json
from loraplex_platform.ids import format_id
from loraplex_platform.registry import queries as registry
from loraplex_platform.rollouts import queries
from loraplex_platform.rollouts.gates import GateSettings
from loraplex_platform.rollouts.records import EventKind, Step, clipped, name_of

# Of audit records: what an event is called there.
_VERBS: Final = {
    "created": "create",
    "changed": "update",
    "started": "start",
    "step": "step",
    "paused": "pause",
    "resumed": "resume",
    "promoted": "promote",
    "aborted": "abort",
    "rolled_back": "rollback",
}


async def lock_deployment(session: AsyncSession, deployment: Deployment) -> None:
    """Keep everybody else from pointing it elsewhere until the transaction ends."""
    owner = "platform" if deployment.tenant_id is None else str(deployment.tenant_id)
    await registry.lock_name(session, "deployment", owner, deployment.public_name)


def settings_of(rollout: Rollout) -> GateSettings:
    """Its gates, as its row keeps them."""
    return GateSettings.model_validate(rollout.gate["gates"])


def is_approved_by_hand(rollout: Rollout) -> bool:
    """Whether somebody has to promote it after its last step."""
    return bool(rollout.gate["promotion"] == "approval")


def steps_of(rollout: Rollout) -> list[Step]:
    """Its steps, as its row keeps them."""
    return [Step.from_json(step) for step in rollout.steps]


def facts_of(rollout: Rollout) -> dict[str, Any]:
    """What the audit log compares before and after."""
    return {
        "state": rollout.state,
        "step": rollout.step,
        "is_paused": rollout.is_paused,
        "weight_bp": rollout.weight_bp,
        "shadow_bp": rollout.shadow_bp,
    }


async def note(
    session: AsyncSession,
    rollout: Rollout,
    actor: Actor,
    kind: EventKind,
    message: str,
    detail: Json | None = None,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    """Add the event, and the audit record of what is a change."""
    # The row first: what is told of the event is read from it.
    await session.flush()
    await session.refresh(rollout)
    await queries.add_event(
        session,
        rollout,
        kind=kind,
        actor=name_of(actor),
        message=clipped(message),
        detail=detail or {},
    )
    if kind in _VERBS:
        record(
            session,
            actor,
            f"rollout.{_VERBS[kind]}",
            "rollout",
            format_id("rollout", rollout.id),
            tenant_id=rollout.tenant_id,
            detail={"message": clipped(message)},
            before=before,
            after=facts_of(rollout) if after is None else after,
        )


async def enter_step(session: AsyncSession, rollout: Rollout, actor: Actor, number: int) -> None:
    """Begin a step: from the commit on, the next request on any gateway is of it."""
    before = facts_of(rollout)
    steps = steps_of(rollout)
    step = steps[number]
    rollout.state, rollout.step = step.kind, number
    rollout.step_began_at = func.now()
    rollout.weight_bp = step.share_bp if step.kind == "canary" else 0
    rollout.shadow_bp = step.share_bp if step.kind == "shadow" else 0
    rollout.score_bp = settings_of(rollout).score_bp
    rollout.row_version += 1
    message = f"step {number + 1} of {len(steps)}: {step.words}, for at least {step.hold_s} s"
    await note(
        session,
        rollout,
        actor,
        "step",
        message,
        {"step": number, "kind": step.kind, "share_bp": step.share_bp, "hold_s": step.hold_s},
        before=before,
    )


async def end(
    session: AsyncSession,
    rollout: Rollout,
    actor: Actor,
    state: EventKind,
    reason: str,
    detail: Json | None = None,
) -> None:
    """Promoted, aborted or rolled back: the split is over with the commit, streams in flight go on.

    Promoted, the deployment stands for the canary from then on; rolled back, for the stable revision.
    """
    before = facts_of(rollout)
    if state == "promoted":
        await _point_at(session, rollout, rollout.canary_revision_id)
    elif state == "rolled_back":
        await _point_at(session, rollout, rollout.stable_revision_id)
    rollout.state = state
    rollout.ended_at = func.now()
    rollout.end_reason = clipped(reason)
    rollout.is_paused = False
    rollout.weight_bp = rollout.shadow_bp = rollout.score_bp = 0
    rollout.row_version += 1
    await note(session, rollout, actor, state, reason, detail, before=before)


async def _point_at(session: AsyncSession, rollout: Rollout, revision_id: UUID) -> None:
    await registry.point_at(session, rollout.deployment_id, current_revision_id=revision_id)
