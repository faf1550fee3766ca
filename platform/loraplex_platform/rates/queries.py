"""SQL of the rates: what runs now, to fill an empty Redis from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.quotas.records import ScopeKind

_RUNNING = text("""
select requests.id, requests.tenant_id, requests.key_id, requests.project_id,
    requests.deployment_id, deployments.tenant_id as deployment_owner,
    adapter_versions.adapter_id, adapter_versions.tenant_id as adapter_owner
from requests
left join deployments on deployments.id = requests.deployment_id
left join adapter_versions on adapter_versions.id = requests.adapter_version_id
where requests.state = 'reserved' and requests.kind = 'user' and requests.lease_until > now()
    and (cast(:tenant_id as uuid) is null or requests.tenant_id = cast(:tenant_id as uuid))
""")


@dataclass(frozen=True, slots=True)
class Place:
    """A request that runs, in one of the scopes that it counts in."""

    request_id: UUID
    scope_kind: ScopeKind
    scope_id: UUID | None


async def running_places(session: AsyncSession, owner: UUID | None) -> Sequence[Place]:
    """Where the running requests count: in scopes of that tenant; None: in those that are shared."""
    rows = (await session.execute(_RUNNING, {"tenant_id": owner})).all()
    return [place for row in rows for place in _places(row, owner)]


def _places(row: Row[Any], owner: UUID | None) -> list[Place]:
    scopes: list[tuple[ScopeKind, UUID | None, UUID | None]] = [
        ("platform", None, None),
        ("tenant", row.tenant_id, row.tenant_id),
        ("key", row.key_id, row.tenant_id),
        ("project", row.project_id, row.tenant_id),
        ("deployment", row.deployment_id, row.deployment_owner),
        ("adapter", row.adapter_id, row.adapter_owner),
    ]
    return [
        Place(row.id, kind, scope_id)
        for kind, scope_id, owner_id in scopes
        if owner_id == owner and (scope_id is not None or kind == "platform")
    ]
