"""SQL of requests, attempts and the ledger. Times are the database's, so clocks cannot disagree.

What every request does is one call of a function that the migrations made (0005): one round trip, one
transaction.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import CursorResult, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import ApiKey, Request, Tenant
from loraplex_platform.ids import unix_s_of
from loraplex_platform.metering.policy import AttemptUsage, Split, split
from loraplex_platform.metering.records import (
    MAX_CLOCK_SKEW_S,
    Renewal,
    Reservation,
    Settlement,
)
from loraplex_platform.quotas.records import Blocking

RESERVE: Final = """
select outcome, lease_token, lease_until, price_book_id, max_tokens, blocking
from loraplex_reserve(
    p_request_id => %(request_id)s, p_tenant_id => %(tenant_id)s, p_key_id => %(key_id)s,
    p_deployment_id => %(deployment_id)s, p_revision_id => %(revision_id)s,
    p_adapter_version_id => %(adapter_version_id)s, p_kind => %(kind)s,
    p_endpoint => %(endpoint)s, p_model => %(model)s, p_is_stream => %(is_stream)s,
    p_has_stop_strings => %(has_stop_strings)s, p_owner => %(owner)s,
    p_replica_id => %(replica_id)s, p_attempt => %(attempt)s::integer, p_lease_s => %(lease_s)s,
    p_prompt_tokens => %(est_prompt_tokens)s, p_max_tokens => %(max_tokens)s,
    p_min_tokens => %(min_completion_tokens)s, p_num_choices => %(num_choices)s,
    p_made_at_s => %(made_at_s)s, p_max_skew_s => %(max_skew_s)s,
    p_rollout_id => %(rollout_id)s, p_rollout_step => %(rollout_step)s::integer, p_arm => %(arm)s,
    p_subject_key => %(subject_key)s, p_shadow_of => %(shadow_of)s,
    p_sampling => %(sampling)s::jsonb)
"""

SETTLE: Final = """
select applied, amount_pico
from loraplex_settle(
    p_request_id => %(request_id)s, p_lease_token => %(lease_token)s, p_kind => %(kind)s,
    p_settled_by => %(settled_by)s, p_account => %(account)s, p_attempt => %(attempt)s::integer,
    p_replica_id => %(replica_id)s, p_outcome => %(outcome)s, p_source => %(source)s,
    p_prompt => %(prompt_tokens)s, p_cached => %(cached_tokens)s, p_generated => %(generated)s,
    p_billed => %(billed)s, p_absorbed => %(absorbed)s,
    p_past_stop => %(discarded_past_stop)s, p_past_abort => %(discarded_past_abort)s,
    p_earlier => %(earlier)s::jsonb, p_finish_reason => %(finish_reason)s,
    p_http_status => %(http_status)s::integer, p_error_code => %(error_code)s,
    p_ttft_ms => %(ttft_ms)s::integer, p_e2e_ms => %(e2e_ms)s::integer,
    p_fingerprint => %(fingerprint)s, p_itl_mean_ms => %(itl_mean_ms)s::real,
    p_itl_p95_ms => %(itl_p95_ms)s::real)
"""

# Of many requests: `item` says which. Those that have no row are asked for by the statements above.
BOOK: Final = """
select item, outcome, lease_token, lease_until, price_book_id, max_tokens, blocking, applied,
    amount_pico
from loraplex_book(%(batch)s::jsonb)
"""

VOID: Final = """
select loraplex_void(
    p_request_id => %(request_id)s, p_lease_token => %(lease_token)s,
    p_voided_by => %(voided_by)s, p_http_status => %(http_status)s::integer,
    p_error_code => %(error_code)s)
"""

_ABSORB_LATE: Final = text("""
select loraplex_absorb_late(:request_id, :attempt, :replica_id, :prompt_tokens, :cached_tokens,
    :generated)
""")

# As `loraplex_reserve` chooses it.
_BOOK_FOR = text("""
select (
    select b.name from price_books b where b.id = coalesce(own.id, loraplex_book_at(now()))
) as name, own.id is not null as is_own
from (select (
    select price_book_id from deployment_revisions where id = cast(:revision as uuid)) as id
) as own
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
        and id = any(cast(:ids as uuid[]))
    order by id for update skip locked
)
update requests set
    lease_token = lease_token + 1,
    lease_until = now() + make_interval(secs => :lease_s)
from due where requests.id = due.id
returning requests.id
""")


_RESERVATION_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Reservation))


def reserve_parameters(reservation: Reservation) -> dict[str, object]:
    """Of `RESERVE`."""
    return {name: getattr(reservation, name) for name in _RESERVATION_FIELDS} | {
        "max_tokens": reservation.est_completion_tokens // reservation.num_choices,
        "made_at_s": unix_s_of(reservation.request_id),
        "max_skew_s": MAX_CLOCK_SKEW_S,
        "sampling": None if reservation.sampling is None else json.dumps(reservation.sampling),
    }


def settle_parameters(settlement: Settlement) -> dict[str, object]:
    """Of `SETTLE`: the billing policy is applied here.

    Raises:
        ValueError: the token counts do not add up.
    """
    account = split(settlement.usage, settlement.kind)
    earlier = [
        _attempt_columns(usage, split(usage, settlement.kind)) for usage in settlement.earlier
    ]
    return _attempt_columns(settlement.usage, account) | {
        "request_id": settlement.request_id,
        "lease_token": settlement.lease_token,
        "kind": settlement.kind,
        "settled_by": settlement.settled_by,
        "account": account.account,
        "earlier": json.dumps(earlier) if earlier else None,
        "finish_reason": settlement.finish_reason,
        "http_status": settlement.http_status,
        "error_code": settlement.error_code,
        "ttft_ms": settlement.ttft_ms,
        "e2e_ms": settlement.e2e_ms,
        "fingerprint": settlement.fingerprint,
        "itl_mean_ms": settlement.itl_mean_ms,
        "itl_p95_ms": settlement.itl_p95_ms,
    }


def _attempt_columns(usage: AttemptUsage, account: Split) -> dict[str, object]:
    return {
        "attempt": usage.attempt,
        "replica_id": usage.replica_id,
        "outcome": usage.outcome,
        "source": usage.source,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated": usage.generated,
        "billed": account.billed,
        "absorbed": account.absorbed,
        "discarded_past_stop": usage.discarded_past_stop,
        "discarded_past_abort": usage.discarded_past_abort,
    }


def read_blocking(blocking: Mapping[str, Any]) -> Blocking:
    """As `loraplex_reserve` made it."""
    fields = {
        **blocking,
        "limit_id": UUID(blocking["limit_id"]),
        "scope_id": UUID(blocking["scope_id"]),
        "resets_at_s": blocking["resets_at"],
    }
    del fields["resets_at"]
    return Blocking(**fields)


async def call_in(session: AsyncSession, statement: str, parameters: dict[str, object]) -> Any:  # noqa: ANN401 # a row of the statement's
    """`RESERVE`, `SETTLE` or `VOID` within the caller's transaction."""
    connection = await session.connection()
    return (await connection.exec_driver_sql(statement, parameters)).one()


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


async def find_book_for(session: AsyncSession, revision_id: UUID | None) -> tuple[str | None, bool]:
    """The name of the price book that a request of this revision would be billed by, and whether the
    revision names it; None: no book is in force."""
    row = (await session.execute(_BOOK_FOR, {"revision": revision_id})).one()
    return row.name, row.is_own


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


async def find_expired(session: AsyncSession, *, grace_s: float, limit: int) -> list[Request]:
    """Requests whose owner has fallen silent, the oldest silence first."""
    statement = (
        select(Request)
        .where(
            Request.state == "reserved",
            Request.lease_until < func.now() - timedelta(seconds=grace_s),
        )
        .order_by(Request.lease_until)
        .limit(limit)
    )
    return list((await session.scalars(statement)).all())


async def claim_expired(
    session: AsyncSession, ids: Sequence[UUID], *, grace_s: float, lease_s: float
) -> list[Request]:
    """Take over those of them that are silent still; other sweepers' rows are skipped."""
    parameters = {"ids": list(ids), "grace_s": grace_s, "lease_s": lease_s}
    claimed = (await session.scalars(_CLAIM, parameters)).all()
    if not claimed:
        return []
    statement = select(Request).where(Request.id.in_(claimed)).order_by(Request.id)
    return list((await session.scalars(statement)).all())


async def extend_claim(
    session: AsyncSession, request_id: UUID, lease_token: int, lease_s: float
) -> bool:
    """Set when a row is due again, whoever holds it, if its lease token is still this one."""
    until = func.now() + timedelta(seconds=lease_s)
    return await _update_held(session, request_id, lease_token, {"lease_until": until})


async def absorb_late(session: AsyncSession, request_id: UUID, usage: AttemptUsage) -> None:
    """Book an attempt that turned up after its request was closed without it: the platform pays."""
    parameters = {
        "request_id": request_id,
        "attempt": usage.attempt,
        "replica_id": usage.replica_id,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated": usage.generated,
    }
    await session.execute(_ABSORB_LATE, parameters)


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
