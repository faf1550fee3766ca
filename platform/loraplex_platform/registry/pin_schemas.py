"""Pins on the wire."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import ConfigDict, Field

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds, UnixTime
from loraplex_platform.ids import format_id
from loraplex_platform.registry.pin_queries import PinFacts

PinProblem = Literal["version_retired", "build_not_running"]


class NewPin(Body):
    """Which revision stays, how long, and why."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "revision_id": "rev_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "until": 1798761600,
                    "reason": "audited until the end of the year",
                }
            ]
        },
    )

    revision_id: str = Field(description="A revision of this deployment.")
    until: UnixTime | None = Field(
        default=None, description="Unix seconds, in the future; null: for good."
    )
    reason: Annotated[CleanText, Field(min_length=1, max_length=500)]


class PinResource(Resource):
    """A tenant's requests for a deployment stay at a revision. Its id is the deployment's."""

    object: Literal["pin"] = "pin"
    id: str
    tenant_id: str
    deployment: str
    is_platforms: bool = Field(description="The deployment is the platform's: the base model.")
    revision_id: str
    revision: int
    version_id: str | None
    digest: str | None
    engine_build_id: str | None
    until: UnixSeconds | None
    state: Literal["live", "expired"]
    problems: list[PinProblem] = Field(
        description="Why requests fail although the pin is live: nothing runs what it names."
    )
    reason: str
    created_by: str
    created_at: UnixSeconds
    warned_at: UnixSeconds | None


def show_pin(facts: PinFacts, running: Collection[str]) -> PinResource:
    """The pin as the API shows it.

    Args:
        facts: of the pin.
        running: fingerprints of the builds that replicas run now.
    """
    pin, revision = facts.pin, facts.revision
    is_over = pin.expired_at is not None or (
        pin.until is not None and pin.until <= datetime.now(UTC)
    )
    problems: list[PinProblem] = []
    if facts.version is not None and facts.version.status != "ready":
        problems.append("version_retired")
    if facts.build is not None and facts.build.fingerprint not in running:
        problems.append("build_not_running")
    return PinResource(
        id=format_id("deployment", pin.deployment_id),
        tenant_id=format_id("tenant", pin.tenant_id),
        deployment=facts.deployment.public_name,
        is_platforms=facts.deployment.tenant_id is None,
        revision_id=format_id("deployment_revision", revision.id),
        revision=revision.number,
        version_id=_id("adapter_version", revision.adapter_version_id),
        digest=revision.adapter_digest,
        engine_build_id=_id("engine_build", revision.engine_build_id),
        until=pin.until,
        state="expired" if is_over else "live",
        problems=problems,
        reason=pin.reason,
        created_by=pin.created_by,
        created_at=pin.created_at,
        warned_at=pin.warned_at,
    )


def _id(kind: str, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)
