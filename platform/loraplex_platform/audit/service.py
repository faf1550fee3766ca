"""Audit rows: one for every write, in the transaction of the write. No secret ever goes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import AuditLog
from loraplex_platform.db.audit import NO_TENANT
from loraplex_platform.ids import uuid7


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts, and in which request."""

    kind: str  # admin_key | user | system
    id: str | None = None
    request_id: str | None = None


SYSTEM = Actor(kind="system")


def name_of(actor: Actor) -> str:
    """Who did it, in one column: `user usr_...`, `admin_key`, `system`."""
    return actor.kind if actor.id is None else f"{actor.kind} {actor.id}"


def record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    object_kind: str,
    object_id: str | None,
    *,
    tenant_id: UUID | None = None,
    detail: dict[str, Any] | None = None,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    """Add an audit row; it stands or falls with the caller's transaction.

    The database sets its time and links it into the chain of its tenant when the transaction commits.

    Args:
        action: "<object kind>.<verb>", for example "api_key.revoke".
        detail: what it was about, from allow-listed fields; never a secret or a prompt.
        before: of what changed, the fields as they were; None where nothing was there.
        after: the same fields as they are now; None where nothing is left.
    """
    session.add(
        AuditLog(
            id=uuid7(),
            actor_kind=actor.kind,
            actor_id=actor.id,
            request_id=actor.request_id,
            action=action,
            object_kind=object_kind,
            object_id=object_id,
            tenant_id=tenant_id,
            detail=detail or {},
            before=before,
            after=after,
            chain=tenant_id or NO_TENANT,
        )
    )
