"""Deleting a tenant: what is theirs goes at once, what the law wants of a business stays.

Gone: keys and their secrets' MACs, memberships, people who belong to no other tenant, invitations,
grants, webhooks with their deliveries, stored answers, refusals, probe reports of adapters, imports, unfinished
uploads with their bytes, evals, aliases, pins, rollouts and what they would have told, adapters to keep resident,
and every name (tenant, keys, projects, model ids, adapters), which become `deleted-...`. Adapter files go from the
store unless another tenant has uploaded the same ones.

Kept: ledger, invoices, the billing profile that the last invoice is made out to, rollups and the audit
log, which name ids and the model ids of the time; the request log (metadata, never text) until
retention drops its month; revisions without their system prompts and parameters; replies to the operator's
calls under an Idempotency-Key, for a day. Prefixes in an engine's cache cannot be reached without the
tenant's keys and go with the cache.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.errors import ConflictError, InvalidRequestError
from loraplex_platform.evals import queries as eval_queries
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.ids import format_id
from loraplex_platform.registry import source_queries
from loraplex_platform.registry.service import AdapterIntake
from loraplex_platform.registry.upload_files import UploadFolders
from loraplex_platform.tenancy import service as tenancy

log = structlog.get_logger(__name__)

KEPT: Final = (
    "ledger entries, invoices, the billing profile and daily usage: tax and commercial law",
    "audit log: it is append-only, and kept for as long as retention says",
    "request log, without any text: until retention drops its month",
    "replies to the operator's own calls under an Idempotency-Key: for a day",
)


@dataclass(frozen=True, slots=True)
class Erased:
    """What was removed, by kind; and the adapter files whose turn it is now."""

    removed: dict[str, int]
    digests: tuple[str, ...]
    uploads: tuple[UUID, ...] = ()  # unfinished ones, whose bytes are on disk


async def erase(session: AsyncSession, actor: Actor, tenant_id: UUID, confirm: str) -> Erased:
    """Delete a tenant in the caller's transaction; its files are for `remove_files`, after the commit.

    Args:
        confirm: the tenant's slug, so that no slip of an id deletes somebody.

    Raises:
        NotFoundError: no such tenant.
        InvalidRequestError: `confirm` is not its slug.
        ConflictError: it has been deleted before.
    """
    tenant = await tenancy.get_tenant(session, tenant_id)
    if tenant.erased_at is not None:
        raise ConflictError("This tenant has been deleted already.", code="tenant_deleted")
    if confirm != tenant.slug:
        raise InvalidRequestError(
            "confirm: repeat the tenant's slug, to delete it and everything that is its own.",
            param="confirm",
        )
    digests = await _own_digests(session, tenant_id)
    uploads = await source_queries.delete_uploads(session, tenant_id=tenant_id)
    await source_queries.delete_imports(session, tenant_id=tenant_id)
    evals = await eval_queries.erase(session, tenant_id)
    row = await session.execute(text("select loraplex_erase_tenant(:id)"), {"id": tenant_id})
    removed: dict[str, int] | None = row.scalar_one()
    if removed is None:
        raise ConflictError("This tenant has been deleted already.", code="tenant_deleted")
    removed |= {kind: count for kind, count in evals.items() if count}
    record(
        session,
        actor,
        "tenant.delete",
        "tenant",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        detail={"removed": removed, "adapter_files": len(digests)},
        before={"status": tenant.status},
        after={"status": "closed"},
    )
    # What is loaded of it is history.
    session.expire_all()
    return Erased(removed, digests, tuple(uploads))


async def remove_files(intake: AdapterIntake, folders: UploadFolders, erased: Erased) -> int:
    """Delete unfinished uploads and adapter files that nobody else has; how many of these went.

    One that was uploaded within the hour may be on its way to another tenant: the store's sweep looks
    again, as it does for what fails here.
    """
    for upload_id in erased.uploads:
        await asyncio.to_thread(folders.remove, upload_id)
    count = 0
    for digest in erased.digests:
        try:
            count += await intake.forget(digest)
        except OSError as error:
            log_crash("adapter_files_not_deleted", error)
    return count


async def _own_digests(session: AsyncSession, tenant_id: UUID) -> tuple[str, ...]:
    statement = text("select distinct digest from adapter_versions where tenant_id = :id")
    rows = (await session.execute(statement, {"id": tenant_id})).scalars().all()
    return tuple(sorted(rows))
