"""Base models, adapters, versions and deployments on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel as Schema
from pydantic import ConfigDict, Field, field_validator, model_validator

from loraplex_platform.control.schemas import Body, Resource, UnixSeconds
from loraplex_platform.db import Adapter, AdapterVersion, BaseModel, EngineBuild
from loraplex_platform.gateway.revision_params import RevisionParams
from loraplex_platform.ids import format_id
from loraplex_platform.registry.params import canonical_params, schema_of
from loraplex_platform.registry.queries import DeployedRevision, RevisionFacts


class BaseModelResource(Resource):
    """A base model, identified to the bit."""

    object: Literal["base_model"] = "base_model"
    id: str
    name: str
    revision: str = Field(description="sha256 over the names and digests of the weight files.")
    tokenizer_sha256: str
    chat_template_sha256: str
    license: str | None
    architecture: dict[str, Any]
    created_at: UnixSeconds


class EngineBuildResource(Resource):
    """What computes: weights, their dtype and quantization, engine version and image."""

    object: Literal["engine_build"] = "engine_build"
    id: str
    fingerprint: str
    base_model: str
    base_model_id: str | None = Field(description="Its weights; null: they are not known here.")
    facts: dict[str, Any] = Field(description="Of the replica that was seen first.")
    is_running: bool
    replicas: list[str] | None = Field(
        description="That run it now; null: only the operator is told."
    )
    first_seen_at: UnixSeconds
    last_seen_at: UnixSeconds


class CheckResource(Schema):
    """One check of the validation."""

    name: str
    ok: bool
    detail: str


class NormsResource(Schema):
    """Sizes of the adapter's deltas."""

    max: float = Field(description="Largest Frobenius norm of scale * B A over the modules.")


class ProbeSample(Schema):
    """One prompt, answered greedily by the base and by the adapter."""

    prompt: str
    base: str
    adapter: str


class ProbeResource(Schema):
    """What the adapter does to the base's answers."""

    samples: list[ProbeSample]
    changed: int = Field(description="Samples whose tokens differ.")
    max_logprob_difference: float


class ModuleMemoryResource(Schema):
    """All modules of one name."""

    module: str
    layers: int
    rank: int
    parameters: int
    bytes_per_rank: int = Field(
        description="Of one rank of one of them in bfloat16; float32: twice."
    )


class MemoryResource(Schema):
    """An estimate of what the adapter takes of an engine's memory, by the model's dtype."""

    modules: list[ModuleMemoryResource]
    cpu_bytes: dict[str, tuple[int, int]] = Field(
        description="On a CPU, from the least to the most: it depends on the CPU's instructions."
    )
    gpu_host_bytes: dict[str, int] = Field(description="Of the host's memory, beside a GPU's slot.")
    gpu_slot_bytes: dict[str, int] = Field(
        description="Of a GPU's slot: sized for the largest rank that is served, whatever this one's is."
    )


class OverheadResource(Schema):
    """What one more adapter in a decoding step costs, in percent of a step of one row of the base."""

    low_percent: float
    high_percent: float
    source: str = Field(description="Where the two figures come from.")


class ReportResource(Schema):
    """What was checked and seen when the version was uploaded."""

    checks: list[CheckResource]
    matched_modules: int
    total_modules: int
    parameters: int
    norms: NormsResource
    probe: ProbeResource | None = Field(description="null: it was uploaded without.")
    source: str | None = Field(
        default=None, description="Where it was imported from, pinned; null: it was uploaded."
    )
    memory: MemoryResource | None = Field(
        default=None, description="null: it was uploaded before there was an estimate."
    )
    overhead: OverheadResource | None = None


class VersionResource(Resource):
    """An immutable version: its digest is its identity everywhere."""

    object: Literal["adapter_version"] = "adapter_version"
    id: str
    adapter_id: str
    version: int
    digest: str
    status: Literal["ready", "retired"]
    size_bytes: int
    rank: int
    target_modules: list[str]
    created_at: UnixSeconds
    report: ReportResource


class AdapterResource(Resource):
    """A named line of versions, owned by one tenant; versions newest first."""

    object: Literal["adapter"] = "adapter"
    id: str
    tenant_id: str
    name: str
    created_at: UnixSeconds
    versions: list[VersionResource]


class UploadedAdapter(Resource):
    """The answer to an upload."""

    object: Literal["adapter"] = "adapter"
    id: str
    tenant_id: str
    name: str
    created_at: UnixSeconds
    version: VersionResource


_VERSION = "An adapter version of this tenant; null: the base."
_BUILD = "Only replicas of this engine build answer; null: any of the base."
_BOOK = "Bill by this book, which only the operator chooses; null: by the one in force. Left out, it stays as it is."


class RevisionContent(Body):
    """Exactly what shall answer. What is left out is at its default, but for the price book."""

    version_id: str | None = Field(description=_VERSION)
    engine_build_id: str | None = Field(default=None, description=_BUILD)
    price_book_id: str | None = Field(default=None, description=_BOOK)
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="`system_prompt`, for chats that bring no system message, and `sampling`, defaults for what a "
        "request leaves open.",
        json_schema_extra=schema_of(RevisionParams),
    )

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        return canonical_params(params)


class FollowedAlias(Body):
    """An alias of one of the tenant's adapters."""

    adapter_id: str
    alias: str = Field(min_length=1, max_length=64)


class NewDeployment(RevisionContent):
    """What shall answer under the name, now and, if it follows an alias, whenever that moves."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"version_id": "ver_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f"},
                {"version_id": None, "params": {"sampling": {"temperature": 0.2}}},
                {
                    "follow": {
                        "adapter_id": "adp_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                        "alias": "production",
                    }
                },
            ]
        },
    )

    version_id: str | None = Field(default=None, description=_VERSION)
    follow: FollowedAlias | None = Field(
        default=None, description="In place of `version_id`: the version that this alias names."
    )

    @model_validator(mode="after")
    def _check_one(self) -> NewDeployment:
        if ("version_id" in self.model_fields_set) == (self.follow is not None):
            raise ValueError("give either version_id (null: the base) or follow, not both.")
        return self


class RevisionResource(Resource):
    """Immutable: exactly what answers. Without an adapter it is the base."""

    id: str
    number: int
    sha256: str = Field(description="Of all that makes it: two with one digest are the same.")
    base_model_id: str
    base_revision: str
    version_id: str | None
    adapter_id: str | None
    adapter_name: str | None
    version: int | None
    digest: str | None
    engine_build_id: str | None
    fingerprint: str | None = Field(description="The engine build's.")
    price_book_id: str | None
    params: dict[str, Any]
    created_at: UnixSeconds


class RevisionChange(Schema):
    """A field in which two revisions differ."""

    field: str
    before: Any = Field(description="Of the revision that it is compared to.")
    after: Any


class ComparedRevision(RevisionResource):
    """A revision beside another one."""

    against: str | None = Field(description="The revision that it is compared to.")
    changes: list[RevisionChange] | None = Field(
        description="What is another there; null: it is compared to none."
    )


class DeploymentResource(Resource):
    """A public model id and its current revision. Without a tenant it is the platform's own."""

    object: Literal["deployment"] = "deployment"
    id: str
    tenant_id: str | None
    name: str
    base_model: str
    revision: RevisionResource
    follow: FollowedAlias | None
    created_at: UnixSeconds
    updated_at: UnixSeconds


def show_base_model(model: BaseModel) -> BaseModelResource:
    """The base model as the API shows it."""
    return BaseModelResource(
        id=format_id("base_model", model.id),
        name=model.name,
        revision=model.revision,
        tokenizer_sha256=model.tokenizer_sha256,
        chat_template_sha256=model.chat_template_sha256,
        license=model.license,
        architecture=model.architecture,
        created_at=model.created_at,
    )


def show_build(
    build: EngineBuild, running: Mapping[str, list[str]], is_operator: bool
) -> EngineBuildResource:
    """The build as the API shows it. `running`: fingerprint -> replicas."""
    replicas = running.get(build.fingerprint, [])
    return EngineBuildResource(
        id=format_id("engine_build", build.id),
        fingerprint=build.fingerprint,
        base_model=build.base_model,
        base_model_id=_id("base_model", build.base_model_id),
        facts=build.facts,
        is_running=bool(replicas),
        replicas=replicas if is_operator else None,
        first_seen_at=build.first_seen_at,
        last_seen_at=build.last_seen_at,
    )


def show_version(version: AdapterVersion) -> VersionResource:
    """The version as the API shows it."""
    return VersionResource(
        id=format_id("adapter_version", version.id),
        adapter_id=format_id("adapter", version.adapter_id),
        version=version.version,
        digest=version.digest,
        status="ready" if version.status == "ready" else "retired",
        size_bytes=version.size_bytes,
        rank=version.rank,
        target_modules=version.target_modules,
        created_at=version.created_at,
        report=ReportResource.model_validate(version.report),
    )


def show_adapter(adapter: Adapter, versions: list[AdapterVersion]) -> AdapterResource:
    """The adapter as the API shows it."""
    return AdapterResource(
        id=format_id("adapter", adapter.id),
        tenant_id=format_id("tenant", adapter.tenant_id),
        name=adapter.name,
        created_at=adapter.created_at,
        versions=[show_version(version) for version in versions],
    )


def show_upload(adapter: Adapter, version: AdapterVersion) -> UploadedAdapter:
    """The adapter with the version that the upload is."""
    return UploadedAdapter(
        id=format_id("adapter", adapter.id),
        tenant_id=format_id("tenant", adapter.tenant_id),
        name=adapter.name,
        created_at=adapter.created_at,
        version=show_version(version),
    )


def show_revision(facts: RevisionFacts) -> RevisionResource:
    """The revision as the API shows it."""
    revision, adapter, version = facts.revision, facts.adapter, facts.version
    return RevisionResource(
        id=format_id("deployment_revision", revision.id),
        number=revision.number,
        sha256=revision.sha256,
        base_model_id=format_id("base_model", revision.base_model_id),
        base_revision=facts.base_model.revision,
        version_id=_id("adapter_version", revision.adapter_version_id),
        adapter_id=_id("adapter", None if adapter is None else adapter.id),
        adapter_name=None if adapter is None else adapter.name,
        version=None if version is None else version.version,
        digest=revision.adapter_digest,
        engine_build_id=_id("engine_build", revision.engine_build_id),
        fingerprint=None if facts.build is None else facts.build.fingerprint,
        price_book_id=_id("price_book", revision.price_book_id),
        params=revision.params,
        created_at=revision.created_at,
    )


def show_deployment(deployed: DeployedRevision) -> DeploymentResource:
    """A deployment as the API shows it."""
    deployment = deployed.deployment
    follow = None
    if deployment.followed_adapter_id is not None and deployment.followed_alias is not None:
        follow = FollowedAlias(
            adapter_id=format_id("adapter", deployment.followed_adapter_id),
            alias=deployment.followed_alias,
        )
    return DeploymentResource(
        id=format_id("deployment", deployment.id),
        tenant_id=_id("tenant", deployment.tenant_id),
        name=deployment.public_name,
        base_model=deployed.facts.base_model.name,
        revision=show_revision(deployed.facts),
        follow=follow,
        created_at=deployment.created_at,
        updated_at=deployment.updated_at,
    )


def _id(kind: str, value: UUID | None) -> str | None:
    return None if value is None else format_id(kind, value)
