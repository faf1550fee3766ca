"""Users, and logins as server-side sessions: the cookie holds a random token, the table its MAC."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.permissions import TenantRole
from loraplex_platform.db import Session, User
from loraplex_platform.errors import ConflictError, InvalidApiKeyError, NotFoundError
from loraplex_platform.ids import MalformedIdError, format_id, parse_id, uuid7
from loraplex_platform.settings import ControlSettings
from loraplex_platform.users import queries, throttle
from loraplex_platform.users.oidc import Identity, OidcLoginError
from loraplex_platform.users.passwords import Passwords
from loraplex_platform.users.schemas import NewUser

_TOKEN_BYTES = 32
_MAX_EMAIL_CHARS = 254


class BadCredentialsError(InvalidApiKeyError):
    """E-mail and password do not belong together; which of them is wrong is not told."""

    code = "bad_credentials"


@dataclass(frozen=True, slots=True)
class Login:
    """A live session and whose it is."""

    session: Session
    user: User


@dataclass(frozen=True, slots=True)
class NewLogin:
    """A login just made; `token` goes into the cookie and nowhere else."""

    login: Login
    token: str


async def create_user(
    session: AsyncSession, passwords: Passwords, actor: Actor, new: NewUser
) -> User:
    """Add a user.

    Raises:
        ConflictError: the e-mail is taken.
    """
    user = User(
        id=uuid7(),
        email=new.email,
        password_hash=await passwords.hash(new.password),
        platform_role=new.role,
        email_proven_at=datetime.now(UTC),
    )
    if not await queries.insert_user(session, user):
        raise ConflictError(f"email: {new.email} is taken; use another one.", param="email")
    record(
        session,
        actor,
        "user.create",
        "user",
        format_id("user", user.id),
        detail={"email": new.email, "role": new.role},
    )
    return await queries.get_user(session, user.id)


async def set_enabled(
    session: AsyncSession, actor: Actor, user_id: str, *, is_enabled: bool
) -> User:
    """Let a user log in again, or no more; switching off ends their sessions at once.

    Raises:
        NotFoundError: no such user.
        ConflictError: they are the last platform admin.
    """
    admins = await queries.lock_admins(session)
    user = await _lock(session, user_id)
    if (user.disabled_at is None) == is_enabled:
        return user
    if not is_enabled:
        _keep_an_admin(admins, user)
    user.disabled_at = None if is_enabled else datetime.now(UTC)
    await session.flush()
    if not is_enabled:
        await queries.revoke_sessions_of(session, user.id)
    _record(session, actor, "user.enable" if is_enabled else "user.disable", user)
    return user


async def remove_role(session: AsyncSession, actor: Actor, user_id: str) -> User:
    """Take a user's role on the platform away, from their next request on; memberships stay.

    Raises:
        NotFoundError: no such user.
        ConflictError: they are the last platform admin.
    """
    admins = await queries.lock_admins(session)
    user = await _lock(session, user_id)
    before = user.platform_role
    if before is None:
        return user
    _keep_an_admin(admins, user)
    user.platform_role = None
    await session.flush()
    _record(session, actor, "user.remove_role", user, {"before": before})
    return user


async def reset_password(
    session: AsyncSession, passwords: Passwords, actor: Actor, user_id: str, password: str
) -> User:
    """Give a user another password; what they logged in with before, sessions included, is over.

    What they are stays: role, memberships and their own keys. Whoever asks for a reset has lost a
    password, and whoever should lose access is removed or disabled, which is another decision.

    Raises:
        NotFoundError: no such user.
    """
    password_hash = await passwords.hash(password)  # before anything is locked
    user = await _lock(session, user_id)
    await forget_logins(session, user)
    user.password_hash = password_hash
    await session.flush()
    _record(session, actor, "user.reset_password", user)
    return user


async def end_sessions(session: AsyncSession, actor: Actor, user_id: str) -> None:
    """Log a user out everywhere.

    Raises:
        NotFoundError: no such user.
    """
    user = await _lock(session, user_id)
    await queries.revoke_sessions_of(session, user.id)
    _record(session, actor, "user.log_out", user)


async def _lock(session: AsyncSession, user_id: str) -> User:
    try:
        user = await queries.lock_user(session, parse_id("user", user_id))
    except MalformedIdError:
        user = None
    if user is None:
        raise NotFoundError("No such user.")
    return user


def _keep_an_admin(admins: Sequence[UUID], user: User) -> None:
    if list(admins) == [user.id]:
        raise ConflictError("This is the last platform admin: make somebody else one first.")


def _record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    user: User,
    detail: dict[str, Any] | None = None,
) -> None:
    detail = {"email": user.email} | (detail or {})
    record(session, actor, action, "user", format_id("user", user.id), detail=detail)


async def log_in(
    sessions: async_sessionmaker[AsyncSession],
    passwords: Passwords,
    settings: ControlSettings,
    *,
    email: str,
    password: str,
    address: str,
    request_id: str,
) -> NewLogin:
    """Check the password and open a session.

    Raises:
        TooManyAttemptsError: throttled.
        BadCredentialsError: no such user, a wrong password, or a disabled user.
    """
    email = email.strip().lower()
    await throttle.admit(sessions, email, address)
    async with sessions() as session:
        user = await queries.find_user_by_email(session, email)
    # No connection is held while hashing.
    is_right = await passwords.verify(None if user is None else user.password_hash, password)
    if user is None or not is_right or user.disabled_at is not None:
        raise BadCredentialsError("E-mail or password is wrong.")

    rehashed = None
    if user.password_hash is not None and passwords.is_outdated(user.password_hash):
        rehashed = await passwords.hash(password)
    async with sessions() as session:
        now = await queries.lock_user(session, user.id)
        # Whoever reset or disabled the account meanwhile has ended its sessions, this one included.
        if now is None or now.disabled_at is not None or now.password_hash != user.password_hash:
            raise BadCredentialsError("E-mail or password is wrong.")
        await throttle.forgive(session, email, address)
        if rehashed is not None:
            now.password_hash = rehashed
        new = _open_session(session, settings, now, request_id, method="password")
        await session.commit()
    return new


async def log_in_as(
    sessions: async_sessionmaker[AsyncSession],
    settings: ControlSettings,
    identity: Identity,
    request_id: str,
) -> NewLogin:
    """Open a session for whoever a login provider says this is; a new person gets an account.

    An account is found by issuer and subject alone. One that has the same e-mail but another identity, or
    only a password, is somebody else until they tie the two together themselves (`link_identity`); unless
    nobody ever proved that account's e-mail: then it is taken over by whom the provider knows as its
    owner, with the memberships, which were given to the e-mail, and without what others log in with.

    Raises:
        OidcLoginError: the account is disabled, or the e-mail is taken or not verified.
    """
    async with sessions() as session:
        user = await queries.find_user_by_identity(session, identity)
        if user is None:
            user = await _make_user_of(session, identity, request_id)
        user = await queries.lock_user(session, user.id)
        if user is None or not _is_of(user, identity):
            raise OidcLoginError("This account was reset just now. Please start again.")
        if user.disabled_at is not None:
            raise OidcLoginError("This account is disabled. Ask the operator of this service.")
        new = _open_session(session, settings, user, request_id, method="oidc")
        await session.commit()
    return new


async def _make_user_of(session: AsyncSession, identity: Identity, request_id: str) -> User:
    if identity.email is None or len(identity.email) > _MAX_EMAIL_CHARS:
        raise OidcLoginError("Your login provider has not verified an e-mail address of yours.")
    user = User(
        id=uuid7(),
        email=identity.email,
        oidc_issuer=identity.issuer,
        oidc_subject=identity.subject,
        email_proven_at=datetime.now(UTC),
    )
    if not await queries.insert_user(session, user):
        taken = await queries.get_user_by_email(session, identity.email)
        if await _take_over(session, taken.id, identity, request_id):
            return taken
        raise OidcLoginError(
            "There is an account with your e-mail address already. Log in with its password, then "
            "open /login/oidc/link to use this provider from then on."
        )
    user_id = format_id("user", user.id)
    actor = Actor("user", user_id, request_id)
    detail = {"email": identity.email, "role": None, "issuer": identity.issuer}
    record(session, actor, "user.create", "user", user_id, detail=detail)
    return await queries.get_user(session, user.id)


def _is_of(user: User, identity: Identity) -> bool:
    return (user.oidc_issuer, user.oidc_subject) == (identity.issuer, identity.subject)


async def _take_over(
    session: AsyncSession, user_id: UUID, identity: Identity, request_id: str
) -> bool:
    """Give an account whose e-mail nobody proved to whom it is; False if somebody did."""
    user = await queries.lock_user(session, user_id)
    if user is None or user.email_proven_at is not None:
        return False
    await forget_logins(session, user)
    user.oidc_issuer, user.oidc_subject = identity.issuer, identity.subject
    user.email_proven_at = datetime.now(UTC)
    await session.flush()
    actor = Actor("user", format_id("user", user.id), request_id)
    detail = {"email": user.email, "issuer": identity.issuer}
    record(session, actor, "user.take_over", "user", format_id("user", user.id), detail=detail)
    return True


async def forget_logins(session: AsyncSession, user: User) -> None:
    """Take everything from a locked user that anybody logs in with: password, identity, sessions."""
    user.password_hash = None
    user.oidc_issuer = user.oidc_subject = None
    await session.flush()
    await queries.revoke_sessions_of(session, user.id)


async def link_identity(
    sessions: async_sessionmaker[AsyncSession],
    settings: ControlSettings,
    identity: Identity,
    *,
    token: str,
    session_id: str,
    request_id: str,
) -> None:
    """Have a user who is logged in also log in as this identity.

    Args:
        token: of the session that the request carries.
        session_id: in which linking was begun.

    Raises:
        OidcLoginError: the session is over or another one, they have another identity, or the identity
            another account.
    """
    async with sessions() as session:
        login = await find_session(session, settings, token)
        if login is not None:
            # A reset that is under way is over after this, and has ended the session.
            await queries.lock_user(session, login.user.id)
            login = await find_session(session, settings, token)
        if login is None or format_id("session", login.session.id) != session_id:
            raise OidcLoginError(
                "You are no longer logged in here as you were. Log in, then start again."
            )
        user = login.user
        holder = await queries.find_user_by_identity(session, identity)
        if holder is not None and holder.id == user.id:
            return
        if holder is not None or user.oidc_subject is not None:
            raise OidcLoginError(
                "This account, or the one at your provider, is tied to another one already."
            )
        user.oidc_issuer, user.oidc_subject = identity.issuer, identity.subject
        if identity.email == user.email and user.email_proven_at is None:
            user.email_proven_at = datetime.now(UTC)
        actor_id = format_id("user", user.id)
        record(
            session,
            Actor("user", actor_id, request_id),
            "user.link",
            "user",
            actor_id,
            detail={"issuer": identity.issuer},
        )
        await session.commit()


def _open_session(
    session: AsyncSession,
    settings: ControlSettings,
    user: User,
    request_id: str,
    *,
    method: str,
) -> NewLogin:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    opened = Session(
        id=uuid7(),
        user_id=user.id,
        token_mac=_mac(settings, token),
        expires_at=datetime.now(UTC) + timedelta(hours=settings.session_hours),
    )
    session.add(opened)
    record(
        session,
        Actor("user", format_id("user", user.id), request_id),
        "session.create",
        "session",
        format_id("session", opened.id),
        detail={"method": method},
    )
    return NewLogin(Login(opened, user), token)


async def find_session(
    session: AsyncSession, settings: ControlSettings, token: str
) -> Login | None:
    """The live session of a cookie."""
    found = await queries.find_live_session(session, _mac(settings, token))
    return None if found is None else Login(*found)


async def memberships_of(session: AsyncSession, user_id: UUID) -> dict[UUID, TenantRole]:
    """What the user is in which tenant, looked up at each request: a removal holds at the next one."""
    return cast(dict[UUID, TenantRole], await queries.roles_of(session, user_id))


async def log_out(session: AsyncSession, actor: Actor, session_id: UUID) -> None:
    """End a session at once, everywhere."""
    await queries.revoke_session(session, session_id)
    record(session, actor, "session.revoke", "session", format_id("session", session_id))


def _mac(settings: ControlSettings, token: str) -> bytes:
    key = settings.session_key.get_secret_value().encode()
    return hmac.digest(key, token.encode("utf-8", "surrogateescape"), hashlib.sha256)
