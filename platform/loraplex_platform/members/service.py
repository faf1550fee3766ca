"""Members come in by invitation, get another role, and leave. A tenant never loses its last owner.

An invitation is a token that its maker hands to the person. It becomes a membership only when whoever
holds it also proves to be the account of the invited e-mail, by its password or an open session: so
nobody who made an account in somebody's name gets into a tenant that invites that person later, and
nobody learns from an invitation whether an account exists.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.auth import Principal
from loraplex_platform.control.etag import check_version
from loraplex_platform.control.permissions import TenantRole, may_give
from loraplex_platform.db import Invitation, Membership, User
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.members import queries
from loraplex_platform.members.queries import Person
from loraplex_platform.members.schemas import NewInvitation
from loraplex_platform.tenancy import key_service
from loraplex_platform.tenancy import queries as tenancy
from loraplex_platform.users import queries as users
from loraplex_platform.users import throttle
from loraplex_platform.users.passwords import MIN_PASSWORD_CHARS, Passwords
from loraplex_platform.users.service import BadCredentialsError

_TOKEN_BYTES = 32


class InvitationNotFoundError(NotFoundError):
    """The token is unknown, used up, withdrawn or too old; which of them is not told."""

    code = "invitation_not_found"


@dataclass(frozen=True, slots=True)
class NewlyInvited:
    """An invitation and, this once, its token."""

    invitation: Invitation
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Member:
    """A membership and what is shown of its account."""

    membership: Membership
    person: Person


async def get_member(session: AsyncSession, tenant_id: UUID, user_id: str) -> Member:
    """One of the tenant's members.

    Raises:
        NotFoundError: no such member of this tenant.
    """
    found = await session.get(Membership, (tenant_id, _user_uuid(user_id)))
    if found is None:
        raise NotFoundError("No such member.")
    return await _with_person(session, found)


async def set_role(
    session: AsyncSession,
    principal: Principal,
    actor: Actor,
    tenant_id: UUID,
    *,
    user_id: str,
    role: TenantRole,
    if_match: int | None,
) -> Member:
    """Give a member another role.

    Raises:
        NotFoundError: no such member of this tenant.
        VersionConflictError: it is not the version of If-Match.
        PermissionDeniedError: the old or the new role is above the caller's own.
        ConflictError: they are the last owner.
    """
    owners = await queries.lock_owners(session, tenant_id)
    member = await _lock(session, tenant_id, user_id)
    check_version(if_match, member.row_version, {"role": role}, {"role": member.role})
    before: TenantRole = member.role  # type: ignore[assignment]  # checked by the table
    if before == role:
        return await _with_person(session, member)
    _check_may_give(principal, tenant_id, before)
    _check_may_give(principal, tenant_id, role)
    _keep_an_owner(owners, member)
    member.role = role
    member.row_version += 1
    await session.flush()
    _record(session, actor, "member.update", member, before={"role": before}, after={"role": role})
    return await _with_person(session, member)


async def remove(
    session: AsyncSession,
    principal: Principal,
    actor: Actor,
    tenant_id: UUID,
    *,
    user_id: str,
    if_match: int | None,
) -> None:
    """End a membership, and the keys that are this person's own in the tenant.

    Raises:
        NotFoundError: no such member of this tenant.
        VersionConflictError: it is not the version of If-Match.
        PermissionDeniedError: their role is above the caller's own.
        ConflictError: they are the last owner.
    """
    owners = await queries.lock_owners(session, tenant_id)
    member = await _lock(session, tenant_id, user_id)
    check_version(if_match, member.row_version, {}, {})
    _check_may_give(principal, tenant_id, member.role)  # type: ignore[arg-type]  # checked by the table
    _keep_an_owner(owners, member)
    num_keys = await key_service.revoke_keys_of(
        session, actor, tenant_id, member.user_id, reason="their owner left the tenant"
    )
    _record(
        session,
        actor,
        "member.remove",
        member,
        {"revoked_keys": num_keys},
        before={"role": member.role},
    )
    await queries.delete_member(session, tenant_id, member.user_id)


async def leave_all(session: AsyncSession, actor: Actor, user_id: UUID, *, reason: str) -> None:
    """End a person's memberships and their own keys everywhere, also where they are the last owner."""
    for member in await queries.lock_memberships(session, user_id):
        num_keys = await key_service.revoke_keys_of(
            session, actor, member.tenant_id, user_id, reason=reason
        )
        _record(
            session,
            actor,
            "member.remove",
            member,
            {"revoked_keys": num_keys, "reason": reason},
            before={"role": member.role},
        )
        await queries.delete_member(session, member.tenant_id, user_id)


# ---------------------------------------------------------------------------- invitations


async def invite(
    session: AsyncSession,
    principal: Principal,
    actor: Actor,
    session_key: SecretStr,
    tenant_id: UUID,
    new: NewInvitation,
) -> NewlyInvited:
    """Let somebody in who proves to be this e-mail's. An earlier invitation of theirs ends.

    Raises:
        PermissionDeniedError: the role is above the caller's own.
        ConflictError: they are a member already.
    """
    _check_may_give(principal, tenant_id, new.role)
    pending = await queries.pending_role(session, tenant_id, new.email)
    if pending is not None:  # it ends below
        _check_may_give(principal, tenant_id, pending)
    if await queries.is_member(session, tenant_id, new.email):
        raise ConflictError(f"email: {new.email} is a member already.", param="email")
    await queries.withdraw_of_email(session, tenant_id, new.email)
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    invitation = Invitation(
        id=uuid7(),
        tenant_id=tenant_id,
        email=new.email,
        role=new.role,
        token_mac=_mac(session_key, token),
        expires_at=await tenancy.now(session) + timedelta(seconds=new.expires_in_s),
    )
    session.add(invitation)
    await session.flush()
    await session.refresh(invitation)
    record(
        session,
        actor,
        "invitation.create",
        "invitation",
        format_id("invitation", invitation.id),
        tenant_id=tenant_id,
        detail={"email": new.email, "role": new.role},
    )
    return NewlyInvited(invitation, token)


async def withdraw(
    session: AsyncSession,
    principal: Principal,
    actor: Actor,
    tenant_id: UUID,
    invitation_id: str,
) -> None:
    """Take an invitation back; one that is over stays so.

    Raises:
        NotFoundError: no such invitation of this tenant.
        PermissionDeniedError: its role is above the caller's own.
    """
    try:
        invitation_uuid = parse_id("invitation", invitation_id)
    except MalformedIdError:
        raise NotFoundError("No such invitation.") from None
    statement = queries.invitations_of(tenant_id).where(Invitation.id == invitation_uuid)
    invitation = await session.scalar(statement)
    if invitation is None:
        raise NotFoundError("No such invitation.")
    _check_may_give(principal, tenant_id, invitation.role)  # type: ignore[arg-type]  # by the table
    if await queries.withdraw(session, tenant_id, invitation_uuid):
        record(
            session, actor, "invitation.revoke", "invitation", invitation_id, tenant_id=tenant_id
        )


async def accept(
    sessions: SessionFactory,
    passwords: Passwords,
    session_key: SecretStr,
    *,
    token: str,
    password: str | None,
    logged_in: User | None,
    address: str,
    request_id: str,
) -> Member:
    """Turn an invitation into a membership of the account with its e-mail, which is made if need be.

    Args:
        password: of that account, or for it if it is new; not needed where `logged_in` is that one.
        logged_in: whose session the request carries.
        address: where it comes from: guesses of passwords are throttled as at login.

    Raises:
        InvitationNotFoundError: nothing to accept with this token.
        InvalidRequestError: a password is needed, or a new one is too short.
        TooManyAttemptsError, BadCredentialsError: as at login.
    """
    async with sessions() as session:
        invitation = await queries.find_pending(session, _mac(session_key, token))
        if invitation is None:
            raise InvitationNotFoundError(
                "This invitation cannot be accepted: it is unknown, used, withdrawn or too old. Ask "
                "for a new one."
            )
        user = await users.find_user_by_email(session, invitation.email)
    is_theirs = logged_in is not None and user is not None and logged_in.id == user.id
    password_hash = None
    if not is_theirs:
        if password is None:
            raise InvalidRequestError(
                f"password: it is required, of the account {invitation.email} or for a new one; or "
                "log in with that account first.",
                param="password",
            )
        if user is None:
            password_hash = await _new_password(passwords, password)
        else:
            await _check_password(sessions, passwords, user, password, address)

    async with sessions() as session:
        if not await queries.accept(session, invitation.id):
            raise InvitationNotFoundError("This invitation was accepted or withdrawn just now.")
        if user is None:
            user = User(id=uuid7(), email=invitation.email, password_hash=password_hash)
            if not await users.insert_user(session, user):
                raise BadCredentialsError("Somebody made this account just now: try again.")
        actor = Actor("user", format_id("user", user.id), request_id)
        if password_hash is not None:
            detail = {"email": user.email, "role": None}
            record(session, actor, "user.create", "user", actor.id, detail=detail)
        await queries.insert_member(session, invitation.tenant_id, user.id, invitation.role)
        member = await session.get_one(Membership, (invitation.tenant_id, user.id))
        _record(session, actor, "member.join", member, after={"role": member.role})
        if not is_theirs and password_hash is None:
            await throttle.forgive(session, user.email, address)
        shown = await _with_person(session, member)
        await session.commit()
    return shown


async def _new_password(passwords: Passwords, password: str) -> str:
    if len(password) < MIN_PASSWORD_CHARS:
        raise InvalidRequestError(
            f"password: it must have at least {MIN_PASSWORD_CHARS} characters.", param="password"
        )
    return await passwords.hash(password)


async def _check_password(
    sessions: SessionFactory, passwords: Passwords, user: User, password: str, address: str
) -> None:
    await throttle.admit(sessions, user.email, address)
    is_right = await passwords.verify(user.password_hash, password)
    if not is_right or user.disabled_at is not None:
        raise BadCredentialsError(
            "There is an account with the invited e-mail, and this is not its password."
        )


def _mac(session_key: SecretStr, token: str) -> bytes:
    key = session_key.get_secret_value().encode()
    return hmac.digest(key, b"invitation:" + token.encode("utf-8", "surrogateescape"), "sha256")


def _user_uuid(text: str) -> UUID:
    try:
        return parse_id("user", text)
    except MalformedIdError:
        raise NotFoundError("No such member.") from None


async def _lock(session: AsyncSession, tenant_id: UUID, user_id: str) -> Membership:
    member = await queries.lock_member(session, tenant_id, _user_uuid(user_id))
    if member is None:
        raise NotFoundError("No such member.")
    return member


async def _with_person(session: AsyncSession, member: Membership) -> Member:
    return Member(member, (await queries.people(session, [member.user_id]))[member.user_id])


def _check_may_give(principal: Principal, tenant_id: UUID, role: TenantRole) -> None:
    if not may_give(principal.platform_role, principal.memberships.get(tenant_id), role):
        raise PermissionDeniedError("Only an owner may make, change or remove an owner.")


def _keep_an_owner(owners: Sequence[UUID], member: Membership) -> None:
    if list(owners) == [member.user_id]:
        raise ConflictError("This is the tenant's last owner: make somebody else an owner first.")


def _record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    member: Membership,
    detail: dict[str, Any] | None = None,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        session,
        actor,
        action,
        "member",
        format_id("user", member.user_id),
        tenant_id=member.tenant_id,
        detail=detail,
        before=before,
        after=after,
    )
