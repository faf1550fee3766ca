"""Tenants and their projects on the wire."""

from __future__ import annotations

import zoneinfo
from functools import cache
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from loraplex_platform.control.schemas import Body, CleanText, Resource, UnixSeconds
from loraplex_platform.db import Project, Tenant
from loraplex_platform.ids import format_id

SLUG_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
MAX_NAME_CHARS = 200
MAX_PROJECT_NAME_CHARS = 80


@cache
def _time_zones() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones())


def _time_zone(name: str) -> str:
    if name not in _time_zones():
        raise ValueError("it must be an IANA time zone such as Europe/Berlin, or UTC.")
    return name


TimeZone = Annotated[
    str,
    Field(
        max_length=64,
        description="IANA name of the zone whose days and months limits and invoices follow.",
        examples=["Europe/Berlin"],
    ),
    AfterValidator(_time_zone),
]
TenantName = Annotated[CleanText, Field(min_length=1, max_length=MAX_NAME_CHARS)]
ProjectName = Annotated[CleanText, Field(min_length=1, max_length=MAX_PROJECT_NAME_CHARS)]


class NewTenant(Body):
    """A customer. The slug is its short name, and stays."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"slug": "acme", "name": "Acme Corp.", "billing_tz": "Europe/Berlin"}]
        },
    )

    slug: str = Field(
        pattern=SLUG_PATTERN, description="Lower-case letters, digits and '-', at most 63."
    )
    name: TenantName | None = Field(default=None, description="The slug if not given.")
    billing_tz: TimeZone = "UTC"


class TenantChanges(Body):
    """What to change; what is not named stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "Acme Corporation"}]}
    )

    # No default that a schema would show: a field that is not sent is not changed.
    name: TenantName = Field(default_factory=str)
    billing_tz: TimeZone = Field(
        default_factory=str,
        description="Only before the tenant's first request or billed adapter-hour.",
    )
    replays_answers: bool = Field(
        default_factory=bool,
        description="Whether answers to requests with an Idempotency-Key are kept for a day, encrypted,"
        " so that a retry gets the answer again. Turned off, what is kept is deleted.",
    )


class TenantResource(Resource):
    """A tenant."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "object": "tenant",
                    "id": "ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "slug": "acme",
                    "name": "Acme Corp.",
                    "status": "active",
                    "billing_tz": "Europe/Berlin",
                    "replays_answers": False,
                    "version": 1,
                    "created_at": 1764400000,
                }
            ]
        }
    )

    object: Literal["tenant"] = "tenant"
    id: str
    slug: str
    name: str
    status: Literal["active", "suspended", "closed"]
    billing_tz: str
    replays_answers: bool
    version: int = Field(description="Its ETag, for If-Match.")
    created_at: UnixSeconds


class NewProject(Body):
    """A part of a tenant, with keys, limits and reports of its own."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "chat assistant"}]}
    )

    name: ProjectName = Field(description="Unique in the tenant, whatever its capitals.")


class ProjectChanges(Body):
    """What to change; what is not named stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "chat"}]})

    name: ProjectName = Field(default_factory=str)


class ProjectResource(Resource):
    """A project."""

    object: Literal["project"] = "project"
    id: str
    tenant_id: str
    name: str
    version: int = Field(description="Its ETag, for If-Match.")
    created_at: UnixSeconds
    archived_at: UnixSeconds | None


def show_tenant(tenant: Tenant) -> TenantResource:
    """The tenant as the API shows it."""
    return TenantResource(
        id=format_id("tenant", tenant.id),
        slug=tenant.slug,
        name=tenant.name,
        status=tenant.status,  # type: ignore[arg-type]  # checked by the table
        billing_tz=tenant.billing_tz,
        replays_answers=tenant.replays_answers,
        version=tenant.row_version,
        created_at=tenant.created_at,
    )


def show_project(project: Project) -> ProjectResource:
    """The project as the API shows it."""
    return ProjectResource(
        id=format_id("project", project.id),
        tenant_id=format_id("tenant", project.tenant_id),
        name=project.name,
        version=project.row_version,
        created_at=project.created_at,
        archived_at=project.archived_at,
    )
