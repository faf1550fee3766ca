"""Aliases: movable names of an adapter's versions, and the deployments that follow them.

One transaction moves an alias and all deployments that follow it. Where each pointed from when on is kept by
triggers (`adapter_alias_events`, `deployment_events`), so that no way past it exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import AdapterAlias, AdapterVersion
from loraplex_platform.errors import InvalidRequestError, NotFoundError
from loraplex_platform.ids import format_id
from loraplex_platform.registry import deployments, queries, revisions
from loraplex_platform.registry.errors import InUseError
from loraplex_platform.registry.queries import DeployedRevision

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Moved:
    """An alias, the version that it names, and the deployments that went with it."""

    alias: AdapterAlias
    version: AdapterVersion
    deployments: list[DeployedRevision]


async def put(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    adapter_id: UUID,
    name: str,
    version_id: str,
    if_match: int | None,
) -> Moved:
    """Have the alias name a version; deployments that follow it answer with it from the next request on.

    Raises:
        InvalidRequestError: not a usable name; a version of another adapter.
        NotFoundError: no such version of this tenant.
        ConflictError: the version is retired; the alias has changed since it was read; a rollout of a
            deployment that follows it is on its way.
    """
    if NAME_PATTERN.fullmatch(name) is None:
        raise InvalidRequestError(
            "alias: use 1 to 64 lower-case letters, digits, '.', '_' or '-', beginning with a letter or digit.",
            param="alias",
        )
    await queries.lock_name(session, "alias", str(adapter_id), name)
    version = await revisions.get_usable_version(session, tenant_id, version_id)
    if version.adapter_id != adapter_id:
        raise InvalidRequestError(
            "version_id: this is a version of another adapter; an alias names its own adapter's.",
            param="version_id",
        )
    alias = await queries.find_alias(session, tenant_id, adapter_id, name)
    shown = format_id("adapter_version", version.id)
    before = None if alias is None else _shown(alias)
    check_version(
        if_match,
        0 if alias is None else alias.row_version,
        {"version_id": shown},
        {"version_id": before},
    )
    if alias is None:
        alias = AdapterAlias(
            adapter_id=adapter_id, alias=name, tenant_id=tenant_id, version_id=version.id
        )
        session.add(alias)
    elif alias.version_id != version.id:
        alias.version_id, alias.updated_at = version.id, func.now()
        alias.row_version += 1
    else:
        return Moved(alias, version, [])
    await session.flush()
    await session.refresh(alias)
    moved = await deployments.follow_alias(session, actor, alias, version)
    record(
        session,
        actor,
        "adapter_alias.put",
        "adapter",
        format_id("adapter", adapter_id),
        tenant_id=tenant_id,
        detail={"alias": name, "deployments": [item.deployment.public_name for item in moved]},
        before=None if before is None else {"version_id": before},
        after={"version_id": shown},
    )
    return Moved(alias, version, moved)


async def get(
    session: AsyncSession, tenant_id: UUID, adapter_id: UUID, name: str
) -> tuple[AdapterAlias, AdapterVersion]:
    """An alias and the version that it names.

    Raises:
        NotFoundError: the adapter has no such alias.
    """
    alias = None
    if NAME_PATTERN.fullmatch(name) is not None:
        alias = await queries.find_alias(session, tenant_id, adapter_id, name)
    if alias is None:
        raise NotFoundError("No such alias.")
    return alias, await session.get_one(AdapterVersion, alias.version_id)


async def remove(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    adapter_id: UUID,
    name: str,
    if_match: int | None,
) -> None:
    """Take the alias away; its history stays.

    Raises:
        NotFoundError: the adapter has no such alias.
        InUseError: deployments follow it.
        ConflictError: it has changed since it was read.
    """
    await queries.lock_name(session, "alias", str(adapter_id), name)
    alias, _ = await get(session, tenant_id, adapter_id, name)
    check_version(if_match, alias.row_version, {}, {})
    followers = await queries.followers_of(session, adapter_id, name)
    if followers:
        names = ", ".join(deployment.public_name for deployment in followers)
        raise InUseError(
            f"Deployments follow this alias: {names}. Deploy a version there first, or archive them."
        )
    record(
        session,
        actor,
        "adapter_alias.delete",
        "adapter",
        format_id("adapter", adapter_id),
        tenant_id=tenant_id,
        detail={"alias": name},
        before={"version_id": _shown(alias)},
    )
    await session.delete(alias)
    await session.flush()


def _shown(alias: AdapterAlias) -> str:
    return format_id("adapter_version", alias.version_id)
