"""The deletion of a tenant over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import BackgroundTasks, Query, Request

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.erasure import service
from loraplex_platform.erasure.schemas import Deletion
from loraplex_platform.ids import format_id
from loraplex_platform.tenancy.routes import TenantUuid

router = admin_router("/tenants", "Retention and deletion")


@router.delete("/{tenant_id}")
@requires("tenant.delete")
async def delete_tenant(
    tenant_id: TenantUuid,
    confirm: Annotated[str, Query(max_length=63, description="The tenant's slug, once more.")],
    request: Request,
    context: Context,
    session: DbSession,
    background: BackgroundTasks,
) -> Deletion:
    """Delete a tenant and everything that is its own, for good.

    Its keys stop at their next request. Ledger, invoices and audit log stay, as law wants them; the
    answer says what went and what was kept.
    """
    erased = await service.erase(session, request.state.actor, tenant_id, confirm)
    # After the commit: files cannot be rolled back.
    background.add_task(service.remove_files, context.intake, context.uploads, erased)
    return Deletion(
        tenant_id=format_id("tenant", tenant_id),
        removed=erased.removed,
        adapter_files=len(erased.digests),
        kept=list(service.KEPT),
    )
