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

from loraplex_platform.audit.service import Actor, name_of, record
from loraplex_platform.db import Deployment, DeploymentRevision, Rollout
from loraplex_platform.db.base import Json
from loraplex_platform.ids import format_id
from loraplex_platform.registry import queries as registry
from loraplex_platform.rollouts import queries
from loraplex_platform.rollouts.gates import GateSettings
from loraplex_platform.rollouts.records import EventKind, Step, clipped

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


async def lock_deployment(session: AsyncSession, deployment: Deployment) -> Deployment:
    """Keep everybody else from pointing it elsewhere until the transaction ends; the row as it is now.

    By its name as those do who set it, and by its row as an alias does that moves all its followers.
    """
    owner = "platform" if deployment.tenant_id is None else str(deployment.tenant_id)
    await registry.lock_name(session, "deployment", owner, deployment.public_name)
    # Not its key: requests that name it are written meanwhile.
    return await session.get_one(
        Deployment, deployment.id, populate_existing=True, with_for_update={"key_share": True}
    )


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

    Promoted, the deployment stands for the canary from then on; rolled back, for the stable revision. What it
    follows is no lie afterwards: an alias that names another version it follows no more.
    """
    before = facts_of(rollout)
    left = None
    if state == "promoted":
        left = await _point_at(session, rollout, rollout.canary_revision_id)
    elif state == "rolled_back":
        left = await _point_at(session, rollout, rollout.stable_revision_id)
    rollout.state = state
    rollout.ended_at = func.now()
    rollout.end_reason = clipped(reason)
    rollout.is_paused = False
    rollout.weight_bp = rollout.shadow_bp = rollout.score_bp = 0
    rollout.row_version += 1
    after = None
    if left is not None:
        before["follow"] = left
        after = facts_of(rollout) | {"follow": None}
    await note(session, rollout, actor, state, reason, detail, before=before, after=after)
    if left is not None:
        message = (
            f"the deployment follows the alias {left['alias']} no more, which names another version; have the alias "
            "name what answers, and set the deployment to follow it again, if it is to"
        )
        await note(session, rollout, actor, "warning", message, {"unfollowed": left})


async def _point_at(session: AsyncSession, rollout: Rollout, revision_id: UUID) -> Json | None:
    """The alias that the deployment followed until now, if that names another version."""
    deployment = await session.get_one(Deployment, rollout.deployment_id)
    revision = await session.get_one(DeploymentRevision, revision_id)
    values: dict[str, Any] = {"current_revision_id": revision_id}
    left: Json | None = None
    adapter_id, name = deployment.followed_adapter_id, deployment.followed_alias
    if adapter_id is not None and name is not None and deployment.tenant_id is not None:
        # One that is moved at this moment comes after us, for it waits for the deployment's row.
        alias = await registry.find_alias(session, deployment.tenant_id, adapter_id, name)
        if alias is None or alias.version_id != revision.adapter_version_id:
            left = {"adapter_id": format_id("adapter", adapter_id), "alias": name}
            values |= {"followed_adapter_id": None, "followed_alias": None}
    await registry.point_at(session, rollout.deployment_id, **values)
    return left
