"""Imports on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import AdapterImport
from loraplex_platform.ids import format_id
from loraplex_platform.registry.upload_schemas import AdapterName, RefusalResource


class NewImport(Body):
    """What is to be fetched, and under which name."""

    name: AdapterName
    source: CleanText = Field(
        max_length=1000,
        description="hf://organisation/name@revision, s3://bucket/folder, gs://bucket/folder or "
        "file:///folder of the server; below a place that the operator allows.",
        examples=["hf://acme/capitals-lora@main"],
    )
    probe: bool = Field(
        default=True,
        description="false: it is checked, but asked no questions beside the base.",
    )


class ImportResource(Resource):
    """An import: a job. Ask for it until its state is `succeeded` or `failed`."""

    object: Literal["adapter_import"] = "adapter_import"
    id: str
    tenant_id: str
    name: str
    source: str
    resolved: str | None = Field(
        description="The source pinned: of a hub's repository the commit. null: not looked at yet."
    )
    probe: bool
    state: Literal["queued", "running", "succeeded", "failed"]
    received_bytes: int
    total_bytes: int | None
    attempts: int
    version_id: str | None
    error: RefusalResource | None = Field(
        description="Of the last attempt; a queued one is tried again."
    )
    created_at: UnixSeconds
    finished_at: UnixSeconds | None


def show_import(job: AdapterImport) -> ImportResource:
    """The job as the API shows it."""
    return ImportResource.model_validate(
        {
            "id": format_id("adapter_import", job.id),
            "tenant_id": format_id("tenant", job.tenant_id),
            "name": job.name,
            "source": job.source,
            "resolved": job.resolved,
            "probe": job.is_probed,
            "state": job.state,
            "received_bytes": job.received_bytes,
            "total_bytes": job.total_bytes,
            "attempts": job.attempts,
            "version_id": None
            if job.version_id is None
            else format_id("adapter_version", job.version_id),
            "error": job.error,
            "created_at": job.created_at,
            "finished_at": job.finished_at,
        }
    )
