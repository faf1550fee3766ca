"""Residency and drift on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Row

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import ResidentAdapter
from loraplex_platform.fleet.drift import Drift, drift_of
from loraplex_platform.fleet.engines import PinOutcome, ReplicaView
from loraplex_platform.fleet.residency_queries import Desired, WantedAs, WantedBuild
from loraplex_platform.fleet.schemas import PinOutcomeResource
from loraplex_platform.ids import format_id


class NewResidency(Body):
    """Why it stays in memory."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"reason": "acme's launch"}]}
    )

    reason: Annotated[CleanText, Field(min_length=1, max_length=500)]


class ResidencyResource(Resource):
    """A version that every replica of its base keeps in memory. Its id is the version's."""

    object: Literal["resident_adapter"] = "resident_adapter"
    id: str
    tenant_id: str
    version_id: str
    adapter_name: str
    version: int
    digest: str
    reason: str
    created_by: str
    created_at: UnixSeconds


class ToldResidency(ResidencyResource):
    """What the replicas of now made of it; those of later are told by the worker."""

    replicas: list[PinOutcomeResource]


class ReleasedResidency(BaseModel):
    """What the replicas of now made of it being taken back."""

    object: Literal["resident_adapter"] = "resident_adapter"
    id: str
    replicas: list[PinOutcomeResource]


class MissingResource(BaseModel):
    """A desired adapter that is not in a replica's memory."""

    digest: str
    tenant_id: str
    version_id: str
    since: UnixSeconds = Field(description="Desired since then, or the replica's start if later.")
    is_pinned: bool = Field(description="The replica has been told.")
    reason: str | None = Field(description="The engine's; null: not asked yet, or loading.")


class WeightsResource(BaseModel):
    """Other weights than the platform's own deployment of the base names."""

    serves: str
    named: str


class ReplicaDriftResource(BaseModel):
    """How far a replica is from what is desired of it."""

    replica_id: str
    base_model: str
    fingerprint: str
    answers: bool = Field(description="false: it does not answer, and the rest is unknown.")
    desired: list[str]
    in_memory: list[str]
    missing: list[MissingResource]
    extra: list[str] = Field(description="Kept in memory, but not desired.")
    weights: WeightsResource | None = Field(description="null: they are as named, or not said.")


class WantingRevision(BaseModel):
    """What names a build."""

    tenant_id: str | None
    deployment: str
    revision_id: str
    wanted_as: WantedAs


class MissingBuildResource(BaseModel):
    """An engine build that something live names and no replica runs."""

    engine_build_id: str
    fingerprint: str
    base_model: str
    since: UnixSeconds = Field(description="When a replica last ran it, to the minute.")
    wanted_by: list[WantingRevision]


class DriftResource(BaseModel):
    """Where the fleet is not as it is desired."""

    object: Literal["fleet_drift"] = "fleet_drift"
    has_drift: bool
    replicas: list[ReplicaDriftResource]
    builds: list[MissingBuildResource]


def show_residency(resident: ResidentAdapter, name: Row[UUID, str, int]) -> ResidencyResource:
    """As the API shows it. `name`: (version id, adapter's name, number)."""
    version_id = format_id("adapter_version", resident.version_id)
    return ResidencyResource(
        id=version_id,
        tenant_id=format_id("tenant", resident.tenant_id),
        version_id=version_id,
        adapter_name=name[1],
        version=name[2],
        digest=resident.digest,
        reason=resident.reason,
        created_by=resident.created_by,
        created_at=resident.created_at,
    )


def show_outcomes(outcomes: Sequence[PinOutcome]) -> list[PinOutcomeResource]:
    """What the replicas answered, as the API shows it."""
    return [
        PinOutcomeResource(
            replica_id=outcome.replica_id,
            pinned=outcome.pinned,
            refusal=outcome.refusal,
            message=outcome.message,
        )
        for outcome in outcomes
    ]


def show_drift(
    views: Sequence[ReplicaView],
    desired: Sequence[Desired],
    wanted: Sequence[WantedBuild],
    running: Mapping[str, list[str]],
    base_revisions: Mapping[str, str],
) -> DriftResource:
    """The fleet beside what is desired of it."""
    named = {item.build.fingerprint for item in wanted}
    replicas = [_show_replica(view, desired, named, base_revisions) for view in views]
    builds: dict[UUID, MissingBuildResource] = {}
    for item in wanted:
        build = item.build
        if build.fingerprint in running:
            continue
        shown = builds.setdefault(
            build.id,
            MissingBuildResource(
                engine_build_id=format_id("engine_build", build.id),
                fingerprint=build.fingerprint,
                base_model=build.base_model,
                since=build.last_seen_at,
                wanted_by=[],
            ),
        )
        shown.wanted_by.append(
            WantingRevision(
                tenant_id=None if item.tenant_id is None else format_id("tenant", item.tenant_id),
                deployment=item.deployment,
                revision_id=format_id("deployment_revision", item.revision_id),
                wanted_as=item.wanted_as,
            )
        )
    has_drift = bool(builds) or any(
        not item.answers or item.missing or item.extra or item.weights for item in replicas
    )
    return DriftResource(has_drift=has_drift, replicas=replicas, builds=list(builds.values()))


def _show_replica(
    view: ReplicaView,
    desired: Sequence[Desired],
    named_builds: set[str],
    base_revisions: Mapping[str, str],
) -> ReplicaDriftResource:
    record, stats = view.record, view.stats
    drift = Drift()
    if stats is not None:
        drift = drift_of(stats, record.base_model, record.started_at_unix_s, desired)
    named = base_revisions.get(record.base_model)
    # A build that a rollout or a pin names is where it is to be, whatever its weights.
    differs = (
        named is not None
        and record.base_revision not in ("", named)
        and record.model_fingerprint not in named_builds
    )
    return ReplicaDriftResource(
        replica_id=record.replica_id,
        base_model=record.base_model,
        fingerprint=record.model_fingerprint,
        answers=stats is not None,
        desired=drift.desired,
        in_memory=[] if stats is None else sorted(stats.adapters_host),
        missing=[
            MissingResource(
                digest=item.digest,
                tenant_id=format_id("tenant", item.desired.tenant_id),
                version_id=format_id("adapter_version", item.desired.version_id),
                since=min(item.since, datetime.now(UTC)),
                is_pinned=item.is_pinned,
                reason=item.reason,
            )
            for item in drift.missing
        ],
        extra=drift.extra,
        weights=(
            WeightsResource(serves=record.base_revision, named=named)
            if differs and named is not None
            else None
        ),
    )
