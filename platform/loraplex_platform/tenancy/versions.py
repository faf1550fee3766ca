"""Tell every gateway that a key or a tenant is another one now: a message in the change's transaction.

Gateways compare versions at each admission; these messages are how the newest ones get to Redis when
the writer itself could not put them there.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.outbox.service import enqueue

KEY_TOPIC = "key_version"
TENANT_TOPIC = "tenant_version"


async def announce_key(session: AsyncSession, tenant_id: UUID, key_id: UUID, version: int) -> None:
    """A key has this version (`api_keys.version`)."""
    await enqueue(
        session,
        KEY_TOPIC,
        f"{key_id.hex}:{version}",
        {"tenant_id": str(tenant_id), "key_id": str(key_id), "version": version},
    )


async def announce_tenant(session: AsyncSession, tenant_id: UUID, version: int) -> None:
    """A tenant has this version (`tenants.row_version`): its status may be another one."""
    await enqueue(
        session,
        TENANT_TOPIC,
        f"{tenant_id.hex}:{version}",
        {"tenant_id": str(tenant_id), "version": version},
    )
