"""Which revision answers a request, and what else its rollout wants of it.

A pin beats a rollout. A rollout in its canary steps gives each subject one side (`rollouts.assignment`), the
same on every gateway; in its shadow steps the stable revision answers everybody. A key that may not call
the canary's adapter is outside of the rollout: the stable revision answers it and it counts for neither side,
for a side with requests that the other cannot have would bias the gates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from loraplex_platform.errors import ModelNotFoundError
from loraplex_platform.gateway.queries import ActiveRollout, ListedModel, ServedModel
from loraplex_platform.metering.records import Arm
from loraplex_platform.rollouts.assignment import NUM_BUCKETS, assign, subject_of
from loraplex_platform.tenancy.authentication import Authenticated

_DRAW_BITS: Final = 28


@dataclass(frozen=True, slots=True)
class Side:
    """Where a request stands in its deployment's rollout; of a pinned or named one only that is known."""

    arm: Arm
    rollout_id: UUID | None = None
    step: int | None = None
    subject_key: int | None = None


@dataclass(frozen=True, slots=True)
class Who:
    """What a request says of whom it is for. `messages`: role and text, read where they are needed."""

    user: str | None = None
    conversation_id: str | None = None
    messages: Iterable[tuple[str, str]] = ()


def may_call(caller: Authenticated, model: ServedModel | ListedModel) -> bool:
    """Whether the key is granted this model; one that is not does not exist for it."""
    if caller.grants is None:
        return True
    revision = model.revision if isinstance(model, ServedModel) else model
    return caller.grants.allows(
        deployment_id=model.deployment_id,
        base_model_id=revision.base_model_id,
        adapter_id=revision.adapter_id,
    )


def unknown_model(name: str) -> ModelNotFoundError:
    """The same words for what does not exist and for what is somebody else's."""
    return ModelNotFoundError(
        f"The model '{name[:128]}' does not exist or you do not have access to it.", param="model"
    )


def choose_revision(
    caller: Authenticated, model: ServedModel, who: Who
) -> tuple[ServedModel, Side | None]:
    """The model with the revision that answers, and its side; None: it is in no rollout.

    Args:
        model: as it was found, with its own revision.

    The canary's revision may have a fault: whoever prepares its answer hears of it, and its gates do then.
    """
    if model.is_pinned:
        return model, Side("pinned")
    rollout = model.rollout
    if rollout is None or rollout.state == "evaluating":
        return model, None
    if caller.grants is not None and not may_call(caller, model.answered_by(rollout.canary)):
        return model, None
    subject = subject_of(
        rollout.sticky_by,
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        user=who.user,
        conversation_id=who.conversation_id,
        messages=who.messages,
    )
    assignment = assign(rollout.salt, subject)
    is_canary = rollout.state == "canary" and assignment.is_canary(rollout.weight_bp)
    side = Side(
        "canary" if is_canary else "stable", rollout.id, rollout.step, assignment.subject_key
    )
    return (model.answered_by(rollout.canary) if is_canary else model), side


def is_shadowed(request_id: UUID, rollout: ActiveRollout) -> bool:
    """Whether the canary is to be asked the same once it is answered."""
    return rollout.state == "shadow" and _draw(request_id, 0) < rollout.shadow_bp


def is_scored(request_id: UUID, rollout: ActiveRollout) -> bool:
    """Whether the likelihood of its answer, and of its shadow's, is wanted: so both or neither are known."""
    return rollout.state != "evaluating" and _draw(request_id, 1) < rollout.score_bp


def _draw(request_id: UUID, number: int) -> int:
    """In 0..9999, of bits of the id that are random."""
    return (request_id.int >> (number * _DRAW_BITS) & ((1 << _DRAW_BITS) - 1)) % NUM_BUCKETS
