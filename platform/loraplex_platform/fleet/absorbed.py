"""A request that the platform makes for itself: reserved, run, settled, and its tokens absorbed.

It is a request like any other in the books (kind `probe`), so the identity of generated and accounted
tokens holds for it, and if this process dies the sweeper closes it from the engine's journal. No quota of
the tenant is asked or charged, and its cache of prefixes is neither filled nor read: `salt` is the
asker's own. What a rollout asks of its other side is of the kind `shadow` and names the rollout.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError, EngineStream
from loraplex_engine.protocol import (
    FinishReason,
    Generate,
    ReplicaRecord,
    SamplingParams,
    TokenEvent,
    Usage,
)

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.gateway.routing import Replica
from loraplex_platform.gateway.token_times import TokenTimes
from loraplex_platform.ids import uuid7
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage, Outcome, RequestKind
from loraplex_platform.metering.records import Reservation, Settlement

log = structlog.get_logger(__name__)

ABORT_GRACE_S = 5.0
_LEASE_MARGIN_S = 30.0  # leases are not renewed here: longer than all of it can take


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked, in whose name, and of which weights. `kind`: not "user"."""

    tenant_id: UUID
    endpoint: str  # in the request log, for example "eval"
    model: str
    prompt_token_ids: list[int] = field(repr=False)
    sampling: SamplingParams
    salt: bytes = field(repr=False)
    timeout_s: float
    priority: int = 0
    deployment_id: UUID | None = None
    revision_id: UUID | None = None
    adapter_version_id: UUID | None = None
    adapter_digest: str | None = None
    max_adapters: int | None = None  # of the tenant's, in step slots at a time
    kind: RequestKind = "probe"
    rollout_id: UUID | None = None
    rollout_step: int | None = None
    shadow_of: UUID | None = None  # the user's request after which it is asked


@dataclass(slots=True)
class Answer:
    """What came of it. Times are this process's own; `arrivals_ms` are of each event that had tokens."""

    request_id: UUID
    replica: ReplicaRecord
    fingerprint: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    usage: Usage | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    arrivals_ms: list[tuple[float, int]] = field(default_factory=list)  # and how many tokens
    is_late: bool = False  # `timeout_s` passed; it was aborted


async def ask(
    sessions: SessionFactory, replica: Replica, question: Question, *, owner: str
) -> Answer:
    """Run it on `replica` to its end; the books are closed when this returns or raises.

    Cancelled, it aborts the request and closes the books first.

    Raises:
        EngineRejectedError: refused at admission, no work done.
        EngineLostError: the replica is gone, or does not even answer an abort.
        PlatformError: the tenant cannot be asked for (suspended, no price), or no database.
    """
    request_id = uuid7()
    reserved = await metering.reserve(
        sessions,
        Reservation(
            request_id=request_id,
            tenant_id=question.tenant_id,
            key_id=None,
            endpoint=question.endpoint,
            model=question.model,
            owner=owner,
            est_prompt_tokens=len(question.prompt_token_ids),
            est_completion_tokens=question.sampling.max_tokens,
            deployment_id=question.deployment_id,
            revision_id=question.revision_id,
            adapter_version_id=question.adapter_version_id,
            replica_id=replica.record.replica_id,
            kind=question.kind,
            lease_s=question.timeout_s + ABORT_GRACE_S + _LEASE_MARGIN_S,
            rollout_id=question.rollout_id,
            rollout_step=question.rollout_step,
            shadow_of=question.shadow_of,
        ),
    )
    answer = Answer(request_id, replica.record, replica.fingerprint)
    generate = Generate(
        request_id=str(request_id),
        attempt=1,
        lease_token=reserved.lease_token,
        tenant_id=str(question.tenant_id),
        tenant_salt=question.salt,
        prompt_token_ids=question.prompt_token_ids,
        sampling=question.sampling,
        adapter_digest=question.adapter_digest,
        priority=question.priority,
        max_adapters=question.max_adapters,
        deadline_unix_s=time.time() + question.timeout_s,
    )
    # To its end whatever becomes of whoever waits: an abort still has usage to account for.
    running = asyncio.ensure_future(_run(replica, generate, answer, question.timeout_s))
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError as error:
        cancelled = error
        replica.client.abort(str(request_id), 1, is_platform_fault=True)
        await asyncio.wait([running], timeout=ABORT_GRACE_S)
        running.cancel()
        await asyncio.wait([running])
    try:
        await asyncio.shield(
            _close(sessions, running, reserved.lease_token, question, answer, owner)
        )
    finally:
        if cancelled is not None:
            raise cancelled
    return answer


async def _close(
    sessions: SessionFactory,
    running: asyncio.Future[TokenEvent],
    lease_token: int,
    question: Question,
    answer: Answer,
    owner: str,
) -> None:
    """Settle, or void what no engine took; raises what the engine's side raised."""
    error = EngineLostError("given up") if running.cancelled() else running.exception()
    if isinstance(error, EngineRejectedError):
        await metering.void(
            sessions, answer.request_id, lease_token, voided_by=owner, error_code=error.code
        )
        raise error
    if error is not None and not isinstance(error, EngineLostError):
        raise error
    if error is not None:
        usage = AttemptUsage(
            outcome="lost",
            source="observed",
            prompt_tokens=len(question.prompt_token_ids),
            generated=len(answer.token_ids),
        )
        answer.error_code = "engine_lost"
    else:
        usage = _usage_of(running.result(), answer.replica.replica_id)
    times = _times_of(answer)
    await metering.settle(
        sessions,
        Settlement(
            request_id=answer.request_id,
            lease_token=lease_token,
            usage=usage,
            settled_by=owner,
            kind=question.kind,
            finish_reason=answer.finish_reason,
            error_code=answer.error_code,
            ttft_ms=None if answer.ttft_ms is None else round(answer.ttft_ms),
            e2e_ms=None if answer.e2e_ms is None else round(answer.e2e_ms),
            fingerprint=answer.fingerprint,
            itl_mean_ms=times.mean_ms,
            itl_p95_ms=times.p95_ms,
        ),
    )
    if error is not None:
        raise error


async def _run(
    replica: Replica, generate: Generate, answer: Answer, timeout_s: float
) -> TokenEvent:
    began_s = time.perf_counter()
    stream: EngineStream | None = None
    try:
        async with asyncio.timeout(timeout_s):
            stream = await replica.client.generate(generate)
            return await _read_on(stream, answer, began_s)
    except TimeoutError:
        answer.is_late = True
        if stream is None:  # the cancelled wait has aborted it
            raise EngineLostError("no answer to a request") from None
        stream.abort(is_platform_fault=True)
    try:
        async with asyncio.timeout(ABORT_GRACE_S):
            return await _read_on(stream, answer, began_s)
    except TimeoutError:
        raise EngineLostError("no answer to an abort") from None


async def _read_on(stream: EngineStream, answer: Answer, began_s: float) -> TokenEvent:
    async for event in stream:
        elapsed_ms = (time.perf_counter() - began_s) * 1000
        if event.token_ids:
            if answer.ttft_ms is None:
                answer.ttft_ms = elapsed_ms
            answer.arrivals_ms.append((elapsed_ms, len(event.token_ids)))
        answer.token_ids += event.token_ids
        answer.logprobs += [item.logprob for item in event.logprobs or ()]
        if event.usage is not None:
            answer.e2e_ms = elapsed_ms
            answer.usage = event.usage
            answer.finish_reason = event.finish_reason
            answer.error_code = event.error_code
            return event
    raise EngineLostError("the stream ended without a terminal event")


def _times_of(answer: Answer) -> TokenTimes:
    times = TokenTimes()
    for (before_ms, _), (at_ms, num_tokens) in pairwise(answer.arrivals_ms):
        times.note((at_ms - before_ms) / 1000 / num_tokens, num_tokens)
    return times


def _usage_of(terminal: TokenEvent, replica_id: str) -> AttemptUsage:
    usage = terminal.usage or Usage(prompt_tokens=0, completion_tokens=0)
    outcome: Outcome = "completed"
    if terminal.finish_reason in ("error", "abort"):
        outcome = "fault" if terminal.finish_reason == "error" else "aborted"
    return AttemptUsage(
        outcome=outcome,
        source="terminal",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated=usage.completion_tokens,
        replica_id=replica_id,
    )
