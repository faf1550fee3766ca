"""From an upload's bytes to its version over HTTP: one path, however the bytes came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.control.context import ControlContext
from loraplex_platform.control.idempotency import Idempotency
from loraplex_platform.control.routing import in_transaction, run_once
from loraplex_platform.registry import service
from loraplex_platform.registry.schemas import show_upload
from loraplex_platform.registry.upload import Upload

# Told of the version in the transaction that makes it one.
OnStored = Callable[[AsyncSession, service.Stored], Awaitable[None]]


async def store(
    request: Request,
    context: ControlContext,
    tenant_id: UUID,
    received: Upload,
    on_stored: OnStored | None = None,
) -> Response:
    """Check it, make it a version, and show that: 201, or 200 if the tenant has it already.

    Raises:
        AdapterRejectedError, ConflictError, UnavailableError: as `AdapterIntake.vet` does.
    """
    vetted: service.Stored | service.Vetted | None = None

    async def keep(_: Request) -> Response:
        nonlocal vetted
        if vetted is None:
            vetted = await context.intake.vet(tenant_id, received)
        stored = vetted
        session = request.state.session
        if isinstance(stored, service.Vetted):
            stored = await context.intake.keep(session, request.state.actor, tenant_id, stored)
        if on_stored is not None:
            await on_stored(session, stored)
        shown = show_upload(stored.adapter, stored.version).model_dump(mode="json")
        return JSONResponse(shown, 201 if stored.is_new else 200)

    keyed = Idempotency.of(context.sessions, request.state.principal.name, request)
    if keyed is None:
        return await in_transaction(request, keep)
    return await run_once(request, keyed, received.fingerprint, lambda: keep(request))
