"""Base models, adapters and deployments over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Request, Response

from loraplex_platform.control.context import Context, DbSession
from loraplex_platform.control.paging import Paging, Search, fetch, holding, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import StreamedRoute, admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import Adapter, BaseModel, EngineBuild
from loraplex_platform.errors import PlatformError
from loraplex_platform.registry import queries, service, upload
from loraplex_platform.registry.schemas import (
    AdapterResource,
    BaseModelResource,
    EngineBuildResource,
    UploadedAdapter,
    show_adapter,
    show_base_model,
    show_build,
)
from loraplex_platform.registry.storing import store
from loraplex_platform.tenancy import service as tenancy
from loraplex_platform.tenancy.routes import Owner, TenantUuid

base_models_router = admin_router("/base-models", "Base models")
adapters_router = admin_router("/tenants/{tenant_id}/adapters", "Adapters")
uploads_router = admin_router(
    "/tenants/{tenant_id}/adapters", "Adapters", route_class=StreamedRoute
)
builds_router = admin_router("/engine-builds", "Base models")

_UPLOAD_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "adapter_config", "adapter_model"],
                    "properties": {
                        "name": {
                            "type": "string",
                            "pattern": f"^{upload.NAME_PATTERN.pattern}$",
                            "description": "The adapter's name; an existing one gets a version.",
                            "examples": ["capitals"],
                        },
                        "adapter_config": {
                            "type": "string",
                            "format": "binary",
                            "description": "PEFT's adapter_config.json.",
                        },
                        "adapter_model": {
                            "type": "string",
                            "format": "binary",
                            "description": "adapter_model.safetensors; pickles are never opened.",
                        },
                        "tokenizer_sha256": {
                            "type": "string",
                            "description": "If given, must equal the base's tokenizer.json.",
                        },
                        "chat_template_sha256": {
                            "type": "string",
                            "description": "If given, must equal the base's chat template.",
                        },
                        "probe": {
                            "type": "boolean",
                            "default": True,
                            "description": "false: it is checked, but asked no questions beside the "
                            "base. For uploads by the hundred, of adapters that were tried elsewhere.",
                        },
                    },
                }
            }
        },
    }
}


@base_models_router.get("")
@requires("model.read")
async def list_base_models(
    page: Paging, session: DbSession, search: Search = None
) -> ListPage[BaseModelResource]:
    """The base models ever served here, identified by the digests of their files. `search`: in the name and the
    digest of the weights.
    """
    statement = holding(queries.all_base_models(), search, BaseModel.name, BaseModel.revision)
    rows, has_more = await fetch(session, statement, BaseModel.id, page, "base_model")
    return to_list(rows, has_more, show_base_model)


@builds_router.get("")
@requires("model.read")
async def list_engine_builds(
    page: Paging, request: Request, context: Context, session: DbSession, search: Search = None
) -> ListPage[EngineBuildResource]:
    """What ever computed here: replicas of one build give the same bits. Which replicas run it now, only the
    operator sees. `search`: in the fingerprint and the base model's name.
    """
    statement = holding(
        queries.all_builds(), search, EngineBuild.fingerprint, EngineBuild.base_model
    )
    rows, has_more = await fetch(session, statement, EngineBuild.id, page, "engine_build")
    running = context.fleet.running_builds()
    is_operator = request.state.reach.tenant_ids is None
    return to_list(rows, has_more, lambda build: show_build(build, running, is_operator))


@uploads_router.post(
    "",
    status_code=201,
    response_model=UploadedAdapter,
    openapi_extra=_UPLOAD_SCHEMA,
    responses={200: {"model": UploadedAdapter, "description": "This version exists already."}},
)
@requires("adapter.write")
async def upload_adapter(tenant_id: TenantUuid, request: Request, context: Context) -> Response:
    """Upload a LoRA adapter as PEFT saves it; checked, probed, stored as an immutable version.

    The body is streamed to a quarantine file, checked in a process with memory and time limits and
    then asked a few questions beside the base model; `version.report` shows all of it. Refusals are
    400 with code `adapter_rejected`; `param` is the faulty field and the message the remedy.
    Without a ready engine the answer is 503 and nothing is stored, unless `probe` is false: that goes
    without an engine and many times faster, and what would have been refused for changing nothing, or
    for an output that is not finite, is found by who uses it. The same files again with a
    probe are 409, for a version never changes: `probe` false, or another `name`.
    """
    async with context.sessions() as session:
        await tenancy.get_tenant(session, tenant_id)
    try:
        async with upload.receive(
            request, context.quarantine, max_model_bytes=context.settings.max_adapter_bytes
        ) as received:
            response = await store(request, context, tenant_id, received)
    except PlatformError as error:
        context.metrics.uploads.labels(error.error_code or "failed").inc()
        raise
    context.metrics.uploads.labels("stored" if response.status_code == 201 else "known").inc()
    return response


@adapters_router.get("")
@requires("adapter.read")
async def list_adapters(
    owner: Owner, page: Paging, session: DbSession, search: Search = None
) -> ListPage[AdapterResource]:
    """The tenant's adapters with their versions. `search`: in the name."""
    statement = holding(queries.adapters_of(owner.id), search, Adapter.name)
    rows, has_more = await fetch(session, statement, Adapter.id, page, "adapter")
    versions = await queries.versions_of(session, owner.id, [row.id for row in rows])
    return to_list(rows, has_more, lambda adapter: show_adapter(adapter, versions[adapter.id]))


@adapters_router.get("/{adapter_id}")
@requires("adapter.read")
async def get_adapter(
    owner: Owner,
    adapter_id: Annotated[str, Path(description="The adapter's id, `adp_...`.")],
    session: DbSession,
) -> AdapterResource:
    """One adapter with its versions."""
    adapter, versions = await service.get_adapter(session, owner.id, adapter_id)
    return show_adapter(adapter, versions)
