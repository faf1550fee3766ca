"""Users, and logins as server-side sessions: the cookie holds a random token, the table its MAC."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.control.permissions import TenantRole
from loraplex_platform.db import Session, User
from loraplex_platform.errors import ConflictError, InvalidApiKeyError
from loraplex_platform.ids import format_id, uuid7
from loraplex_platform.settings import ControlSettings
from loraplex_platform.users import queries, throttle
from loraplex_platform.users.passwords import Passwords
from loraplex_platform.users.schemas import NewUser

_TOKEN_BYTES = 32


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

    token = secrets.token_urlsafe(_TOKEN_BYTES)
    opened = Session(
        id=uuid7(),
        user_id=user.id,
        token_mac=_mac(settings, token),
        expires_at=datetime.now(UTC) + timedelta(hours=settings.session_hours),
    )
    rehashed = None
    if user.password_hash is not None and passwords.is_outdated(user.password_hash):
        rehashed = await passwords.hash(password)
    async with sessions() as session:
        await throttle.forgive(session, email, address)
        session.add(opened)
        if rehashed is not None:
            (await session.get_one(User, user.id)).password_hash = rehashed
        record(
            session,
            Actor("user", format_id("user", user.id), request_id),
            "session.create",
            "session",
            format_id("session", opened.id),
        )
        await session.commit()
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
