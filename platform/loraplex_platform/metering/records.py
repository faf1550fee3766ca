"""What gateways, probes and the sweeper hand to the metering service."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from loraplex_platform.metering.policy import AttemptUsage, RequestKind

Arm = Literal["stable", "canary", "shadow", "pinned", "named"]

GATEWAY_LOST = "gateway_lost"  # the error code of what the sweeper closed
# A 4xx that the rollout's other side would not have given: its revision's doing, and not the client's.
REFUSED_BY_REVISION = "refused_by_revision"
LEASE_S = 20.0  # gateways renew every 5 s
# A request's id has its maker's clock in it, all other times are the database's. Reports and partitions
# go by the id, so one that is further off than this is not admitted: it would be in no report.
MAX_CLOCK_SKEW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A request about to be dispatched. Its project and adapter are the key's and the version's own:
    the database looks them up where it admits the request.

    Attributes:
        key_id: the tenant's key; None exactly for a probe or a shadow.
        owner: the process that will settle it (gateway id).
        est_completion_tokens: max_tokens of all choices together.
        num_choices: completions of the prompt; they share what a quota still pays evenly.
        min_completion_tokens: of each choice; a quota that cannot pay as many refuses the request.
        has_stop_strings: whether the gateway looks for stop strings in the text.
        rollout_id, rollout_step, arm, subject_key: whose side of which step it is on; arms "pinned" and "named" have none
            of the others.
        shadow_of: the tenant's own request after which a shadow or a scoring is made.
        sampling: parameters as resolved, numbers only: what would be needed to compute it again.
    """

    request_id: UUID
    tenant_id: UUID
    key_id: UUID | None
    endpoint: str
    model: str
    owner: str
    est_prompt_tokens: int
    est_completion_tokens: int
    num_choices: int = 1
    min_completion_tokens: int = 1
    is_stream: bool = False
    has_stop_strings: bool = False
    deployment_id: UUID | None = None
    revision_id: UUID | None = None
    adapter_version_id: UUID | None = None
    replica_id: str | None = None
    attempt: int = 1
    kind: RequestKind = "user"
    lease_s: float = LEASE_S
    rollout_id: UUID | None = None
    rollout_step: int | None = None
    arm: Arm | None = None
    subject_key: int | None = None
    shadow_of: UUID | None = None
    sampling: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request of a rollout's side that was answered before anything was reserved for it: what that side
    could not do, of which its gates are to know. Fields as in `Reservation`.

    Attributes:
        error_code: `REFUSED_BY_REVISION` or what the client was told.
    """

    request_id: UUID
    tenant_id: UUID
    key_id: UUID | None
    endpoint: str
    model: str
    owner: str
    is_stream: bool
    deployment_id: UUID
    revision_id: UUID
    adapter_version_id: UUID | None
    rollout_id: UUID
    rollout_step: int
    arm: Arm
    subject_key: int
    http_status: int
    error_code: str
    kind: RequestKind = "user"
    shadow_of: UUID | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation that stands. Renew before `lease_until`, settle with `lease_token`.

    Attributes:
        max_tokens: of each choice: what was asked for, or less where a quota pays no more.
    """

    lease_token: int
    lease_until: datetime
    price_book_id: UUID
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """A sign of life: the tokens that have reached us so far are the checkpoint."""

    request_id: UUID
    lease_token: int
    checkpoint_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a request ended. `earlier` are attempts that failed before the one in `usage`.

    Attributes:
        fingerprint: of the replica that answered.
        itl_mean_ms, itl_p95_ms: time between two tokens of the first choice; None: it had fewer than two.
    """

    request_id: UUID
    lease_token: int
    usage: AttemptUsage
    settled_by: str
    kind: RequestKind = "user"
    earlier: tuple[AttemptUsage, ...] = ()
    finish_reason: str | None = None
    http_status: int | None = None
    error_code: str | None = None
    ttft_ms: int | None = None
    e2e_ms: int | None = None
    fingerprint: str | None = None
    itl_mean_ms: float | None = None
    itl_p95_ms: float | None = None


@dataclass(frozen=True, slots=True)
class SettleResult:
    """`applied` False: another holder of a newer lease settled or voided it; nothing was written."""

    applied: bool
    amount_pico: int = 0
