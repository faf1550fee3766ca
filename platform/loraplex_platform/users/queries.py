"""SQL of users, sessions and login throttling."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Select, case, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import LoginThrottle, Membership, Session, Tenant, User
from loraplex_platform.users.oidc import Identity


def all_users() -> Select[User]:
    """Every user."""
    return select(User)


async def get_user(session: AsyncSession, user_id: UUID) -> User:
    """By id; users are never deleted."""
    return await session.get_one(User, user_id)


async def find_user_by_email(session: AsyncSession, email: str) -> User | None:
    """By lower-case e-mail."""
    return await session.scalar(select(User).where(User.email == email))


async def lock_user(session: AsyncSession, user_id: UUID) -> User | None:
    """By id, as they are now; nobody else changes or logs in as them until the transaction ends."""
    statement = select(User).where(User.id == user_id).with_for_update(key_share=True)
    return await session.scalar(statement, execution_options={"populate_existing": True})


async def lock_admins(session: AsyncSession) -> Sequence[UUID]:
    """Platform admins who may log in now; none ceases to be one until the transaction ends."""
    statement = (
        select(User.id)
        .where(User.platform_role == "admin", User.disabled_at.is_(None))
        .order_by(User.id)
        .with_for_update(key_share=True)
    )
    return (await session.scalars(statement)).all()


async def find_user_by_identity(session: AsyncSession, identity: Identity) -> User | None:
    """By issuer and subject."""
    return await session.scalar(
        select(User).where(
            User.oidc_issuer == identity.issuer, User.oidc_subject == identity.subject
        )
    )


async def get_user_by_email(session: AsyncSession, email: str) -> User:
    """By the e-mail of a user who is known to exist."""
    return (await session.scalars(select(User).where(User.email == email))).one()


async def insert_user(session: AsyncSession, user: User) -> bool:
    """False if the e-mail is taken."""
    statement = (
        insert(User)
        .values(
            id=user.id,
            email=user.email,
            password_hash=user.password_hash,
            platform_role=user.platform_role,
            oidc_issuer=user.oidc_issuer,
            oidc_subject=user.oidc_subject,
            email_proven_at=user.email_proven_at,
        )
        .on_conflict_do_nothing(index_elements=[User.email])
        .returning(User.id)
    )
    return (await session.execute(statement)).first() is not None


async def find_live_session(session: AsyncSession, token_mac: bytes) -> tuple[Session, User] | None:
    """A session that is neither over nor revoked, of a user who is not disabled."""
    row = (
        await session.execute(
            select(Session, User)
            .join(User, User.id == Session.user_id)
            .where(
                Session.token_mac == token_mac,
                Session.revoked_at.is_(None),
                Session.expires_at > func.now(),
                User.disabled_at.is_(None),
            )
        )
    ).first()
    return None if row is None else (row[0], row[1])


async def roles_of(session: AsyncSession, user_id: UUID) -> dict[UUID, str]:
    """The user's role in each tenant that is not closed."""
    statement = (
        select(Membership.tenant_id, Membership.role)
        .join(Tenant, Tenant.id == Membership.tenant_id)
        .where(Membership.user_id == user_id, Tenant.status != "closed")
    )
    return {row[0]: row[1] for row in (await session.execute(statement)).all()}


async def revoke_session(session: AsyncSession, session_id: UUID) -> None:
    """End a login."""
    await session.execute(
        update(Session)
        .where(Session.id == session_id, Session.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )


async def revoke_sessions_of(session: AsyncSession, user_id: UUID) -> None:
    """End every login of a user."""
    await session.execute(
        update(Session)
        .where(Session.user_id == user_id, Session.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )


async def count_attempt(
    session: AsyncSession, subject: str, window: timedelta
) -> tuple[int, datetime]:
    """Count one more login attempt; returns attempts in the window so far and when it began."""
    is_over = LoginThrottle.window_start <= func.now() - window
    statement = (
        insert(LoginThrottle)
        .values(subject=subject, window_start=func.now(), failures=1)
        .on_conflict_do_update(
            index_elements=[LoginThrottle.subject],
            set_={
                "failures": case((is_over, 1), else_=LoginThrottle.failures + 1),
                "window_start": case((is_over, func.now()), else_=LoginThrottle.window_start),
            },
        )
        .returning(LoginThrottle.failures, LoginThrottle.window_start)
    )
    row = (await session.execute(statement)).one()
    return row[0], row[1]


async def uncount_attempt(session: AsyncSession, subject: str) -> None:
    """Take one attempt back: it turned out to be right."""
    await session.execute(
        update(LoginThrottle)
        .where(LoginThrottle.subject == subject, LoginThrottle.failures > 0)
        .values(failures=LoginThrottle.failures - 1)
    )


async def clear_attempts(session: AsyncSession, subject: str) -> None:
    """Forget a subject's failures."""
    await session.execute(delete(LoginThrottle).where(LoginThrottle.subject == subject))
