"""Credits, debits, reversals and balances over HTTP."""

from __future__ import annotations

from fastapi import Request

from loraplex_platform.billing import adjustments
from loraplex_platform.billing.adjustment_schemas import (
    AdjustmentResource,
    BalanceResource,
    NewAdjustment,
    NewReversal,
    show_adjustment,
)
from loraplex_platform.billing.money import format_usd
from loraplex_platform.control.context import DbSession
from loraplex_platform.control.paging import Paging, fetch, to_list
from loraplex_platform.control.permissions import requires
from loraplex_platform.control.routing import admin_router
from loraplex_platform.control.schemas import ListPage
from loraplex_platform.db import LedgerEntry
from loraplex_platform.ids import format_id
from loraplex_platform.tenancy.routes import Owner

router = admin_router("/tenants/{tenant_id}", "Credits and balances")


@router.post("/adjustments", status_code=201)
@requires("credit.write")
async def add_adjustment(
    owner: Owner, body: NewAdjustment, request: Request, session: DbSession
) -> AdjustmentResource:
    """Credit or debit a tenant. It is on the invoice of the month in which it is booked."""
    entry = await adjustments.add(
        session,
        request.state.actor,
        owner.id,
        kind=body.kind,
        amount_usd=body.amount_usd,
        reason=body.reason,
    )
    return show_adjustment(entry)


@router.post("/reversals", status_code=201)
@requires("credit.write")
async def reverse_entry(
    owner: Owner, body: NewReversal, request: Request, session: DbSession
) -> AdjustmentResource:
    """Take a request's charge, a credit or a debit back, once. Both lines stay."""
    entry = await adjustments.reverse(
        session, request.state.actor, owner.id, body.entry_id, body.reason
    )
    return show_adjustment(entry)


@router.get("/adjustments")
@requires("invoice.read")
async def list_adjustments(
    owner: Owner, page: Paging, session: DbSession
) -> ListPage[AdjustmentResource]:
    """Credits, debits and reversals, newest first."""
    statement = adjustments.adjustments_of(owner.id)
    rows, has_more = await fetch(session, statement, LedgerEntry.entry_id, page, "adjustment")
    return to_list(rows, has_more, show_adjustment)


@router.get("/balance")
@requires("invoice.read")
async def get_balance(owner: Owner, session: DbSession) -> BalanceResource:
    """What the tenant owes as of now: the sum of its lines of account."""
    balance = await adjustments.balance_of(session, owner.id)
    return BalanceResource(
        tenant_id=format_id("tenant", owner.id),
        usage_usd=format_usd(balance.usage_pico),
        adjustments_usd=format_usd(balance.adjustments_pico),
        balance_usd=format_usd(balance.total_pico),
    )
