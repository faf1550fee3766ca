"""Resumable uploads over HTTP, with the headers of tus 1.0 (Upload-Offset, Upload-Length)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, timedelta
from email.utils import format_datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import BackgroundTasks, Path, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import ClientDisconnect

from loraplex_platform.control.context import Context, ControlContext, DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import StreamedRoute, admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import AdapterUpload
from loraplex_platform.errors import InvalidRequestError, PlatformError
from loraplex_platform.registry import queries, service, source_queries, upload_sessions
from loraplex_platform.registry.errors import AdapterRejectedError, WrongOffsetError
from loraplex_platform.registry.schemas import UploadedAdapter, show_upload
from loraplex_platform.registry.storing import store
from loraplex_platform.registry.upload_files import UploadFolders
from loraplex_platform.registry.upload_schemas import NewUpload, UploadResource, show_session
from loraplex_platform.registry.upload_sessions import UploadLimits
from loraplex_platform.tenancy.routes import Owner, TenantUuid

_PREFIX: Final = "/tenants/{tenant_id}/adapter-uploads"
router = admin_router(_PREFIX, "Adapters")
bytes_router = admin_router(_PREFIX, "Adapters", route_class=StreamedRoute)

# How long a request may send nothing.
BODY_IDLE_S: Final = 20.0
_CONTENT_TYPE: Final = "application/offset+octet-stream"
_OFFSET_HEADERS: Final = {
    "Upload-Offset": {"schema": {"type": "integer"}, "description": "Bytes that are here."},
    "Upload-Length": {"schema": {"type": "integer"}, "description": "Bytes of the whole file."},
}
_BYTES: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "Upload-Offset",
            "in": "header",
            "required": True,
            "schema": {"type": "integer", "minimum": 0},
            "description": "Where the body's first byte belongs: exactly behind what is here.",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {_CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    },
}

UploadId = Annotated[str, Path(description="The upload's id, `upl_...`.", max_length=64)]
FileName = Annotated[str, Path(description="One of the upload's files.", max_length=200)]


@router.post("", status_code=201)
@requires("adapter.write")
async def begin_upload(
    owner: Owner, body: NewUpload, *, request: Request, context: Context, session: DbSession
) -> UploadResource:
    """Begin an upload that may be cut anywhere and resumed: say what is to come.

    Then PATCH each file's bytes, in one go or in many; ask for its offset after a cut and go on there;
    then complete it. The bytes lie in the control process's quarantine folder (LORAPLEX_QUARANTINE_DIR),
    which several control processes must share. Whether anybody has uploaded the same files before makes
    no difference to any answer.
    """
    limits = _limits(context)
    upload = await upload_sessions.begin(
        session, context.uploads, limits, request.state.actor, owner.id, body.plan()
    )
    return show_session(upload, context.uploads)


@router.get("")
@requires("adapter.read")
async def list_uploads(
    owner: Owner, page: Paging, context: Context, session: DbSession
) -> ListPage[UploadResource]:
    """The tenant's unfinished uploads, and those that ended within a day."""
    statement = source_queries.uploads_of(owner.id)
    rows, has_more = await fetch(session, statement, AdapterUpload.id, page, "adapter_upload")
    return to_list(rows, has_more, lambda upload: show_session(upload, context.uploads))


@router.get("/{upload_id}")
@requires("adapter.read")
async def get_upload(
    owner: Owner, upload_id: UploadId, context: Context, session: DbSession
) -> UploadResource:
    """One upload and how far it is."""
    return show_session(await upload_sessions.find(session, owner.id, upload_id), context.uploads)


@router.delete("/{upload_id}", status_code=204)
@requires("adapter.write")
async def delete_upload(
    owner: Owner,
    upload_id: UploadId,
    request: Request,
    context: Context,
    *,
    session: DbSession,
    background: BackgroundTasks,
) -> None:
    """Give an upload up; its bytes are deleted. A version that it became stays."""
    upload = await upload_sessions.find(session, owner.id, upload_id)
    await upload_sessions.delete(session, request.state.actor, owner.id, upload)
    # After the commit; what a request is still writing is swept later.
    background.add_task(asyncio.to_thread, context.uploads.remove, upload.id)


@router.get(
    "/{upload_id}/files/{file_name}",
    status_code=204,
    responses={204: {"description": "See the headers.", "headers": _OFFSET_HEADERS}},
)
@requires("adapter.read")
async def get_offset(
    owner: Owner,
    upload_id: UploadId,
    file_name: FileName,
    response: Response,
    *,
    context: Context,
    session: DbSession,
) -> None:
    """How much of a file is here, in the headers; HEAD says the same."""
    upload = await upload_sessions.find(session, owner.id, upload_id)
    upload_sessions.check_open(upload)
    _describe(response, upload, file_name, _offset(context.uploads, upload, file_name))


@bytes_router.patch(
    "/{upload_id}/files/{file_name}",
    status_code=204,
    openapi_extra=_BYTES,
    responses={
        204: {"description": "All of the body is here.", "headers": _OFFSET_HEADERS},
        507: {"description": "The server's disk is full; what it has is kept."},
    },
)
@requires("adapter.write")
async def append_bytes(
    tenant_id: TenantUuid,
    upload_id: UploadId,
    file_name: FileName,
    request: Request,
    context: Context,
) -> Response:
    """Send a file's next bytes.

    Another place than the next one is 409 `wrong_offset`, with the right one in `Upload-Offset`; while
    another request works on the same upload it is 409 `upload_busy`. What arrived of a request that was
    cut is kept.
    """
    async with context.sessions() as session:
        upload = await upload_sessions.find(session, tenant_id, upload_id)
    upload_sessions.check_open(upload)
    size_bytes = upload_sessions.size_of(upload, file_name)
    wanted = _wanted_offset(request)
    with context.uploads.locked(upload.id) as locked:
        offset = locked.offset(file_name)
        if wanted != offset:
            raise WrongOffsetError(offset)
        offset = await locked.append(file_name, _body_of(request), size_bytes=size_bytes)
    async with context.sessions.begin() as session:
        await source_queries.change_upload(session, upload.id, _limits(context).expiry)
    response = Response(status_code=204)
    _describe(response, upload, file_name, offset)
    return response


@bytes_router.post(
    "/{upload_id}/complete",
    status_code=201,
    response_model=UploadedAdapter,
    responses={200: {"model": UploadedAdapter, "description": "This version exists already."}},
)
@requires("adapter.write")
async def complete_upload(
    tenant_id: TenantUuid, upload_id: UploadId, request: Request, context: Context
) -> Response:
    """All bytes are there: have them checked, probed and made a version, as any upload is.

    Bytes that are missing are 409 `upload_incomplete`. What can be tried again (no engine for the probe,
    the store is away) leaves the upload as it is; what cannot (400 `adapter_rejected`) ends it. Again
    after success: the same version.
    """
    async with context.sessions() as session:
        upload = await upload_sessions.find(session, tenant_id, upload_id)
        again = await _ended(session, tenant_id, upload)
    if again is not None:
        return again
    upload_sessions.check_open(upload)
    try:
        with context.uploads.locked(upload.id) as locked:
            received = await asyncio.to_thread(upload_sessions.received, upload, locked)

            async def note(session: AsyncSession, stored: service.Stored) -> None:
                await upload_sessions.complete(
                    session, request.state.actor, upload, stored.version.id
                )

            response = await store(request, context, tenant_id, received, note)
    except PlatformError as error:
        context.metrics.uploads.labels(error.error_code or "failed").inc()
        if isinstance(error, AdapterRejectedError):
            async with context.sessions.begin() as session:
                await upload_sessions.refuse(session, upload.id, error)
            await asyncio.to_thread(context.uploads.remove, upload.id)
        raise
    context.metrics.uploads.labels("stored" if response.status_code == 201 else "known").inc()
    await asyncio.to_thread(context.uploads.remove, upload.id)
    return response


async def _ended(session: AsyncSession, tenant_id: UUID, upload: AdapterUpload) -> Response | None:
    """The answer once more, of one that has ended."""
    refusal = upload_sessions.refusal_of(upload)
    if refusal is not None:
        raise refusal
    if upload.version_id is None:
        return None
    version = await queries.find_version(session, tenant_id, upload.version_id)
    assert version is not None  # noqa: S101 # versions are never deleted
    adapter = await queries.find_adapter(session, tenant_id, version.adapter_id)
    assert adapter is not None  # noqa: S101 # nor are adapters
    return JSONResponse(show_upload(adapter, version).model_dump(mode="json"), 200)


def _limits(context: ControlContext) -> UploadLimits:
    settings = context.settings
    return UploadLimits(
        max_model_bytes=settings.max_adapter_bytes,
        max_open=settings.max_open_uploads,
        expiry=timedelta(seconds=settings.upload_expiry_s),
    )


def _wanted_offset(request: Request) -> int:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != _CONTENT_TYPE:
        raise InvalidRequestError(
            f"Content-Type: send the bytes as {_CONTENT_TYPE}.", param="Content-Type"
        )
    text = request.headers.get("upload-offset", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise InvalidRequestError(
            "Upload-Offset: name the place of the body's first byte, for example 0.",
            param="Upload-Offset",
        )
    return int(text)


async def _body_of(request: Request) -> AsyncIterator[bytes]:
    chunks = aiter(request.stream())
    try:
        while True:
            # A connection that died without a word would hold the upload's lock for hours.
            async with asyncio.timeout(BODY_IDLE_S):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk
    except (ClientDisconnect, TimeoutError):
        # What came is kept; whoever was cut does not hear it.
        raise InvalidRequestError(
            "The request was cut, or sent nothing for too long; ask for the offset and go on.",
            code="upload_cut",
        ) from None


def _offset(folders: UploadFolders, upload: AdapterUpload, file_name: str) -> int:
    upload_sessions.size_of(upload, file_name)
    return folders.offset(upload.id, file_name)


def _describe(response: Response, upload: AdapterUpload, file_name: str, offset: int) -> None:
    response.headers["upload-offset"] = str(offset)
    response.headers["upload-length"] = str(upload_sessions.size_of(upload, file_name))
    response.headers["upload-expires"] = format_datetime(
        upload.expires_at.astimezone(UTC), usegmt=True
    )
    response.headers["tus-resumable"] = "1.0.0"
