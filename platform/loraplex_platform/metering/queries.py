"""SQL of requests, attempts and the ledger. Times are the database's, so clocks cannot disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import CursorResult, Row, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import ApiKey, Attempt, LedgerEntry, Request, Tenant
from loraplex_platform.ids import unix_s_of
from loraplex_platform.metering.policy import AttemptUsage, Split
from loraplex_platform.metering.records import (
    MAX_CLOCK_SKEW_S,
    Renewal,
    Reservation,
    Settlement,
)

# One statement: the price in force, the tenant and the key are looked at and the row is written at
# the same instant, in one round trip. No row comes back when any of them does not allow it.
_RESERVE = text("""
with price as (
    select book_id, input, output, request
    from loraplex_book_at(now()) as book_id, loraplex_entry_prices(
        book_id, cast(:adapter_version_id as uuid), cast(:deployment_id as uuid))
    where input is not null and output is not null
), holder as (
    select tenants.id as tenant_id, api_keys.id as key_id
    from tenants left join api_keys
        on api_keys.tenant_id = tenants.id and api_keys.id = cast(:key_id as uuid)
    where tenants.id = :tenant_id and tenants.status = 'active'
        and (:kind = 'probe' or (api_keys.status = 'active' and api_keys.revoked_at is null
            and (api_keys.expires_at is null or api_keys.expires_at > now())))
)
insert into requests (
    id, tenant_id, key_id, deployment_id, revision_id, adapter_version_id, price_book_id, kind,
    endpoint, model, is_stream, has_stop_strings, owner, replica_id, attempt, lease_until,
    est_prompt_tokens, est_completion_tokens, est_pico
)
select :request_id, holder.tenant_id, holder.key_id, cast(:deployment_id as uuid),
    cast(:revision_id as uuid), cast(:adapter_version_id as uuid), price.book_id, :kind,
    :endpoint, :model, :is_stream, :has_stop_strings, :owner, cast(:replica_id as varchar), :attempt,
    now() + make_interval(secs => :lease_s),
    :est_prompt_tokens, :est_completion_tokens,
    cast(:est_prompt_tokens as numeric) * price.input
        + cast(:est_completion_tokens as numeric) * price.output + price.request
from price, holder
where abs(cast(:made_at_s as double precision) - extract(epoch from now()))
    <= cast(:max_skew_s as double precision)
on conflict (id) do nothing
returning lease_token, lease_until, price_book_id
""")

# Rows are locked in id order, so that two batches never wait for each other.
_RENEW = text("""
with held as (
    select id from requests
    join unnest(cast(:ids as uuid[]), cast(:tokens as bigint[])) as mine (id, lease_token)
        using (id, lease_token)
    where state = 'reserved' and requests.id = any(cast(:ids as uuid[]))
    order by id for update of requests
)
update requests set
    lease_until = now() + make_interval(secs => :lease_s),
    checkpoint_tokens = greatest(checkpoint_tokens, checkpoint.tokens)
from held join unnest(cast(:ids as uuid[]), cast(:checkpoints as bigint[]))
    as checkpoint (id, tokens) using (id)
where requests.id = held.id
returning requests.id
""")

# The sweeper's turn: whoever raises the token owns the row until its short lease ends.
_CLAIM = text("""
with due as (
    select id from requests
    where state = 'reserved' and lease_until < now() - make_interval(secs => :grace_s)
    order by lease_until limit :limit for update skip locked
)
update requests set
    lease_token = lease_token + 1,
    lease_until = now() + make_interval(secs => :lease_s)
from due where requests.id = due.id
returning requests.id
""")


async def insert_request(session: AsyncSession, reservation: Reservation) -> Row[Any] | None:
    """TX1. None: the key, the tenant, the price or a clock does not allow it, or the row exists."""
    parameters = asdict(reservation) | {
        "made_at_s": unix_s_of(reservation.request_id),
        "max_skew_s": MAX_CLOCK_SKEW_S,
    }
    return (await session.execute(_RESERVE, parameters)).first()


async def find_request(session: AsyncSession, request_id: UUID) -> Request | None:
    """By id."""
    return await session.get(Request, request_id)


async def find_holder(
    session: AsyncSession, tenant_id: UUID, key_id: UUID | None
) -> tuple[Tenant | None, ApiKey | None, Any]:
    """The tenant, its key, and the database's time: to say why a reservation was refused."""
    tenant = await session.get(Tenant, tenant_id)
    key = None
    if key_id is not None:
        key = await session.scalar(
            select(ApiKey).where(ApiKey.id == key_id, ApiKey.tenant_id == tenant_id)
        )
    return tenant, key, await session.scalar(select(func.now()))


async def renew(session: AsyncSession, renewals: Sequence[Renewal], lease_s: float) -> set[UUID]:
    """Extend leases; the ids that are still held."""
    parameters = {
        "ids": [renewal.request_id for renewal in renewals],
        "tokens": [renewal.lease_token for renewal in renewals],
        "checkpoints": [renewal.checkpoint_tokens for renewal in renewals],
        "lease_s": lease_s,
    }
    return set((await session.scalars(_RENEW, parameters)).all())


async def assign(
    session: AsyncSession, request_id: UUID, lease_token: int, replica_id: str, attempt: int
) -> bool:
    """Note which replica an attempt goes to. False: the lease is lost."""
    return await _update_held(
        session, request_id, lease_token, {"replica_id": replica_id, "attempt": attempt}
    )


async def claim_expired(
    session: AsyncSession, *, grace_s: float, lease_s: float, limit: int
) -> list[Request]:
    """Take over requests whose owner has fallen silent; other sweepers' rows are skipped."""
    parameters = {"grace_s": grace_s, "lease_s": lease_s, "limit": limit}
    ids = (await session.scalars(_CLAIM, parameters)).all()
    if not ids:
        return []
    statement = select(Request).where(Request.id.in_(ids)).order_by(Request.id)
    return list((await session.scalars(statement)).all())


async def extend_claim(
    session: AsyncSession, request_id: UUID, lease_token: int, lease_s: float
) -> bool:
    """Set when a claimed row is due again."""
    until = func.now() + timedelta(seconds=lease_s)
    return await _update_held(session, request_id, lease_token, {"lease_until": until})


async def close_request(
    session: AsyncSession, settlement: Settlement, account: Split
) -> Request | None:
    """The compare-and-set of TX2: None when someone else has closed it or holds the lease."""
    usage = settlement.usage
    statement = (
        update(Request)
        .where(
            Request.id == settlement.request_id,
            Request.state == "reserved",
            Request.lease_token == settlement.lease_token,
        )
        .values(
            state="settled",
            settled_at=func.now(),
            settled_by=settlement.settled_by,
            attempt=usage.attempt,
            replica_id=func.coalesce(usage.replica_id, Request.replica_id),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=account.billed,
            finish_reason=settlement.finish_reason,
            http_status=settlement.http_status,
            error_code=settlement.error_code,
            ttft_ms=settlement.ttft_ms,
            e2e_ms=settlement.e2e_ms,
        )
        .returning(Request)
    )
    return await session.scalar(statement)


async def void_request(
    session: AsyncSession,
    request_id: UUID,
    lease_token: int,
    *,
    voided_by: str,
    http_status: int | None,
    error_code: str | None,
) -> bool:
    """Close a request that never cost anything. False: closed already, or the lease is lost."""
    values = {
        "state": "voided",
        "settled_at": func.now(),
        "settled_by": voided_by,
        "http_status": http_status,
        "error_code": error_code,
    }
    return await _update_held(session, request_id, lease_token, values)


async def insert_attempt(
    session: AsyncSession, request: Request, usage: AttemptUsage, account: Split
) -> None:
    """What became of one attempt's tokens."""
    await session.execute(
        insert(Attempt).values(
            request_id=request.id,
            attempt=usage.attempt,
            tenant_id=request.tenant_id,
            replica_id=usage.replica_id or request.replica_id,
            outcome=usage.outcome,
            source=usage.source,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated=usage.generated,
            billed=account.billed,
            absorbed=account.absorbed,
            discarded_past_stop=usage.discarded_past_stop,
            discarded_past_abort=usage.discarded_past_abort,
        )
    )


async def insert_ledger_entry(
    session: AsyncSession,
    request: Request,
    usage: AttemptUsage,
    account: Split,
    amount_pico: int,
    *,
    kind: str = "usage",
    seq: int = 0,
) -> None:
    """The request's line of account. A second one of the same kind violates the primary key."""
    await session.execute(
        insert(LedgerEntry).values(
            entry_id=request.id,
            kind=kind,
            seq=seq,
            tenant_id=request.tenant_id,
            account=account.account,
            key_id=request.key_id,
            deployment_id=request.deployment_id,
            adapter_version_id=request.adapter_version_id,
            price_book_id=request.price_book_id,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=account.charged_tokens,
            amount_pico=amount_pico,
        )
    )


async def _update_held(
    session: AsyncSession, request_id: UUID, lease_token: int, values: dict[str, Any]
) -> bool:
    statement = (
        update(Request)
        .where(
            Request.id == request_id,
            Request.state == "reserved",
            Request.lease_token == lease_token,
        )
        .values(values)
        .execution_options(synchronize_session=False)
    )
    result = await session.execute(statement)
    assert isinstance(result, CursorResult)  # noqa: S101 # what an UPDATE returns
    return result.rowcount == 1
