"""Rollouts as people handle them: made, changed, started, held, ended. What goes on by itself is `driver.py`'s.

All functions work in the caller's transaction and commit nothing. What a change needs, it looks at while it
holds the rollout's row: of two admins at once one is first, and the other is told what is there now.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Select, func
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import Deployment, Rollout
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.evals import service as evals
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import queries as registry
from loraplex_platform.registry.errors import RolloutActiveError
from loraplex_platform.rollouts import queries
from loraplex_platform.rollouts.gates import GateSettings
from loraplex_platform.rollouts.queries import Side
from loraplex_platform.rollouts.records import ACTIVE, EventKind, State, name_of
from loraplex_platform.rollouts.schemas import (
    NewRollout,
    RolloutChange,
)
from loraplex_platform.rollouts.transitions import (
    end,
    facts_of,
    is_approved_by_hand,
    lock_deployment,
    note,
    settings_of,
)
from loraplex_platform.tenancy import queries as tenancy

# What a revision is made of, by its name in `changes`.
_PARTS: Final = {
    "base_model": "base_model_id",
    "adapter": "adapter_digest",
    "engine_build": "engine_build_id",
    "price_book": "price_book_id",
}


class RolloutStateError(ConflictError):
    """It is not in a state in which this can be done; the message says in which it is, and what can be."""

    code = "rollout_state"


# ---------------------------------------------------------------------------- looked up


async def get(
    session: AsyncSession, tenant_id: UUID | None, rollout_id: str, *, for_update: bool = False
) -> Rollout:
    """A rollout of the owner's (None: the platform's).

    Raises:
        NotFoundError: there is none.
    """
    wanted = _parse("rollout", rollout_id)
    rollout = None
    if wanted is not None:
        rollout = await queries.find(session, tenant_id, wanted, for_update=for_update)
    if rollout is None:
        raise NotFoundError("No such rollout.", param="rollout_id")
    return rollout


async def of_deployment(
    session: AsyncSession, tenant_id: UUID | None, deployment: str
) -> Select[Rollout]:
    """The rollouts of a live deployment of the owner's.

    Raises:
        NotFoundError: there is none of that name or id.
    """
    found = await _get_deployment(session, tenant_id, deployment)
    return queries.rollouts_of(tenant_id).where(Rollout.deployment_id == found.id)


# ---------------------------------------------------------------------------- made and changed


async def create(
    session: AsyncSession, actor: Actor, tenant_id: UUID | None, wanted: NewRollout
) -> Rollout:
    """A draft. Nothing is sent anywhere before it is started.

    Raises:
        NotFoundError: no such deployment, revision, suite or version of it.
        InvalidRequestError: the two revisions are one; or a suite's tenant is missing.
        ConflictError: the canary's adapter version is retired.
    """
    deployment = await _get_deployment(session, tenant_id, wanted.deployment)
    stable = await _get_side(
        session, deployment, wanted.stable, "stable", default=deployment.current_revision_id
    )
    canary = await _get_side(session, deployment, wanted.canary, "canary")
    settings = await _with_suites(session, tenant_id, wanted.gate)
    rollout = Rollout(
        id=uuid7(),
        tenant_id=tenant_id,
        deployment_id=deployment.id,
        stable_revision_id=stable.revision.id,
        canary_revision_id=canary.revision.id,
        state="draft",
        steps=[step.model_dump() for step in wanted.steps],
        sticky_by=wanted.sticky_by,
        salt=secrets.token_bytes(16),
        created_by=name_of(actor),
    )
    _describe(rollout, stable, canary, settings, wanted.promotion)
    session.add(rollout)
    await session.flush()
    await session.refresh(rollout)
    await note(
        session,
        rollout,
        actor,
        "created",
        f"{deployment.public_name}: revision {stable.revision.number} to {canary.revision.number}, which changes"
        f" {', '.join(rollout.changes) or 'nothing'}",
        {"changes": rollout.changes, "warnings": rollout.gate["warnings"]},
    )
    for warning in rollout.gate["warnings"]:
        await note(session, rollout, actor, "warning", warning)
    return rollout


async def change(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID | None,
    rollout_id: str,
    wanted: RolloutChange,
    version: int | None,
) -> Rollout:
    """Change a draft.

    Raises:
        NotFoundError: there is none, or no such revision or suite.
        RolloutStateError: it is no draft any more.
        VersionConflictError: it has changed since `version`.
    """
    rollout = await get(session, tenant_id, rollout_id, for_update=True)
    named = (await queries.names_of(session, [rollout]))[rollout.id]
    before = _shown(rollout, named.stable_number, named.canary_number)
    changes = wanted.model_dump(exclude_none=True)
    if wanted.gate is not None:
        settings = await _with_suites(session, tenant_id, wanted.gate)
        changes["gate"] = settings.model_dump()
    else:
        settings = settings_of(rollout)
    check_version(version, rollout.row_version, changes, before)
    _check_state(rollout, ("draft",), "change")
    deployment = await session.get_one(Deployment, rollout.deployment_id)
    stable = await _get_side(
        session, deployment, wanted.stable, "stable", default=rollout.stable_revision_id
    )
    canary = await _get_side(
        session, deployment, wanted.canary, "canary", default=rollout.canary_revision_id
    )
    if wanted.steps is not None:
        rollout.steps = [step.model_dump() for step in wanted.steps]
    if wanted.sticky_by is not None:
        rollout.sticky_by = wanted.sticky_by
    rollout.stable_revision_id = stable.revision.id
    rollout.canary_revision_id = canary.revision.id
    promotion = "approval" if is_approved_by_hand(rollout) else "automatic"
    _describe(rollout, stable, canary, settings, wanted.promotion or promotion)
    after = _shown(rollout, stable.revision.number, canary.revision.number)
    changed = [field for field in before if before[field] != after[field]]
    if changed:
        rollout.row_version += 1
        await note(
            session,
            rollout,
            actor,
            "changed",
            f"changed: {', '.join(changed)}",
            {"warnings": rollout.gate["warnings"]},
            before={field: before[field] for field in changed},
            after={field: after[field] for field in changed},
        )
    return rollout


# ---------------------------------------------------------------------------- started and ended


async def start(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID | None,
    rollout_id: str,
    version: int | None,
) -> Rollout:
    """Begin: the worker has the canary judged and loaded, then begins the first step.

    Raises:
        NotFoundError: there is none.
        RolloutStateError: it is no draft, or what answers now is not its stable revision.
        RolloutActiveError: another one of the deployment is under way.
        VersionConflictError: it has changed since `version`.
    """
    rollout, deployment = await _lock(session, tenant_id, rollout_id)
    _check_version(rollout, version, "evaluating")
    _check_state(rollout, ("draft",), "start")
    if deployment.archived_at is not None:
        raise RolloutStateError("Its deployment is archived; make one of a live deployment.")
    if deployment.current_revision_id != rollout.stable_revision_id:
        current = await queries.find_side(
            session, deployment.id, revision_id=deployment.current_revision_id
        )
        number = "another one" if current is None else f"revision {current.revision.number}"
        raise RolloutStateError(
            f"{deployment.public_name} answers with {number} now, which is not this rollout's stable revision: "
            "change `stable` of the draft, or make a new one.",
            param="stable",
        )
    for field, revision_id in (
        ("stable", rollout.stable_revision_id),
        ("canary", rollout.canary_revision_id),
    ):
        side = await queries.find_side(session, deployment.id, revision_id=revision_id)
        if side is not None:
            _check_not_retired(side, field)
    other = await registry.find_active_rollout(session, deployment.id)
    if other is not None:
        raise _active(deployment, other)
    before = facts_of(rollout)
    rollout.state = "evaluating"
    rollout.started_at = func.now()
    rollout.looked_at = None
    rollout.row_version += 1
    try:
        async with session.begin_nested():
            await session.flush()
    except IntegrityError as error:
        if "uq_rollouts_active" not in str(error.orig):
            raise
        # Whoever came by another way than this function's lock; the index has the last word.
        raise RolloutActiveError(deployment.public_name, "another one", "started now") from None
    suites = [name for name, _ in settings_of(rollout).suites if name == "offline"]
    await note(
        session,
        rollout,
        actor,
        "started",
        "started: the canary is evaluated and loaded first"
        if suites
        else "started: the canary is loaded first",
        before=before,
    )
    return rollout


async def pause(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID | None,
    rollout_id: str,
    version: int | None,
    *,
    is_paused: bool,
) -> Rollout:
    """Let it go no step further, or on again. While it is paused failing gates still abort it.

    Raises:
        NotFoundError: there is none.
        RolloutStateError: it is not under way, or is (not) paused already.
        VersionConflictError: it has changed since `version`.
    """
    rollout = await get(session, tenant_id, rollout_id, for_update=True)
    _check_version(rollout, version, rollout.state, is_paused=is_paused)
    _check_state(rollout, ACTIVE, "pause" if is_paused else "resume")
    if rollout.is_paused == is_paused:
        raise RolloutStateError(f"It is {'paused' if is_paused else 'going on'} already.")
    before = facts_of(rollout)
    rollout.is_paused = is_paused
    rollout.row_version += 1
    kind: EventKind = "paused" if is_paused else "resumed"
    message = "goes no step further; failing gates still abort it" if is_paused else "goes on"
    await note(session, rollout, actor, kind, message, before=before)
    return rollout


async def promote(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID | None,
    rollout_id: str,
    reason: str,
    version: int | None,
) -> Rollout:
    """Have the canary answer everything now, whatever steps are left and gates say.

    Raises:
        NotFoundError: there is none.
        RolloutStateError: it is not under way.
        VersionConflictError: it has changed since `version`.
    """
    rollout, _ = await _lock(session, tenant_id, rollout_id)
    _check_version(rollout, version, "promoted")
    _check_state(rollout, ACTIVE, "promote")
    left = len(rollout.steps) - rollout.step - (rollout.state != "evaluating")
    detail = {"state": rollout.state, "step": rollout.step, "steps_left": left}
    await end(session, rollout, actor, "promoted", reason or "promoted by hand", detail)
    return rollout


async def abort(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID | None,
    rollout_id: str,
    reason: str,
    version: int | None,
) -> Rollout:
    """End it with the stable revision answering everything, from the next request on.

    Raises:
        NotFoundError: there is none.
        RolloutStateError: it has ended.
        VersionConflictError: it has changed since `version`.
    """
    rollout = await get(session, tenant_id, rollout_id, for_update=True)
    _check_version(rollout, version, "aborted")
    _check_state(rollout, ("draft", *ACTIVE), "abort")
    await end(
        session, rollout, actor, "aborted", reason or "aborted by hand", {"state": rollout.state}
    )
    return rollout


async def roll_back(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID | None,
    rollout_id: str,
    reason: str,
    version: int | None,
) -> Rollout:
    """Undo the deployment's last promotion: adapter, engine build, parameters and price book as before it.

    Raises:
        NotFoundError: there is none.
        RolloutStateError: it is not the last promoted one, or its canary does not answer any more.
        RolloutActiveError: another one of the deployment is under way.
        VersionConflictError: it has changed since `version`.
    """
    rollout, deployment = await _lock(session, tenant_id, rollout_id)
    _check_version(rollout, version, "rolled_back")
    _check_state(rollout, ("promoted",), "roll back")
    if deployment.archived_at is not None:
        raise RolloutStateError("Its deployment is archived: nothing answers any more.")
    other = await registry.find_active_rollout(session, deployment.id)
    if other is not None:
        raise _active(deployment, other)
    last = await queries.last_promoted(session, deployment.id)
    if last != rollout.id:
        assert last is not None  # noqa: S101 # this one was promoted
        raise RolloutStateError(
            f"{format_id('rollout', last)} was promoted after it: only the last one can be rolled back."
        )
    if deployment.current_revision_id != rollout.canary_revision_id:
        raise RolloutStateError(
            f"{deployment.public_name} was pointed elsewhere since: deploy the revision that you want."
        )
    stable = await queries.find_side(session, deployment.id, revision_id=rollout.stable_revision_id)
    assert stable is not None  # noqa: S101 # revisions are never deleted while a rollout names them
    _check_not_retired(stable, "stable")
    await end(session, rollout, actor, "rolled_back", reason or "rolled back by hand")
    return rollout


# ---------------------------------------------------------------------------- insides


@dataclass(frozen=True, slots=True)
class _Difference:
    changes: list[str]
    warnings: list[str]


def _difference(stable: Side, canary: Side, gate: GateSettings) -> _Difference:
    one, two = stable.revision, canary.revision
    changes = [name for name, field in _PARTS.items() if getattr(one, field) != getattr(two, field)]
    for name in ("system_prompt", "sampling"):
        if (one.params.get(name) or None) != (two.params.get(name) or None):
            changes.append(name)
    warnings = []
    if len(changes) > 1:
        warnings.append(
            f"It changes {len(changes)} things at once ({', '.join(changes)}): where it does worse, nobody can "
            "say which of them it was. Roll them out one after another."
        )
    if not changes:
        warnings.append(
            "The two revisions have the same content: this compares a thing with itself."
        )
    dtypes = [
        side.build.facts.get("dtype") if side.build is not None else None
        for side in (stable, canary)
    ]
    if None not in dtypes and dtypes[0] != dtypes[1]:
        warnings.append(f"The engine builds compute in {dtypes[0]} and {dtypes[1]}.")
    if not gate.gates("canary"):
        warnings.append("No gate is asked: it goes on by time alone, whatever the canary does.")
    return _Difference(changes, warnings)


def _describe(
    rollout: Rollout, stable: Side, canary: Side, settings: GateSettings, promotion: str
) -> None:
    """What follows from the two revisions and the settings."""
    if stable.revision.id == canary.revision.id:
        raise InvalidRequestError(
            f"canary: it is revision {canary.revision.number}, as stable is: make a revision of what is to be "
            "tried first.",
            param="canary",
        )
    if stable.base_model.tokenizer_sha256 != canary.base_model.tokenizer_sha256:
        raise InvalidRequestError(
            f"canary: its base model has another tokenizer ({canary.base_model.tokenizer_sha256[:12]}, stable "
            f"{stable.base_model.tokenizer_sha256[:12]}): prompts of the one mean nothing to the other.",
            param="canary",
        )
    found = _difference(stable, canary, settings)
    rollout.changes = found.changes
    rollout.gate = {
        "gates": settings.model_dump(),
        "promotion": promotion,
        "warnings": found.warnings,
    }


async def _with_suites(
    session: AsyncSession, tenant_id: UUID | None, settings: GateSettings
) -> GateSettings:
    """The settings with each suite's version fixed: what is asked is decided now."""
    fixed: dict[str, Any] = {}
    for name, wanted in settings.suites:
        field = f"gate.{name}"
        payer = tenant_id
        if tenant_id is None:
            payer = None if wanted.tenant_id is None else _parse("tenant", wanted.tenant_id)
            if payer is None or await tenancy.find_tenant(session, payer) is None:
                raise InvalidRequestError(
                    f"{field}.tenant_id: name the tenant in whose books the run is (it is not billed): the "
                    "platform has none of its own.",
                    param=f"{field}.tenant_id",
                )
        elif wanted.tenant_id not in (None, format_id("tenant", tenant_id)):
            raise InvalidRequestError(
                f"{field}.tenant_id: leave it out: it is the tenant of the deployment.",
                param=f"{field}.tenant_id",
            )
        try:
            suite = await evals.get_suite(session, payer, wanted.suite_id, with_platforms=True)
            version = await evals.get_version(session, suite, wanted.suite_version)
        except NotFoundError as error:
            raise NotFoundError(error.message, param=f"{field}.{error.param}") from None
        assert payer is not None  # noqa: S101 # decided above
        fixed[name] = wanted.model_copy(
            update={"suite_version": version.number, "tenant_id": format_id("tenant", payer)}
        )
    return settings.model_copy(update=fixed)


async def _get_deployment(session: AsyncSession, tenant_id: UUID | None, wanted: str) -> Deployment:
    deployment_id = _parse("deployment", wanted)
    found = await queries.find_deployment(
        session, tenant_id, name=wanted, deployment_id=deployment_id
    )
    if found is None or found.current_revision_id is None:
        raise NotFoundError("No such deployment.", param="deployment")
    return found


async def _get_side(
    session: AsyncSession,
    deployment: Deployment,
    wanted: str | int | None,
    field: str,
    *,
    default: UUID | None = None,
) -> Side:
    if wanted is None:
        side = await queries.find_side(session, deployment.id, revision_id=default)
    elif isinstance(wanted, int) or wanted.isdecimal():
        number = int(wanted)
        side = None
        if number < 2**31:
            side = await queries.find_side(session, deployment.id, number=number)
    else:
        revision_id = _parse("deployment_revision", wanted)
        side = None
        if revision_id is not None:
            side = await queries.find_side(session, deployment.id, revision_id=revision_id)
    if side is None:
        raise NotFoundError(
            f"No such revision of {deployment.public_name}: pass its number or id.", param=field
        )
    _check_not_retired(side, field)
    return side


def _check_not_retired(side: Side, field: str) -> None:
    if side.version_status == "retired":
        raise ConflictError(
            f"{field}: the adapter version of revision {side.revision.number} is retired; choose another revision.",
            param=field,
        )


async def _lock(
    session: AsyncSession, tenant_id: UUID | None, rollout_id: str
) -> tuple[Rollout, Deployment]:
    """The rollout and its deployment, both ours until the transaction ends; the deployment first."""
    seen = await get(session, tenant_id, rollout_id)
    deployment = await session.get_one(Deployment, seen.deployment_id)
    await lock_deployment(session, deployment)
    await session.refresh(deployment)
    return await get(session, tenant_id, rollout_id, for_update=True), deployment


def _check_version(
    rollout: Rollout, version: int | None, state: str, *, is_paused: bool | None = None
) -> None:
    """Whoever acts on what has changed since they read it is told what is there now."""
    wanted: dict[str, Any] = {"state": state}
    if is_paused is not None:
        wanted["is_paused"] = is_paused
    # All of what may have changed by itself: the step, the split.
    wanted |= {"step": None, "weight_bp": None}
    check_version(version, rollout.row_version, wanted, facts_of(rollout))


def _check_state(rollout: Rollout, allowed: tuple[State, ...], verb: str) -> None:
    if rollout.state in allowed:
        return
    why = f": {rollout.end_reason}" if rollout.end_reason else ""
    remedies: Mapping[str, str] = {
        "draft": "start it first, or abort it",
        "evaluating": "abort or promote it",
        "shadow": "abort or promote it",
        "canary": "abort or promote it",
        "promoted": "roll it back",
        "aborted": "make a new one",
        "rolled_back": "make a new one",
    }
    raise RolloutStateError(
        f"It is {rollout.state.replace('_', ' ')}{why}, so nobody can {verb} it; {remedies[rollout.state]}.",
        param="state",
    )


def _active(deployment: Deployment, other: Rollout) -> RolloutActiveError:
    return RolloutActiveError(deployment.public_name, format_id("rollout", other.id), other.state)


def _shown(rollout: Rollout, stable: int, canary: int) -> dict[str, Any]:
    """What of a draft can be changed."""
    return {
        "stable": stable,
        "canary": canary,
        "steps": rollout.steps,
        "sticky_by": rollout.sticky_by,
        "promotion": rollout.gate["promotion"],
        "gate": rollout.gate["gates"],
    }


def _parse(kind: str, text: str) -> UUID | None:
    try:
        return parse_id(kind, text)
    except MalformedIdError:
        return None
