"""The life of an API key: made, changed, rotated, switched off, revoked. Its id outlives its secrets.

Every change raises the key's version, and the database tells the gateways (migration 0006), so that it
holds at the key's next request on every gateway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import ApiKey, KeyModelGrant
from loraplex_platform.errors import ConflictError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.tenancy import key_queries as queries
from loraplex_platform.tenancy import keys
from loraplex_platform.tenancy import queries as tenancy
from loraplex_platform.tenancy.key_schemas import ID_KINDS, NewKey, show_fields, to_time
from loraplex_platform.tenancy.service import project_uuid


@dataclass(frozen=True, slots=True)
class GrantedKey:
    """A key and what it may call: nothing listed means everything."""

    key: ApiKey
    grants: Sequence[KeyModelGrant] = ()


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A key and, this once, its secret."""

    granted: GrantedKey
    secret: str = field(repr=False)

    @property
    def key(self) -> ApiKey:
        """The key itself."""
        return self.granted.key


def key_uuid(text: str) -> UUID:
    """The UUID of a key's id.

    Raises:
        NotFoundError: it is none, which is as good as unknown.
    """
    try:
        return parse_id("api_key", text)
    except MalformedIdError:
        raise NotFoundError("No such key.") from None


async def get_key(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> GrantedKey:
    """One of the tenant's keys.

    Raises:
        NotFoundError: no such key of this tenant.
    """
    key = await queries.find_key(session, tenant_id, key_id)
    if key is None:
        raise NotFoundError("No such key.")
    return await _with_grants(session, key)


async def create_key(
    session: AsyncSession, actor: Actor, pepper: SecretStr, tenant_id: UUID, new: NewKey
) -> NewSecret:
    """Make a key; only the MAC of its secret is stored.

    Raises:
        NotFoundError: project, owner or something granted is not the tenant's.
        ConflictError: the project is archived.
    """
    minted = keys.mint("sk")
    columns, grants = await _resolve(
        session,
        tenant_id,
        {
            "project_id": new.project_id,
            "owner_id": new.owner_id,
            "grants": None if new.grants is None else [grant.model_dump() for grant in new.grants],
        },
    )
    key = ApiKey(
        id=uuid7(),
        tenant_id=tenant_id,
        name=new.name,
        public_id=minted.public_id,
        last4=minted.last4,
        scopes=new.scopes,
        ip_allow=new.ip_allow,
        expires_at=new.expires_at_time,
        created_by=actor.id or actor.kind,
        **columns,
    )
    session.add(key)
    await session.flush()
    await queries.insert_secret(session, key.id, keys.mac(pepper, minted.secret))
    if grants:
        await queries.replace_grants(session, tenant_id, key.id, grants)
    await session.refresh(key)
    granted = await _with_grants(session, key)
    shown = show_fields(key, granted.grants) | {"public_id": minted.public_id}
    _record(session, actor, "create", key, after=shown)
    return NewSecret(granted, minted.secret)


async def update_key(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    key_id: UUID,
    changes: dict[str, Any],
    if_match: int | None,
) -> GrantedKey:
    """Change what is named in `changes`, as the API writes it; nothing happens where nothing differs.

    Raises:
        NotFoundError: no such key, or project, owner or something granted is not the tenant's.
        VersionConflictError: it is not the version of If-Match.
        ConflictError: the key is revoked, or the project archived.
    """
    await _share_owner(session, tenant_id, changes.get("owner_id"))
    key = await _lock(session, tenant_id, key_id)
    granted = await _with_grants(session, key)
    before = show_fields(key, granted.grants)
    if changes.get("grants"):
        # In the order in which they are kept, each once.
        unique = {(grant["kind"], grant["id"]): grant for grant in changes["grants"]}
        changes = changes | {"grants": [unique[name] for name in sorted(unique)]}
    check_version(if_match, key.version, changes, before)
    _refuse_revoked(key)
    wanted = {name: value for name, value in changes.items() if before[name] != value}
    if not wanted:
        return granted
    columns, grants = await _resolve(session, tenant_id, wanted)
    if "expires_at" in wanted:
        columns["expires_at"] = to_time(wanted["expires_at"])
    plain = {
        name: wanted[name] for name in ("name", "status", "scopes", "ip_allow") if name in wanted
    }
    await queries.update_key(session, tenant_id, key_id, plain | columns)
    if grants is not None:
        await queries.replace_grants(session, tenant_id, key_id, grants)
    key = await _lock(session, tenant_id, key_id)
    was = {name: before[name] for name in wanted}
    _record(session, actor, "update", key, before=was, after=wanted)
    return await _with_grants(session, key)


async def rotate_key(
    session: AsyncSession,
    actor: Actor,
    pepper: SecretStr,
    tenant_id: UUID,
    key_id: UUID,
    *,
    grace_s: int,
) -> NewSecret:
    """A new secret for a key; the one of before works for `grace_s` more seconds, older ones end now.

    Raises:
        NotFoundError: no such key of this tenant.
        ConflictError: the key is revoked or has expired.
    """
    key = await _lock(session, tenant_id, key_id)
    _refuse_revoked(key)
    if key.expires_at is not None and key.expires_at <= await tenancy.now(session):
        raise ConflictError("This key has expired: give it another expires_at first.")
    minted = keys.mint("sk", key.public_id)
    await queries.end_secrets(session, key_id, timedelta(seconds=grace_s))
    await queries.insert_secret(session, key_id, keys.mac(pepper, minted.secret))
    await queries.update_key(session, tenant_id, key_id, {"last4": minted.last4})
    key = await _lock(session, tenant_id, key_id)
    _record(session, actor, "rotate", key, {"grace_s": grace_s})
    return NewSecret(await _with_grants(session, key), minted.secret)


async def revoke_key(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    key_id: UUID,
    *,
    reason: str | None = None,
) -> None:
    """Revoke one of the tenant's keys; a revoked one stays so.

    Raises:
        NotFoundError: no such key of this tenant.
    """
    key = await _lock(session, tenant_id, key_id)
    before = key.status
    if before == "revoked":
        return
    await queries.update_key(
        session,
        tenant_id,
        key_id,
        {
            "status": "revoked",
            "revoked_at": await tenancy.now(session),
            "revoke_reason": reason,
        },
    )
    _record(
        session,
        actor,
        "revoke",
        key,
        None if reason is None else {"reason": reason},
        before={"status": before},
        after={"status": "revoked"},
    )


async def revoke_keys_of(
    session: AsyncSession, actor: Actor, tenant_id: UUID, user_id: UUID, *, reason: str
) -> int:
    """Revoke a person's own keys; how many. Services' keys stay, whoever made them."""
    owned = await queries.owned_by(session, tenant_id, user_id)
    for key_id in owned:
        await revoke_key(session, actor, tenant_id, key_id, reason=reason)
    return len(owned)


async def _resolve(
    session: AsyncSession, tenant_id: UUID, changes: dict[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, UUID]] | None]:
    """Ids of the API as columns, and grants as rows: all of them the tenant's own, or the platform's.

    Returns:
        The columns of `project_id` and `owner_id` and the grants, as far as `changes` has them;
        grants that are not in it are None, and no grants (everything allowed) an empty list.
    """
    columns: dict[str, Any] = {}
    if "project_id" in changes:
        columns["project_id"] = await _project(session, tenant_id, changes["project_id"])
    if "owner_id" in changes:
        columns["owner_user_id"] = await _owner(session, tenant_id, changes["owner_id"])
    if "grants" not in changes:
        return columns, None
    grants = [
        (grant["kind"], await _target(session, tenant_id, grant["kind"], grant["id"], place))
        for place, grant in enumerate(changes["grants"] or [])
    ]
    return columns, list(dict.fromkeys(grants))


async def _project(session: AsyncSession, tenant_id: UUID, text: str | None) -> UUID | None:
    if text is None:
        return None
    project = await tenancy.share_project(
        session, tenant_id, project_uuid(text, param="project_id")
    )
    if project is None:
        raise NotFoundError("No such project.", param="project_id")
    if project.archived_at is not None:
        raise ConflictError(
            "project_id: this project is archived; choose another one.", param="project_id"
        )
    return project.id


async def _share_owner(session: AsyncSession, tenant_id: UUID, text: str | None) -> None:
    """Members before keys: that is the order in which whoever removes a member locks them."""
    if text is not None:
        with contextlib.suppress(NotFoundError):  # said once the key is known
            await _owner(session, tenant_id, text)


async def _owner(session: AsyncSession, tenant_id: UUID, text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        user_id = parse_id("user", text)
    except MalformedIdError:
        user_id = None
    if user_id is None or not await queries.share_member(session, tenant_id, user_id):
        raise NotFoundError("owner_id: no such member of this tenant.", param="owner_id")
    return user_id


async def _target(session: AsyncSession, tenant_id: UUID, kind: str, text: str, place: int) -> UUID:
    try:
        target_id = parse_id(ID_KINDS[kind], text)  # type: ignore[index]  # checked by the schema
    except MalformedIdError:
        target_id = None
    if target_id is None or not await queries.is_grantable(session, tenant_id, kind, target_id):
        param = f"grants.{place}.id"
        raise NotFoundError(f"{param}: the tenant has no such {kind}.", param=param)
    return target_id


async def _lock(session: AsyncSession, tenant_id: UUID, key_id: UUID) -> ApiKey:
    key = await queries.lock_key(session, tenant_id, key_id)
    if key is None:
        raise NotFoundError("No such key.")
    return key


async def _with_grants(session: AsyncSession, key: ApiKey) -> GrantedKey:
    found = await queries.grants_of(session, key.tenant_id, [key.id])
    return GrantedKey(key, found.get(key.id, ()))


def _refuse_revoked(key: ApiKey) -> None:
    if key.status == "revoked":
        raise ConflictError("This key is revoked, which is for ever: make a new one.")


def _record(
    session: AsyncSession,
    actor: Actor,
    verb: str,
    key: ApiKey,
    detail: dict[str, Any] | None = None,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        session,
        actor,
        f"api_key.{verb}",
        "api_key",
        format_id("api_key", key.id),
        tenant_id=key.tenant_id,
        detail=detail,
        before=before,
        after=after,
    )
