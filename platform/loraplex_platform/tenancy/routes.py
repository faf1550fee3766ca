"""Tenants and their projects over HTTP."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Path, Query, Request, Response

from loraplex_platform.control.context import DbSession
from loraplex_platform.control.etag import IfMatch, set_etag
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Project, Tenant
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, parse_id
from loraplex_platform.tenancy import queries, service
from loraplex_platform.tenancy.schemas import (
    NewProject,
    NewTenant,
    ProjectChanges,
    ProjectResource,
    TenantChanges,
    TenantResource,
    show_project,
    show_tenant,
)

router = admin_router("/tenants", "Tenants")
projects_router = admin_router("/tenants/{tenant_id}/projects", "Projects")


async def _tenant_uuid(
    tenant_id: Annotated[
        str,
        Path(
            description="The tenant's id, `ten_...`.",
            examples=["ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f"],
        ),
    ],
) -> UUID:
    try:
        return parse_id("tenant", tenant_id)
    except MalformedIdError:
        raise NotFoundError("No such tenant.") from None


async def _owner(tenant_id: Annotated[UUID, Depends(_tenant_uuid)], session: DbSession) -> Tenant:
    return await service.get_tenant(session, tenant_id)


TenantUuid = Annotated[UUID, Depends(_tenant_uuid)]
# The tenant in the path, loaded: 404 before anything else is looked at.
Owner = Annotated[Tenant, Depends(_owner)]


@router.post("", status_code=201)
@requires("tenant.create")
async def create_tenant(
    body: NewTenant, request: Request, response: Response, session: DbSession
) -> TenantResource:
    """Add a tenant. Its adapters, keys, cache, usage and bill are its own."""
    tenant = await service.create_tenant(session, request.state.actor, body)
    set_etag(response, tenant.row_version)
    return show_tenant(tenant)


@router.get("")
@requires("tenant.read")
async def list_tenants(
    page: Paging,
    session: DbSession,
    search: Search = None,
    slug: Annotated[
        str | None,
        Query(
            max_length=80,
            pattern=r"^[^\x00]*$",  # which Postgres refuses
            description="Only the one whose slug is exactly this.",
        ),
    ] = None,
) -> ListPage[TenantResource]:
    """Every tenant, newest first; for members, those they belong to. `search`: in slug and name."""
    statement = holding(queries.all_tenants(), search, Tenant.slug, Tenant.name)
    if slug is not None:
        statement = statement.where(Tenant.slug == slug)
    rows, has_more = await fetch(session, statement, Tenant.id, page, "tenant")
    return to_list(rows, has_more, show_tenant)


@router.get("/{tenant_id}")
@requires("tenant.read")
async def get_tenant(owner: Owner, response: Response) -> TenantResource:
    """One tenant."""
    set_etag(response, owner.row_version)
    return show_tenant(owner)


@router.patch("/{tenant_id}")
@requires("tenant.update")
async def update_tenant(
    owner: Owner,
    body: TenantChanges,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    session: DbSession,
) -> TenantResource:
    """Change a tenant's name, whether answers are kept for retries, or, before its first request, the
    time zone of its days and months."""
    tenant = await service.update_tenant(
        session, request.state.actor, owner.id, body.model_dump(exclude_unset=True), if_match
    )
    set_etag(response, tenant.row_version)
    return show_tenant(tenant)


@router.post("/{tenant_id}/suspend")
@requires("tenant.suspend")
async def suspend_tenant(
    owner: Owner, request: Request, response: Response, session: DbSession
) -> TenantResource:
    """Refuse the tenant's requests from the next one on; nothing else of it changes."""
    tenant = await service.set_status(session, request.state.actor, owner.id, "suspended")
    set_etag(response, tenant.row_version)
    return show_tenant(tenant)


@router.post("/{tenant_id}/activate")
@requires("tenant.suspend")
async def activate_tenant(
    owner: Owner, request: Request, response: Response, session: DbSession
) -> TenantResource:
    """Serve a suspended tenant again."""
    tenant = await service.set_status(session, request.state.actor, owner.id, "active")
    set_etag(response, tenant.row_version)
    return show_tenant(tenant)


ProjectId = Annotated[str, Path(description="The project's id, `prj_...`.")]


@projects_router.post("", status_code=201)
@requires("project.write")
async def create_project(
    owner: Owner, body: NewProject, request: Request, response: Response, session: DbSession
) -> ProjectResource:
    """Add a project: a part of the tenant with keys, limits and reports of its own."""
    project = await service.create_project(session, request.state.actor, owner.id, body.name)
    set_etag(response, project.row_version)
    return show_project(project)


@projects_router.get("")
@requires("project.read")
async def list_projects(
    owner: Owner,
    page: Paging,
    session: DbSession,
    *,
    search: Search = None,
    archived: Annotated[bool, Query(description="Also those that are archived.")] = False,
) -> ListPage[ProjectResource]:
    """The tenant's projects, newest first. `search`: in the name."""
    statement = holding(queries.projects_of(owner.id), search, Project.name)
    if not archived:
        statement = statement.where(Project.archived_at.is_(None))
    rows, has_more = await fetch(session, statement, Project.id, page, "project")
    return to_list(rows, has_more, show_project)


@projects_router.get("/{project_id}")
@requires("project.read")
async def get_project(
    owner: Owner, project_id: ProjectId, response: Response, session: DbSession
) -> ProjectResource:
    """One project."""
    project = await service.get_project(session, owner.id, project_id)
    set_etag(response, project.row_version)
    return show_project(project)


@projects_router.patch("/{project_id}")
@requires("project.write")
async def update_project(
    owner: Owner,
    project_id: ProjectId,
    body: ProjectChanges,
    if_match: IfMatch,
    *,
    request: Request,
    response: Response,
    session: DbSession,
) -> ProjectResource:
    """Give a project another name."""
    changes = body.model_dump(exclude_unset=True)
    project = await service.rename_project(
        session, request.state.actor, owner.id, project_id, changes, if_match
    )
    set_etag(response, project.row_version)
    return show_project(project)


@projects_router.delete("/{project_id}", status_code=204)
@requires("project.write")
async def archive_project(
    owner: Owner, project_id: ProjectId, if_match: IfMatch, request: Request, session: DbSession
) -> None:
    """Archive a project without live keys. Its usage and bills stay, its name is free again."""
    await service.archive_project(session, request.state.actor, owner.id, project_id, if_match)
