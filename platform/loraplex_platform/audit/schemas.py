"""The audit log on the wire."""

from __future__ import annotations

import json
from typing import Any, Literal
from uuid import UUID

from pydantic import Field

from loraplex_platform.control.schemas import Resource, UnixSeconds
from loraplex_platform.db import AuditHead, AuditLog
from loraplex_platform.db.audit import NO_TENANT
from loraplex_platform.ids import format_id

PLATFORM_CHAIN = "platform"

CSV_COLUMNS = (
    "id",
    "at",
    "tenant_id",
    "actor_kind",
    "actor_id",
    "action",
    "object_kind",
    "object_id",
    "request_id",
    "detail",
    "before",
    "after",
    "seq",
    "hash",
)


class AuditEntry(Resource):
    """One change: who made it, in which request, and what it was. Never a secret."""

    object: Literal["audit_entry"] = "audit_entry"
    id: str
    at: UnixSeconds
    tenant_id: str | None = Field(description="null: it concerns the platform itself.")
    actor_kind: str = Field(examples=["user"], description="admin_key, user or system.")
    actor_id: str | None
    action: str = Field(examples=["api_key.revoke"])
    object_kind: str
    object_id: str | None
    request_id: str | None
    detail: dict[str, Any]
    before: dict[str, Any] | None = Field(description="The fields that changed, as they were.")
    after: dict[str, Any] | None = Field(description="The same fields as they were left.")
    seq: int | None = Field(description="Its place in the chain of its tenant, from 1.")
    hash: str | None = Field(description="SHA-256 over this row and the hash before it, in hex.")


class AuditChain(Resource):
    """The newest row of a chain. Kept elsewhere, it shows later that nothing up to it was cut off."""

    object: Literal["audit_chain"] = "audit_chain"
    id: str = Field(description="A tenant's id, or `platform`.")
    seq: int
    hash: str
    first_seq: int = Field(
        description="The oldest row that is kept; before it retention was at work."
    )
    updated_at: UnixSeconds


class AuditLink(Resource):
    """The hash of one row of a chain."""

    object: Literal["audit_link"] = "audit_link"
    chain: str
    seq: int
    hash: str


def chain_name(chain: UUID) -> str:
    """A chain as the API names it."""
    return PLATFORM_CHAIN if chain == NO_TENANT else format_id("tenant", chain)


def show_entry(row: AuditLog) -> AuditEntry:
    """The entry as the API shows it."""
    return AuditEntry(
        id=format_id("audit_entry", row.id),
        at=row.at,
        tenant_id=None if row.tenant_id is None else format_id("tenant", row.tenant_id),
        actor_kind=row.actor_kind,
        actor_id=row.actor_id,
        action=row.action,
        object_kind=row.object_kind,
        object_id=row.object_id,
        request_id=row.request_id,
        detail=row.detail,
        before=row.before,
        after=row.after,
        seq=row.seq,
        hash=None if row.hash is None else row.hash.hex(),
    )


def show_chain(head: AuditHead) -> AuditChain:
    """The chain as the API shows it."""
    return AuditChain(
        id=chain_name(head.chain),
        seq=head.seq,
        hash=head.hash.hex(),
        first_seq=head.first_seq,
        updated_at=head.updated_at,
    )


def csv_row(row: AuditLog) -> list[str | int | None]:
    """The entry as a line of CSV; times as ISO 8601 in UTC."""
    entry = show_entry(row)
    cells: list[str | int | None] = []
    for name in CSV_COLUMNS:
        value = getattr(entry, name)
        if name == "at":
            value = row.at.isoformat(timespec="microseconds")
        elif isinstance(value, dict):
            value = json.dumps(value, ensure_ascii=False, sort_keys=True)
        cells.append(value)
    return cells
