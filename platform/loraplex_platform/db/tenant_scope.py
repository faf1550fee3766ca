"""A transaction that can see some tenants' rows and nothing else, whatever its queries forget.

Postgres keeps this, not we: `loraplex_tenant` is a role of its own whose row-level security policies
(migration 0009) compare `tenant_id` with the setting `app.tenant_ids`. Without that setting it sees no
row. Processes of the platform stay `loraplex_app`, whose policies say in so many words that it sees all.
Both settings end with the transaction: a pooled connection carries nothing to the next request.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

TENANT_ROLE = "loraplex_tenant"

_ENTER = text(
    "select current_setting('role'), set_config('app.tenant_ids', :ids, true),"
    f" set_config('role', '{TENANT_ROLE}', true)"
)
_LEAVE = text("select set_config('role', :role, true), set_config('app.tenant_ids', '', true)")


async def enter_tenants(session: AsyncSession, tenant_ids: Iterable[UUID]) -> str:
    """From here to the end of the transaction, only these tenants; the role that this was before."""
    ids = "{" + ",".join(str(tenant_id) for tenant_id in sorted(tenant_ids)) + "}"
    row = (await session.execute(_ENTER, {"ids": ids})).one()
    return str(row[0])


async def leave_tenants(session: AsyncSession, role: str) -> None:
    """Back to the role that `enter_tenants` returned."""
    await session.execute(_LEAVE, {"role": role})
