"""Reserve before work, settle after it: two short transactions per request, exactly once.

TX1 (`reserve`) checks key, tenant, price and quotas, writes the request's row with a lease and holds
its worst case in every quota window. The owner renews the lease while the engine works, outside any
transaction. TX2 (`settle`) is a compare-and-set on the lease token that writes the attempts and one
ledger row and turns what was held into what was used. Whoever raises the token (the sweeper) wins; the
other one's TX2 does nothing. Every function is safe to call again with the same arguments.

Reservations and settlements that come together are one transaction (`BatchedCalls`), each with a
verdict of its own; one that would hold up the others, or comes by itself, is a transaction by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.billing.prices import NoPriceError
from loraplex_platform.db.calls import Row
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.errors import (
    ConflictError,
    InvalidApiKeyError,
    PlatformError,
    UnavailableError,
)
from loraplex_platform.ids import unix_s_of
from loraplex_platform.metering import queries
from loraplex_platform.metering.records import (
    LEASE_S,
    MAX_CLOCK_SKEW_S,
    Refusal,
    Renewal,
    Reservation,
    Reserved,
    Settlement,
    SettleResult,
)
from loraplex_platform.quotas.errors import quota_error
from loraplex_platform.tenancy.authentication import check_live, check_tenant

log = structlog.get_logger(__name__)


class ClockSkewError(UnavailableError):
    """The gateway's clock is so far off that its requests would be in no report: nothing is run."""

    code = "clock_skew"


async def reserve(sessions: SessionFactory, reservation: Reservation) -> Reserved:
    """TX1. The key and the tenant are looked at again in the same transaction that admits.

    Raises:
        RevokedKeyError, ExpiredKeyError, InvalidApiKeyError: the key is no longer good.
        TenantSuspendedError: the tenant is not active.
        QuotaExceededError, BudgetTooSmallError: a hard quota does not pay the least of it.
        NoPriceError: there is no price for it.
        ClockSkewError: the id's maker and the database disagree about the time.
        ConflictError: the id is taken by another request.
        DatabaseUnavailableError: nothing may be dispatched.
    """
    parameters = queries.reserve_parameters(reservation)

    async def alone() -> Row:
        return (0, *await sessions.calls.call(queries.RESERVE, parameters), None, None)

    booked = await sessions.batched(queries.BOOK).call({"what": "reserve", **parameters}, alone)
    row = (await alone() if booked is None else booked)[1:7]
    outcome, lease_token, lease_until, price_book_id, max_tokens, blocking = row
    if outcome == "reserved":
        return Reserved(lease_token, lease_until, price_book_id, max_tokens)
    if blocking is not None:
        raise quota_error(queries.read_blocking(blocking), is_too_large=outcome == "too_large")
    async with sessions() as session:
        result = await _explain(session, reservation)
    if isinstance(result, Reserved):
        return result
    raise result


async def note_refusal(sessions: SessionFactory, refusal: Refusal) -> bool:
    """Put a request that was refused before its reservation on the books, void from the start.

    False: nothing was written, for its key, tenant or clock would not have been admitted either, or it is
    there already.

    Raises:
        DatabaseUnavailableError: unknown.
    """
    return await sessions.calls.find(queries.REFUSE, queries.refuse_parameters(refusal)) is not None


async def _explain(session: AsyncSession, wanted: Reservation) -> Reserved | PlatformError:
    existing = await queries.find_request(session, wanted.request_id)
    if existing is not None:
        # Our own row: the acknowledgement of an earlier COMMIT was lost.
        if existing.owner == wanted.owner and existing.state == "reserved":
            return Reserved(
                existing.lease_token,
                existing.lease_until,
                existing.price_book_id,
                existing.est_completion_tokens // wanted.num_choices,
            )
        return ConflictError(f"Request {wanted.request_id} exists already.")
    tenant, key, now = await queries.find_holder(session, wanted.tenant_id, wanted.key_id)
    try:
        if tenant is None or (key is None and wanted.kind == "user"):
            return InvalidApiKeyError("Unknown API key.")
        if key is not None:
            check_live(key.status, key.revoked_at, key.expires_at, tenant.status, now)
        check_tenant(tenant.status)
    except PlatformError as error:
        return error
    skew_s = unix_s_of(wanted.request_id) - now.timestamp()
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        log.error("clock_skew", owner=wanted.owner, skew_s=round(skew_s))
        return ClockSkewError("A server's clock is wrong; try again.", retry_after_s=1.0)
    book, is_revisions_own = await queries.find_book_for(session, wanted.revision_id)
    if book is None:
        return NoPriceError("No price book is in force; an operator has to publish one.")
    which = "that its revision names" if is_revisions_own else "in force"
    return NoPriceError(f"The price book {which}, '{book}', has no price for this model.")


async def renew(
    sessions: SessionFactory, renewals: Sequence[Renewal], *, lease_s: float = LEASE_S
) -> set[UUID]:
    """Extend leases and note checkpoints, many requests at once.

    Returns:
        The ids whose lease is lost: abort them at the engine and stop, someone else settles.
    """
    if not renewals:
        return set()

    async def work(session: AsyncSession) -> set[UUID]:
        return await queries.renew(session, renewals, lease_s)

    held = await run_transaction(sessions, work, is_idempotent=True)
    return {renewal.request_id for renewal in renewals} - held


async def assign(
    sessions: SessionFactory, request_id: UUID, lease_token: int, *, replica_id: str, attempt: int
) -> bool:
    """Note where an attempt goes before it is dispatched, so that the sweeper asks the right replica.

    Only needed when that differs from the reservation. False: the lease is lost.
    """

    async def work(session: AsyncSession) -> bool:
        return await queries.assign(session, request_id, lease_token, replica_id, attempt)

    return await run_transaction(sessions, work, is_idempotent=True)


async def settle(sessions: SessionFactory, settlement: Settlement) -> SettleResult:
    """TX2: close the request, write its attempts and its ledger row. A second call is a no-op.

    Raises:
        ValueError: the token counts do not add up.
        DatabaseUnavailableError: try again later; the sweeper settles when nobody does.
    """
    parameters = queries.settle_parameters(settlement)

    async def alone() -> Row:
        return (0, *[None] * 6, *await sessions.calls.call(queries.SETTLE, parameters))

    booked = await sessions.batched(queries.BOOK).call({"what": "settle", **parameters}, alone)
    result = _settled(*(await alone() if booked is None else booked)[7:9])
    if not result.applied:
        log.info("settle_not_applied", request_id=str(settlement.request_id))
    return result


async def was_closed_by(sessions: SessionFactory, request_id: UUID, closer: str) -> bool:
    """Whether that process has settled or voided the request: what a `settle` that was not applied may
    mean after its first COMMIT, whose acknowledgement was lost.

    Raises:
        DatabaseUnavailableError: unknown.
    """
    async with sessions() as session:
        request = await queries.find_request(session, request_id)
    return request is not None and request.state != "reserved" and request.settled_by == closer


async def settle_in(session: AsyncSession, settlement: Settlement) -> SettleResult:
    """`settle` within the caller's transaction."""
    parameters = queries.settle_parameters(settlement)
    return _settled(*await queries.call_in(session, queries.SETTLE, parameters))


async def void(
    sessions: SessionFactory,
    request_id: UUID,
    lease_token: int,
    *,
    voided_by: str,
    http_status: int | None = None,
    error_code: str | None = None,
) -> SettleResult:
    """Close a request that no engine worked on: what it held is free again, and no ledger row.

    `applied` False: it was closed already.
    """
    parameters = _void_parameters(request_id, lease_token, voided_by, http_status, error_code)
    (applied,) = await sessions.calls.call(queries.VOID, parameters)
    return SettleResult(applied)


async def void_in(
    session: AsyncSession,
    request_id: UUID,
    lease_token: int,
    *,
    voided_by: str,
    error_code: str | None = None,
) -> SettleResult:
    """`void` within the caller's transaction."""
    parameters = _void_parameters(request_id, lease_token, voided_by, None, error_code)
    (applied,) = await queries.call_in(session, queries.VOID, parameters)
    return SettleResult(applied)


def _void_parameters(
    request_id: UUID,
    lease_token: int,
    voided_by: str,
    http_status: int | None,
    error_code: str | None,
) -> dict[str, object]:
    return {
        "request_id": request_id,
        "lease_token": lease_token,
        "voided_by": voided_by,
        "http_status": http_status,
        "error_code": error_code,
    }


def _settled(applied: bool, amount_pico: Decimal | None) -> SettleResult:
    return SettleResult(applied, int(amount_pico or 0))
