"""Tenants and their projects. Keys are in key_service.py, people in `members/`."""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import Project, Tenant
from loraplex_platform.errors import ConflictError, InvalidRequestError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.tenancy import queries
from loraplex_platform.tenancy.schemas import NewTenant


async def get_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant:
    """By id.

    Raises:
        NotFoundError: no such tenant.
    """
    tenant = await queries.find_tenant(session, tenant_id)
    if tenant is None:
        raise NotFoundError("No such tenant.")
    return tenant


async def create_tenant(session: AsyncSession, actor: Actor, new: NewTenant) -> Tenant:
    """Add a tenant.

    Raises:
        ConflictError: the slug is taken.
        InvalidRequestError: the database does not know the time zone.
    """
    await _check_zone(session, new.billing_tz)
    tenant = Tenant(id=uuid7(), slug=new.slug, name=new.name or new.slug, billing_tz=new.billing_tz)
    if not await queries.insert_tenant(session, tenant):
        raise ConflictError(f"slug: {new.slug!r} is taken; choose another one.", param="slug")
    tenant_id = tenant.id
    record(
        session,
        actor,
        "tenant.create",
        "tenant",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        detail={"slug": new.slug, "name": new.name or new.slug, "billing_tz": new.billing_tz},
    )
    return await get_tenant(session, tenant_id)


async def update_tenant(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    changes: dict[str, Any],
    if_match: int | None,
) -> Tenant:
    """Change name, time zone or whether answers are kept; nothing happens where nothing differs.

    Raises:
        NotFoundError: no such tenant.
        VersionConflictError: it is not the version of If-Match.
        ConflictError: days and months are being billed by its time zone already.
        InvalidRequestError: the database does not know the time zone.
    """
    if "billing_tz" in changes:
        # The periods move with it. Changes of limits lock in this order too.
        await queries.lock_limits(session, tenant_id)
    tenant = await _lock_tenant(session, tenant_id)
    before = {
        "name": tenant.name,
        "billing_tz": tenant.billing_tz,
        "replays_answers": tenant.replays_answers,
    }
    check_version(if_match, tenant.row_version, changes, before)
    wanted = {field: value for field, value in changes.items() if before[field] != value}
    if not wanted:
        return tenant
    if "billing_tz" in wanted and await queries.has_requests(session, tenant_id):
        raise ConflictError(
            "billing_tz: the tenant has had requests or adapter-hours, so its days and months are being "
            f"counted in {tenant.billing_tz} already. It can only be set before the first of them.",
            param="billing_tz",
        )
    if "billing_tz" in wanted:
        await _check_zone(session, wanted["billing_tz"])
    await queries.update_tenant(session, tenant_id, wanted)
    record(
        session,
        actor,
        "tenant.update",
        "tenant",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        before={field: before[field] for field in wanted},
        after=wanted,
    )
    return await _lock_tenant(session, tenant_id)


async def _check_zone(session: AsyncSession, name: str) -> None:
    if not await queries.is_zone(session, name):
        raise InvalidRequestError(
            f"billing_tz: {name!r} does not mean the same everywhere. Name a place, such as "
            "Europe/Berlin, or UTC.",
            param="billing_tz",
        )


async def set_status(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    status: Literal["active", "suspended"],
) -> Tenant:
    """Suspend a tenant, which ends its requests at the next one, or serve it again.

    Raises:
        NotFoundError: no such tenant.
        ConflictError: it is closed, which is for ever.
    """
    tenant = await _lock_tenant(session, tenant_id)
    before = tenant.status
    if before == "closed":
        raise ConflictError("This tenant is closed, which is for ever: make a new one.")
    if before == status:
        return tenant
    await queries.update_tenant(session, tenant_id, {"status": status})
    tenant = await _lock_tenant(session, tenant_id)
    record(
        session,
        actor,
        "tenant.suspend" if status == "suspended" else "tenant.activate",
        "tenant",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        before={"status": before},
        after={"status": status},
    )
    return tenant


async def _lock_tenant(session: AsyncSession, tenant_id: UUID) -> Tenant:
    tenant = await queries.lock_tenant(session, tenant_id)
    if tenant is None:
        raise NotFoundError("No such tenant.")
    return tenant


# ---------------------------------------------------------------------------- projects


def project_uuid(text: str, *, param: str | None = None) -> UUID:
    """The UUID of a project's id.

    Raises:
        NotFoundError: it is none, which is as good as unknown.
    """
    try:
        return parse_id("project", text)
    except MalformedIdError:
        raise NotFoundError("No such project.", param=param) from None


async def get_project(session: AsyncSession, tenant_id: UUID, project_id: str) -> Project:
    """One of the tenant's projects.

    Raises:
        NotFoundError: no such project of this tenant.
    """
    project = await queries.find_project(session, tenant_id, project_uuid(project_id))
    if project is None:
        raise NotFoundError("No such project.")
    return project


async def create_project(
    session: AsyncSession, actor: Actor, tenant_id: UUID, name: str
) -> Project:
    """Add a project.

    Raises:
        ConflictError: a live project has this name.
    """
    await _claim_name(session, tenant_id, name)
    project = Project(id=uuid7(), tenant_id=tenant_id, name=name)
    session.add(project)
    await session.flush()
    await session.refresh(project)
    _record_project(session, actor, "create", project, after={"name": name})
    return project


async def rename_project(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    project_id: str,
    changes: dict[str, Any],
    if_match: int | None,
) -> Project:
    """Give a project another name.

    Raises:
        NotFoundError: no such project of this tenant.
        VersionConflictError: it is not the version of If-Match.
        ConflictError: another one has the name, or it is archived.
    """
    project = await _lock_project(session, tenant_id, project_id)
    before = {"name": project.name}
    check_version(if_match, project.row_version, changes, before)
    if project.archived_at is not None:
        raise ConflictError("This project is archived: make a new one.")
    name = changes.get("name", project.name)
    if name == project.name:
        return project
    await _claim_name(session, tenant_id, name, except_id=project.id)
    project.name = name
    project.row_version += 1
    await session.flush()
    _record_project(session, actor, "update", project, before=before, after={"name": name})
    return project


async def archive_project(
    session: AsyncSession, actor: Actor, tenant_id: UUID, project_id: str, if_match: int | None
) -> None:
    """Take a project out of use. Its usage and bills stay; its name may be used again.

    Raises:
        NotFoundError: no such project of this tenant.
        VersionConflictError: it is not the version of If-Match.
        ConflictError: live keys belong to it.
    """
    project = await _lock_project(session, tenant_id, project_id)
    check_version(if_match, project.row_version, {}, {})
    if project.archived_at is not None:
        return
    num_keys = await queries.count_live_keys(session, tenant_id, project.id)
    if num_keys:
        raise ConflictError(
            f"{num_keys} live keys belong to this project: revoke them or move them first."
        )
    project.archived_at = await queries.now(session)
    project.row_version += 1
    await session.flush()
    _record_project(session, actor, "archive", project, before={"name": project.name})


async def _claim_name(
    session: AsyncSession, tenant_id: UUID, name: str, *, except_id: UUID | None = None
) -> None:
    # One writer of a tenant's names at a time, or two would both find theirs free.
    await _lock_tenant(session, tenant_id)
    if await queries.is_name_taken(session, tenant_id, name, except_id=except_id):
        raise ConflictError(
            f"name: the tenant has a project {name!r}; choose another name.", param="name"
        )


async def _lock_project(session: AsyncSession, tenant_id: UUID, project_id: str) -> Project:
    project = await queries.lock_project(session, tenant_id, project_uuid(project_id))
    if project is None:
        raise NotFoundError("No such project.")
    return project


def _record_project(
    session: AsyncSession,
    actor: Actor,
    verb: str,
    project: Project,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        session,
        actor,
        f"project.{verb}",
        "project",
        format_id("project", project.id),
        tenant_id=project.tenant_id,
        before=before,
        after=after,
    )
