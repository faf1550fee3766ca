"""Imports over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import BackgroundTasks, Path, Request

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import AdapterImport
from loraplex_platform.registry import imports, source_queries
from loraplex_platform.registry.import_schemas import ImportResource, NewImport, show_import
from loraplex_platform.tenancy.routes import Owner

router = admin_router("/tenants/{tenant_id}/adapters/import", "Adapters")
jobs_router = admin_router("/tenants/{tenant_id}/adapter-imports", "Adapters")

ImportId = Annotated[str, Path(description="The import's id, `imp_...`.", max_length=64)]


@router.post("", status_code=202)
@requires("adapter.write")
async def begin_import(
    owner: Owner,
    body: NewImport,
    *,
    request: Request,
    context: Context,
    session: DbSession,
    background: BackgroundTasks,
) -> ImportResource:
    """Have the server fetch an adapter: from a folder of its own, a bucket or a Hugging Face repository.

    The answer is a job; ask for it under /adapter-imports. What is fetched is checked, probed and stored
    as any upload is, and its version's report names the source. Only places that the operator allows
    (LORAPLEX_IMPORT_SOURCES) are read: those with the tenant's own name in them by its people, all by
    platform admins.
    """
    job = await imports.enqueue(
        session,
        context.import_rules,
        request.state.actor,
        owner,
        name=body.name,
        source=body.source,
        is_probed=body.probe,
        is_operator=request.state.principal.platform_role == "admin",
    )
    background.add_task(context.imports.wake)  # once it is committed
    return show_import(job)


@jobs_router.get("")
@requires("adapter.read")
async def list_imports(
    owner: Owner, page: Paging, session: DbSession, search: Search = None
) -> ListPage[ImportResource]:
    """The tenant's imports; ended ones for 30 days. `search`: in the adapter's name."""
    statement = holding(source_queries.imports_of(owner.id), search, AdapterImport.name)
    rows, has_more = await fetch(session, statement, AdapterImport.id, page, "adapter_import")
    return to_list(rows, has_more, show_import)


@jobs_router.get("/{import_id}")
@requires("adapter.read")
async def get_import(owner: Owner, import_id: ImportId, session: DbSession) -> ImportResource:
    """One import: how far it is, the version that it became, or why it failed."""
    return show_import(await imports.find(session, owner.id, import_id))
