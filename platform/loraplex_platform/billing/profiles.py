"""Whom a tenant's invoices are made out to."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.audit.service import Actor, record
from loraplex_platform.billing.invoice_schemas import NewBillingProfile
from loraplex_platform.control.etag import check_version
from loraplex_platform.db import BillingProfile
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import format_id

_FIELDS = (
    "legal_name",
    "address",
    "email",
    "tax_id",
    "tax_label",
    "tax_ppm",
    "tax_note",
    "payment_days",
)


async def get(session: AsyncSession, tenant_id: UUID) -> BillingProfile:
    """The tenant's profile.

    Raises:
        NotFoundError: it has none yet.
    """
    profile = await session.get(BillingProfile, tenant_id)
    if profile is None:
        raise NotFoundError("The tenant has no billing profile yet; its invoices bear its name.")
    return profile


async def put(
    session: AsyncSession,
    actor: Actor,
    tenant_id: UUID,
    new: NewBillingProfile,
    if_match: int | None,
) -> BillingProfile:
    """Make or replace the profile.

    Raises:
        ConflictError: it is not the version of If-Match.
    """
    profile = await session.scalar(
        select(BillingProfile).where(BillingProfile.tenant_id == tenant_id).with_for_update()
    )
    values = {name: getattr(new, name) for name in _FIELDS}
    before = None
    if profile is None:
        profile = BillingProfile(tenant_id=tenant_id, **values)
        session.add(profile)
    else:
        before = {name: getattr(profile, name) for name in _FIELDS}
        check_version(if_match, profile.row_version, values, before)
        for name, value in values.items():
            setattr(profile, name, value)
        profile.row_version += 1
    await session.flush()
    await session.refresh(profile)
    record(
        session,
        actor,
        "billing_profile.put",
        "billing_profile",
        format_id("tenant", tenant_id),
        tenant_id=tenant_id,
        before=before,
        after=values,
    )
    return profile
