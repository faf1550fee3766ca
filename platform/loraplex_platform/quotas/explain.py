""" "Why was I blocked?" and "what answered me?", from what is on the books and in the log of refusals."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import Limit, Request
from loraplex_platform.errors import NotFoundError
from loraplex_platform.ids import MalformedIdError, parse_id, unix_s_of
from loraplex_platform.metering import provenance
from loraplex_platform.metering.provenance import Provenance
from loraplex_platform.metering.provenance_queries import ledger_of
from loraplex_platform.metering.queries import find_request
from loraplex_platform.quotas import queries
from loraplex_platform.quotas.words import amount, limit_name, scope_name

Outcome = Literal["refused", "running", "completed", "aborted", "failed", "not_run", "archived"]

CLIENT_LEFT = 499  # as the books have it


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a request, in words. `answered_by` None: it was refused."""

    request_id: UUID
    tenant_id: UUID
    outcome: Outcome
    summary: str
    details: list[str]
    limit_ids: list[UUID]
    at: datetime
    answered_by: Provenance | None = None


async def explain(session: AsyncSession, request_id: str) -> Explanation:
    """What became of it.

    Raises:
        NotFoundError: nothing is known of it, or it is another tenant's.
    """
    try:
        request_uuid = parse_id("request", request_id)
    except MalformedIdError:
        raise NotFoundError("No such request: pass the x-request-id of an answer.") from None
    request = await find_request(session, request_uuid)
    if request is not None:
        return await _explain_request(session, request)
    ledger = await ledger_of(session, request_uuid)
    if ledger:
        return Explanation(
            request_id=request_uuid,
            tenant_id=ledger[0].tenant_id,
            outcome="archived",
            summary="It was admitted and is on the ledger; its month in the request log is older than"
            " retention keeps.",
            details=[],
            limit_ids=[],
            at=ledger[0].occurred_at,
            answered_by=await provenance.trace(session, None, ledger),
        )
    made_at = datetime.fromtimestamp(unix_s_of(request_uuid), UTC)
    refusal = await queries.find_refusal(session, request_uuid, made_at)
    if refusal is None:
        days = queries.REFUSALS_KEPT.days
        raise NotFoundError(
            "Nothing is known of this request: it was refused before a limit was asked, or is one of"
            f" very many that were refused in the same second, or of more than {days} days ago."
        )
    details = await _describe(session, refusal.limit_id, "It was refused by")
    if refusal.count > 1:
        details.append(f"{refusal.count} requests of this key were refused so within a second.")
    return Explanation(
        request_id=request_uuid,
        tenant_id=refusal.tenant_id,
        outcome="refused",
        summary=refusal.reason,
        details=details,
        limit_ids=[] if refusal.limit_id is None else [refusal.limit_id],
        at=refusal.at,
    )


async def _explain_request(session: AsyncSession, request: Request) -> Explanation:
    details = []
    limit_ids = []
    if request.clamped_by is not None:
        limit_ids.append(request.clamped_by)
        details.append(
            f"It asked for up to {request.asked_completion_tokens:,} tokens and was cut to"
            f" {request.est_completion_tokens:,}: a limit paid no more."
        )
        details += await _describe(session, request.clamped_by, "It was cut by")
    outcome, summary = _outcome_of(request)
    if request.error_code is not None:
        details.append(f"It ended with the error {request.error_code}.")
    if request.prompt_tokens is not None:
        details.append(
            f"It used {request.prompt_tokens:,} prompt tokens and was charged for"
            f" {request.completion_tokens or 0:,} completion tokens."
        )
    return Explanation(
        request_id=request.id,
        tenant_id=request.tenant_id,
        outcome=outcome,
        summary=summary,
        details=details,
        limit_ids=limit_ids,
        at=request.admitted_at,
        answered_by=await provenance.trace(session, request, await ledger_of(session, request.id)),
    )


def _outcome_of(request: Request) -> tuple[Outcome, str]:
    if request.state == "reserved":
        return "running", "It was admitted by all limits and is in progress."
    if request.state == "voided":
        return "not_run", "It was admitted by all limits but no engine ran it; it costs nothing."
    if request.finish_reason == "error" or (request.http_status or 200) >= 500:
        return "failed", "It was admitted by all limits and failed on our side; it costs nothing."
    if request.finish_reason == "abort" or request.http_status == CLIENT_LEFT:
        return (
            "aborted",
            "It was admitted by all limits and ended before its answer did, as a rule because its"
            " client left.",
        )
    if request.finish_reason == "length" and request.clamped_by is not None:
        return "completed", "It was answered, and ended where a limit paid no more tokens."
    return "completed", "It was admitted by all limits and answered."


async def _describe(session: AsyncSession, limit_id: UUID | None, how: str) -> list[str]:
    """A limit as it is now."""
    if limit_id is None:
        return []
    found = await queries.find_limits(session, [limit_id])
    if not found:
        return [f"{how} a limit that has been removed since, or that is the operator's own."]
    return [f"{how} {_name(limit)}." for limit in found]


def _name(limit: Limit) -> str:
    name = limit_name(limit.metric, limit.period, limit.window_s)  # type: ignore[arg-type] # checked by the table
    value = amount(limit.metric, int(limit.value))  # type: ignore[arg-type] # checked by the table
    return f"the limit of {scope_name(limit.scope_kind)} on {name}, now {value}"  # type: ignore[arg-type] # checked by the table
