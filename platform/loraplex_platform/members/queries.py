"""SQL of members and invitations. Of users only what colleagues may know, see migration 0009."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast
from uuid import UUID

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.control.permissions import TenantRole
from loraplex_platform.db import Invitation, Membership, Tenant, User


@dataclass(frozen=True, slots=True)
class Person:
    """What a member's colleagues see of their account."""

    email: str
    disabled_at: datetime | None


def members_of(tenant_id: UUID) -> Select[Membership]:
    """The tenant's members."""
    return select(Membership).where(Membership.tenant_id == tenant_id)


async def people(session: AsyncSession, user_ids: Sequence[UUID]) -> dict[UUID, Person]:
    """Accounts by id."""
    statement = select(User.id, User.email, User.disabled_at).where(User.id.in_(user_ids))
    return {row[0]: Person(row[1], row[2]) for row in (await session.execute(statement)).all()}


async def lock_member(session: AsyncSession, tenant_id: UUID, user_id: UUID) -> Membership | None:
    """A member as they are now, and nobody else's to change until the transaction ends."""
    statement = members_of(tenant_id).where(Membership.user_id == user_id).with_for_update()
    return await session.scalar(statement, execution_options={"populate_existing": True})


async def lock_memberships(session: AsyncSession, user_id: UUID) -> Sequence[Membership]:
    """Where somebody is a member now; that stays until the transaction ends."""
    statement = (
        select(Membership)
        .where(Membership.user_id == user_id)
        .order_by(Membership.tenant_id)
        .with_for_update()
    )
    return (await session.scalars(statement)).all()


async def lock_owners(session: AsyncSession, tenant_id: UUID) -> Sequence[UUID]:
    """Users who own the tenant now; none becomes or ceases to be one until the transaction ends."""
    statement = (
        select(Membership.user_id)
        .where(Membership.tenant_id == tenant_id, Membership.role == "owner")
        .order_by(Membership.user_id)
        .with_for_update()
    )
    return (await session.scalars(statement)).all()


async def delete_member(session: AsyncSession, tenant_id: UUID, user_id: UUID) -> None:
    """They no longer belong to the tenant."""
    await session.execute(
        delete(Membership).where(Membership.tenant_id == tenant_id, Membership.user_id == user_id)
    )


async def insert_member(session: AsyncSession, tenant_id: UUID, user_id: UUID, role: str) -> None:
    """They belong to the tenant; who does already keeps their role."""
    await session.execute(
        insert(Membership)
        .values(tenant_id=tenant_id, user_id=user_id, role=role)
        .on_conflict_do_nothing(index_elements=[Membership.tenant_id, Membership.user_id])
    )


async def is_member(session: AsyncSession, tenant_id: UUID, email: str) -> bool:
    """Whether somebody with this e-mail belongs to the tenant."""
    statement = (
        select(Membership.user_id)
        .join(User, User.id == Membership.user_id)
        .where(Membership.tenant_id == tenant_id, User.email == email)
    )
    return (await session.execute(statement)).first() is not None


# ---------------------------------------------------------------------------- invitations


def invitations_of(tenant_id: UUID) -> Select[Invitation]:
    """The tenant's invitations, also those that are over."""
    return select(Invitation).where(Invitation.tenant_id == tenant_id)


async def find_pending(session: AsyncSession, token_mac: bytes) -> Invitation | None:
    """The invitation of a token, if it can still be accepted."""
    statement = (
        select(Invitation)
        .join(Tenant, Tenant.id == Invitation.tenant_id)
        .where(
            Invitation.token_mac == token_mac,
            Invitation.accepted_at.is_(None),
            Invitation.revoked_at.is_(None),
            Invitation.expires_at > func.now(),
            Tenant.status != "closed",
        )
    )
    return await session.scalar(statement)


async def accept(session: AsyncSession, invitation_id: UUID) -> bool:
    """Use an invitation up; False if somebody was faster, or it is over."""
    statement = (
        update(Invitation)
        .where(
            Invitation.id == invitation_id,
            Invitation.accepted_at.is_(None),
            Invitation.revoked_at.is_(None),
            Invitation.expires_at > func.now(),
        )
        .values(accepted_at=func.now())
        .returning(Invitation.id)
    )
    return (await session.execute(statement)).first() is not None


async def withdraw(session: AsyncSession, tenant_id: UUID, invitation_id: UUID) -> bool:
    """Take a pending invitation back; False if there is none."""
    statement = (
        update(Invitation)
        .where(
            Invitation.tenant_id == tenant_id,
            Invitation.id == invitation_id,
            Invitation.accepted_at.is_(None),
            Invitation.revoked_at.is_(None),
        )
        .values(revoked_at=func.now())
        .returning(Invitation.id)
    )
    return (await session.execute(statement)).first() is not None


async def pending_role(session: AsyncSession, tenant_id: UUID, email: str) -> TenantRole | None:
    """The role of the invitation that is pending for this e-mail."""
    role = await session.scalar(
        select(Invitation.role).where(
            Invitation.tenant_id == tenant_id,
            Invitation.email == email,
            Invitation.accepted_at.is_(None),
            Invitation.revoked_at.is_(None),
            Invitation.expires_at > func.now(),
        )
    )
    return cast("TenantRole | None", role)


async def withdraw_of_email(session: AsyncSession, tenant_id: UUID, email: str) -> None:
    """Take back what is pending for this e-mail: only the newest token works."""
    await session.execute(
        update(Invitation)
        .where(
            Invitation.tenant_id == tenant_id,
            Invitation.email == email,
            Invitation.accepted_at.is_(None),
            Invitation.revoked_at.is_(None),
        )
        .values(revoked_at=func.now())
    )
