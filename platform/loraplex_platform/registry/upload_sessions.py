"""Resumable uploads: made with what is to come, filled file by file, then checked like any other upload.

| state | what may be asked of it |
|---|---|
| open | offsets, bytes, completion, deletion |
| completed | the version that it became, for a day |
| refused | why, for a day: other bytes are another upload |

What keeps it open for another try: no engine for the probe, a store or a disk that is full or away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import structlog
from loraplex_engine.artifact import ADAPTER_FILES, CONFIG_FILE, ArtifactError, check_file_name
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.db import AdapterUpload
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import (
    BodyTooLargeError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
)
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.registry import queries, source_queries
from loraplex_platform.registry.errors import (
    AdapterRejectedError,
    TooManyUploadsError,
    UploadGoneError,
)
from loraplex_platform.registry.upload import MAX_CONFIG_BYTES, Upload
from loraplex_platform.registry.upload_files import LockedUpload, UploadFolders

log = structlog.get_logger(__name__)

# What became of an upload can be asked for so long.
ENDED_FOR: Final = timedelta(days=1)
_HASH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is to come."""

    name: str
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """What a client says before it sends a byte."""

    name: str  # of the adapter
    files: tuple[NewFile, ...]
    is_probed: bool
    tokenizer_sha256: str | None
    chat_template_sha256: str | None


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What is allowed, from the settings."""

    max_model_bytes: int
    max_open: int  # of one tenant
    expiry: timedelta  # of one that nobody works on


async def begin(
    session: AsyncSession,
    folders: UploadFolders,
    limits: UploadLimits,
    actor: Actor,
    tenant_id: UUID,
    plan: UploadPlan,
) -> AdapterUpload:
    """Make room for an upload.

    Raises:
        AdapterRejectedError: a file that no adapter has.
        InvalidRequestError: not exactly the two files of one.
        BodyTooLargeError: a file is over its cap.
        TooManyUploadsError: the tenant has enough unfinished ones.
        StorageFullError: the disk has no room for it.
    """
    _check_files(plan.files, limits)
    await queries.lock_name(session, "adapter_uploads", str(tenant_id))
    if await source_queries.count_open_uploads(session, tenant_id) >= limits.max_open:
        raise TooManyUploadsError(
            f"There are {limits.max_open} unfinished uploads of this tenant, and no more are allowed: complete or"
            " delete one.",
            retry_after_s=60,
        )
    upload = AdapterUpload(
        id=uuid7(),
        tenant_id=tenant_id,
        name=plan.name,
        is_probed=plan.is_probed,
        tokenizer_sha256=plan.tokenizer_sha256,
        chat_template_sha256=plan.chat_template_sha256,
        files={
            file.name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for file in plan.files
        },
        expires_at=datetime.now(UTC) + limits.expiry,
    )
    folders.make(upload.id, sum(file.size_bytes for file in plan.files))
    session.add(upload)
    await session.flush()
    await session.refresh(upload)
    record(
        session,
        actor,
        "adapter_upload.create",
        "adapter_upload",
        format_id("adapter_upload", upload.id),
        tenant_id=tenant_id,
        detail={"adapter": plan.name},
    )
    return upload


def _check_files(files: tuple[NewFile, ...], limits: UploadLimits) -> None:
    for place, file in enumerate(files):
        try:
            check_file_name(file.name)
        except ArtifactError as error:
            raise AdapterRejectedError(f"files.{place}.name", error.message, error.remedy) from None
        cap = MAX_CONFIG_BYTES if file.name == CONFIG_FILE else limits.max_model_bytes
        if file.size_bytes > cap:
            raise BodyTooLargeError(
                f"files.{place}.size_bytes: {file.name} may have {cap} bytes; use a smaller rank or fewer target"
                " modules.",
                param=f"files.{place}.size_bytes",
            )
    names = [file.name for file in files]
    if sorted(names) != sorted(ADAPTER_FILES):
        raise InvalidRequestError(
            f"files: name {' and '.join(ADAPTER_FILES)}, each once; got {', '.join(names) or 'none'}.",
            param="files",
        )


async def find(session: AsyncSession, tenant_id: UUID, upload_id: str) -> AdapterUpload:
    """One of the tenant's uploads.

    Raises:
        NotFoundError: no such upload of this tenant.
    """
    try:
        found = await source_queries.find_upload(
            session, tenant_id, parse_id("adapter_upload", upload_id)
        )
    except MalformedIdError:
        found = None
    if found is None:
        raise NotFoundError("No such upload.")
    return found


def check_open(upload: AdapterUpload) -> None:
    """Raise unless bytes may still come.

    Raises:
        UploadGoneError: nobody has worked on it for too long.
        ConflictError: it has ended.
    """
    if upload.state != "open":
        raise ConflictError(
            f"This upload is {upload.state}; begin a new one for other bytes.", code="upload_ended"
        )
    if upload.expires_at <= datetime.now(UTC):
        raise UploadGoneError("This upload has expired: nobody worked on it. Begin a new one.")


def size_of(upload: AdapterUpload, file_name: str) -> int:
    """Bytes that a file of it is to have.

    Raises:
        NotFoundError: no such file.
    """
    file: Mapping[str, Any] | None = upload.files.get(file_name)
    if file is None:
        raise NotFoundError(f"No such file in this upload; it has {' and '.join(upload.files)}.")
    return int(file["size_bytes"])


def received(upload: AdapterUpload, locked: LockedUpload) -> Upload:
    """The upload as the checks take it, if all of it is here and is what was announced; reads every byte.

    Raises:
        ConflictError: bytes are missing.
        AdapterRejectedError: a file has another sha256 than was announced.
    """
    parts = [upload.name, repr(upload.is_probed)]
    for name, facts in upload.files.items():
        offset = locked.offset(name)
        if offset != facts["size_bytes"]:
            raise ConflictError(
                f"{name}: {offset} of {facts['size_bytes']} bytes are here; send the rest.",
                param=name,
                code="upload_incomplete",
            )
        digest = _sha256_of(locked.folder / name)
        if facts["sha256"] not in (None, digest):
            raise AdapterRejectedError(
                name,
                f"its sha256 is {digest}, not the {facts['sha256']} that was announced.",
                "It was changed on its way or on your disk: upload it again.",
            )
        parts += [name, digest]
    return Upload(
        folder=locked.folder,
        name=upload.name,
        tokenizer_sha256=upload.tokenizer_sha256,
        chat_template_sha256=upload.chat_template_sha256,
        is_probed=upload.is_probed,
        fingerprint=hashlib.sha256(repr(parts).encode()).digest(),
    )


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()


async def complete(
    session: AsyncSession, actor: Actor, upload: AdapterUpload, version_id: UUID
) -> None:
    """It became this version, in the transaction that made it one."""
    await source_queries.change_upload(
        session, upload.id, ENDED_FOR, state="completed", version_id=version_id
    )
    record(
        session,
        actor,
        "adapter_upload.complete",
        "adapter_upload",
        format_id("adapter_upload", upload.id),
        tenant_id=upload.tenant_id,
        detail={"adapter": upload.name, "version_id": format_id("adapter_version", version_id)},
    )


async def refuse(session: AsyncSession, upload_id: UUID, error: AdapterRejectedError) -> None:
    """It will never be a version, and says why whenever it is asked."""
    told = {"message": error.message, "param": error.param, "code": error.error_code}
    await source_queries.change_upload(session, upload_id, ENDED_FOR, state="refused", error=told)


def refusal_of(upload: AdapterUpload) -> AdapterRejectedError | None:
    """What a refused one was refused for, to be told once more."""
    if upload.error is None:
        return None
    again = AdapterRejectedError("", "", "")
    again.message, again.param = upload.error["message"], upload.error["param"]
    return again


async def delete(
    session: AsyncSession, actor: Actor, tenant_id: UUID, upload: AdapterUpload
) -> None:
    """Forget an upload; its bytes are for after the commit."""
    await source_queries.delete_uploads(session, tenant_id=tenant_id, upload_id=upload.id)
    record(
        session,
        actor,
        "adapter_upload.delete",
        "adapter_upload",
        format_id("adapter_upload", upload.id),
        tenant_id=tenant_id,
        detail={"adapter": upload.name, "state": upload.state},
    )


async def sweep(sessions: SessionFactory, folders: UploadFolders) -> int:
    """Forget expired uploads and delete bytes that belong to none; how many uploads went."""
    async with sessions.begin() as session:
        expired = await source_queries.delete_uploads(session)
    async with sessions() as session:
        orphans = await source_queries.uploads_without_row(session, folders.old_ones())
    for upload_id in {*expired, *orphans}:
        folders.remove(upload_id)
    if expired or orphans:
        log.info("uploads_swept", expired=len(expired), orphans=len(orphans))
    return len(expired)
