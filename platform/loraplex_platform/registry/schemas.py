"""Base models, adapters, versions and deployments on the wire."""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel as Schema
from pydantic import ConfigDict, Field

from loraplex_platform.control.schemas import Body, Resource, UnixSeconds
from loraplex_platform.db import Adapter, AdapterVersion, BaseModel
from loraplex_platform.ids import format_id
from loraplex_platform.registry.queries import DeployedRevision


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


class NewDeployment(Body):
    """What shall answer under the name."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"version_id": "ver_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f"},
                {"version_id": None},
            ]
        },
    )

    version_id: str | None = Field(description="An adapter version of this tenant; null: the base.")


class RevisionResource(Resource):
    """Immutable: exactly what answers. Without an adapter it is the base."""

    id: str
    number: int
    version_id: str | None
    adapter_id: str | None
    adapter_name: str | None
    digest: str | None
    created_at: UnixSeconds


class DeploymentResource(Resource):
    """A public model id of a tenant and its current revision."""

    object: Literal["deployment"] = "deployment"
    id: str
    tenant_id: str
    name: str
    base_model: str
    revision: RevisionResource
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


def show_deployment(tenant_id: UUID, deployed: DeployedRevision) -> DeploymentResource:
    """A tenant's deployment as the API shows it."""
    deployment, revision, adapter = deployed.deployment, deployed.revision, deployed.adapter
    version_id = revision.adapter_version_id
    return DeploymentResource(
        id=format_id("deployment", deployment.id),
        tenant_id=format_id("tenant", tenant_id),
        name=deployment.public_name,
        base_model=deployed.base_model.name,
        revision=RevisionResource(
            id=format_id("deployment_revision", revision.id),
            number=revision.number,
            version_id=None if version_id is None else format_id("adapter_version", version_id),
            adapter_id=None if adapter is None else format_id("adapter", adapter.id),
            adapter_name=None if adapter is None else adapter.name,
            digest=revision.adapter_digest,
            created_at=revision.created_at,
        ),
        created_at=deployment.created_at,
        updated_at=deployment.updated_at,
    )
