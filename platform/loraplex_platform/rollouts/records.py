"""What the rollouts' service, worker and routes hand each other: states, steps, kinds of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from loraplex_platform.audit.service import Actor

State = Literal["draft", "evaluating", "shadow", "canary", "promoted", "aborted", "rolled_back"]
# At most one of these per deployment: the unique index `uq_rollouts_active` says so.
ACTIVE: Final[tuple[State, ...]] = ("evaluating", "shadow", "canary")
# In these the canary is asked something, so there is something to look at.
STEPPING: Final[tuple[State, ...]] = ("shadow", "canary")

StepKind = Literal["shadow", "canary"]
EventKind = Literal[
    "created",
    "changed",
    "started",
    "step",
    "hold",
    "verdict",
    "eval",
    "paused",
    "resumed",
    "warning",
    "promoted",
    "aborted",
    "rolled_back",
]
Promotion = Literal["automatic", "approval"]

MAX_STEPS: Final = 20
# At 10000 nobody is left to compare with: what gives the canary everything is its promotion.
MAX_WEIGHT_BP: Final = 9900
MAX_MESSAGE: Final = 1000  # characters, as the tables have it


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a rollout, as its row keeps it.

    Attributes:
        share_bp: of a shadow step: of the requests that are asked again of the canary; of a canary step:
            of the subjects whom the canary answers. Basis points.
        hold_s: at least so long, whatever the gates say.
    """

    kind: StepKind
    share_bp: int
    hold_s: int

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """From the rollout's row."""
        share = value["share_bp"] if value["kind"] == "shadow" else value["weight_bp"]
        return cls(value["kind"], share, value["hold_s"])

    @property
    def words(self) -> str:
        """For events and people."""
        share = f"{self.share_bp / 100:g} %"
        if self.kind == "shadow":
            return f"shadow of {share} of the requests"
        return f"canary at {share} of the subjects"


def name_of(actor: Actor) -> str:
    """Who did it, for events: `user usr_...`, `admin_key`, `system`."""
    return actor.kind if actor.id is None else f"{actor.kind} {actor.id}"


def clipped(message: str) -> str:
    """As much of it as a column holds."""
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
