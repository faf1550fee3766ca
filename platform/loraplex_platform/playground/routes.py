"""The playground over HTTP."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import StreamingResponse

from loraplex_platform.control.context import Context
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import StreamedRoute, admin_router
from loraplex_platform.playground.schemas import PlaygroundRequest
from loraplex_platform.playground.service import revision_of
from loraplex_platform.tenancy import service as tenancy
from loraplex_platform.tenancy.routes import TenantUuid

router = admin_router("/tenants/{tenant_id}/playground", "Playground", route_class=StreamedRoute)


@router.post(
    "",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The gateway's chat completion chunks, unchanged, as server-sent events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
@requires("playground.use")
async def chat(
    tenant_id: TenantUuid, body: PlaygroundRequest, request: Request, context: Context
) -> StreamingResponse:
    """Chat with one of a tenant's models, streamed.

    Runs through the gateway with a short-lived key of that tenant named `playground`: metered and
    billed like any other request. Closing the connection aborts it. An Idempotency-Key has no
    effect here, because nothing is made. With `revision_id` that revision answers, whatever pins and
    rollouts say, and its arm in the request log is `named`.
    """
    is_operator = request.state.reach.tenant_ids is None
    async with context.sessions() as session:
        await tenancy.get_tenant(session, tenant_id)
        named = await revision_of(session, tenant_id, body, is_operator=is_operator)
    stream = await context.playground.open(request.state.actor, tenant_id, body, named)
    return StreamingResponse(
        stream,
        media_type="text/event-stream; charset=utf-8",
        headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
    )
