"""Settle what a dead process left: requests whose lease has ended, from the engine's own account.

| what the engine says of the attempt | what the sweeper does |
|---|---|
| it has ended, and its gateway is connected there | leave it: the gateway is cut off from here, and knows what its client heard |
| its journal entry has landed, or is read now | settle by the entry: a client's abort is billed, all else absorbed |
| it is running | abort it as a fault of the platform's, and come back for the entry |
| it never heard of it, or has lost it | settle the checkpoint as lost (absorbed); void without one |
| nothing, for a short while | wait for it |
| nothing for `replica_lost_after_s` | as for "lost it" |

No client has heard the end of what is settled here: a gateway tells it only after it has closed the books
or has written the ending to its own disk. So nobody pays for it (docs/adr/0004).

After an outage of the database the gateways go first: they renew what still runs, and put on the books
what ended meanwhile.

Any number of sweepers may run: a claim raises the lease token, so a row has one owner at a time, and
the slow gateway that comes back finds its token outdated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal, cast
from uuid import UUID

import structlog
from loraplex_engine.client import EngineLostError
from loraplex_engine.protocol import FinishReason, Usage
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_platform.db import Request
from loraplex_platform.db.session import DatabaseUnavailableError, SessionFactory
from loraplex_platform.db.transactions import run_transaction
from loraplex_platform.errors import UnavailableError
from loraplex_platform.metering import queries as metering_queries
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage, RequestKind
from loraplex_platform.metering.records import GATEWAY_LOST, Settlement
from loraplex_platform.worker import queries
from loraplex_platform.worker.engines import ConnectedEngines

log = structlog.get_logger(__name__)

SWEEPER = "sweeper"
BATCH = 50
CLAIM_S = 10.0  # longer than an engine's answer takes
ABORT_ANSWER_S = 0.5  # an abort is done within a step: then there is an entry
STALL_S = 2.0  # a claim takes milliseconds
RECOVERY_S = 8.0  # gateways renew every 5 s, and replay their spools sooner
SPARE_S = 1.0
MAX_SPARED_S = 600.0  # then a gateway that is there, and cut off, has forgotten it

Verdict = Literal["settled", "lost", "voided", "aborting", "waiting", "overtaken"]


class _LandedMeanwhileError(Exception):
    """The journal arrived while we were about to void: nothing is void."""


class Sweeper:
    """See the module's header.

    Args:
        grace_s: how long after the end of its lease a request is left alone.
        replica_lost_after_s: how long a replica may be silent before its journal is given up.
        recovery_s: how long gateways have the word after the database was away. All leases are over
            then, as nobody could renew them; but their owners live, and know more than we do.
    """

    def __init__(
        self,
        sessions: SessionFactory,
        engines: ConnectedEngines,
        *,
        grace_s: float,
        replica_lost_after_s: float,
        recovery_s: float = RECOVERY_S,
    ) -> None:
        self._sessions = sessions
        self._engines = engines
        self._grace_s = grace_s
        self._replica_lost_after_s = replica_lost_after_s
        self._started_at_s = time.monotonic()
        self._recovery_s = recovery_s
        self._was_away = False  # the database, when it was last asked
        self._resumes_at_s = 0.0  # monotonic
        self._spared_since_s: dict[UUID, float] = {}  # monotonic

    async def sweep_once(self) -> list[Verdict]:
        """Claim what is due and deal with each; what fails is due again when the claim ends."""
        try:
            claimed = await self._claim()
        except UnavailableError:
            self._was_away = True
            raise
        results = await asyncio.gather(
            *(self._deal_with(request) for request in claimed), return_exceptions=True
        )
        verdicts: list[Verdict] = []
        for request, result in zip(claimed, results, strict=True):
            if isinstance(result, BaseException):
                log.error("sweep_failed", request_id=str(request.id), exc_info=result)
            else:
                log.info("request_swept", request_id=str(request.id), verdict=result)
                verdicts.append(result)
        return verdicts

    async def _claim(self) -> list[Request]:
        """What is due and nobody else's, which is ours from then on."""
        began_s = time.monotonic()
        async with self._sessions() as session:
            due = await metering_queries.find_expired(session, grace_s=self._grace_s, limit=BATCH)
        if time.monotonic() - began_s > STALL_S:
            raise DatabaseUnavailableError("The database stood still while it was asked.")
        if self._was_away:
            # It may have come back in this moment: the gateways' time begins only now.
            self._was_away = False
            self._resumes_at_s = began_s + self._recovery_s
        if began_s < self._resumes_at_s or not due:
            return []
        are_spared = await asyncio.gather(*(self._is_with_its_gateway(request) for request in due))
        pairs = list(zip(due, are_spared, strict=True))
        await self._spare([request for request, is_spared in pairs if is_spared])
        ids = [request.id for request, is_spared in pairs if not is_spared]
        began_s = time.monotonic()

        async def claim(session: AsyncSession) -> list[Request]:
            claimed = await metering_queries.claim_expired(
                session, ids, grace_s=self._grace_s, lease_s=CLAIM_S
            )
            if time.monotonic() - began_s > STALL_S:
                raise DatabaseUnavailableError("The database stood still while it was asked.")
            return claimed

        return await run_transaction(self._sessions, claim) if ids else []

    async def _is_with_its_gateway(self, request: Request) -> bool:
        """Whether the request has ended, and a gateway that lives is about to say so."""
        if request.replica_id is None or request.kind != "user":
            return False
        since_s = self._spared_since_s.get(request.id)
        if since_s is not None and time.monotonic() - since_s > MAX_SPARED_S:
            return False
        replica = self._engines.find(request.replica_id)
        if replica is None:
            return False
        try:
            reply = await replica.client.query_usage(
                str(request.id), request.attempt, gateway_id=request.owner
            )
        except EngineLostError:
            return False
        if reply.entry is None or reply.entry.finish_reason == "error":
            return False  # it still runs, or the platform pays in any case
        return reply.is_gateway_connected

    async def _spare(self, requests: Sequence[Request]) -> None:
        """Leave them to their gateways for another moment: their lease tokens stay as they are."""
        now_s = time.monotonic()
        # Also of those that are not due just now: each comes back when its own moment is over.
        self._spared_since_s = {
            request_id: since_s
            for request_id, since_s in self._spared_since_s.items()
            if now_s - since_s < 2 * MAX_SPARED_S
        }
        for request in requests:
            self._spared_since_s.setdefault(request.id, now_s)
            log.info("request_spared", request_id=str(request.id), owner=request.owner)
            await self._come_back(request, SPARE_S, "waiting")

    async def _deal_with(self, request: Request) -> Verdict:
        async with self._sessions() as session:
            landed = await queries.find_landed(session, request.id, request.attempt)
        if landed is not None:
            usage = Usage(
                prompt_tokens=landed.prompt_tokens,
                completion_tokens=landed.completion_tokens,
                cached_tokens=landed.cached_tokens,
            )
            return await self._settle(request, landed.finish_reason, usage)
        if request.replica_id is None:
            return await self._give_up(request)
        replica = self._engines.find(request.replica_id)
        if replica is None:
            return await self._wait_or_give_up(request, request.replica_id)
        try:
            reply = await replica.client.query_usage(str(request.id), request.attempt)
        except EngineLostError:
            return await self._come_back(request, CLAIM_S, "waiting")
        if reply.state == "running":
            # Nobody asked us to: the gateway's fault, or ours, and the journal is to say so.
            replica.client.abort(str(request.id), request.attempt, is_platform_fault=True)
            return await self._come_back(request, ABORT_ANSWER_S, "aborting")
        if reply.entry is None:
            return await self._give_up(request)
        return await self._settle(request, reply.entry.finish_reason, reply.entry.usage)

    async def _settle(self, request: Request, reason: FinishReason | str, usage: Usage) -> Verdict:
        result = await metering.settle(
            self._sessions,
            Settlement(
                request_id=request.id,
                lease_token=request.lease_token,
                usage=usage_of(request, reason, usage),
                settled_by=SWEEPER,
                kind=_kind_of(request),
                finish_reason="abort" if reason == "abort" else "error",
                error_code=GATEWAY_LOST,
            ),
        )
        return "settled" if result.applied else "overtaken"

    async def _wait_or_give_up(self, request: Request, replica_id: str) -> Verdict:
        async with self._sessions() as session:
            unseen_s = await queries.seconds_unseen(session, replica_id)
        # We may have started a moment ago, and the replica be fine: nobody has looked for it since.
        looked_for_s = time.monotonic() - self._started_at_s
        silent_s = looked_for_s if unseen_s is None else min(unseen_s, looked_for_s)
        if silent_s < self._replica_lost_after_s:
            return await self._come_back(request, 1.0, "waiting")
        return await self._give_up(request)

    async def _give_up(self, request: Request) -> Verdict:
        """No engine can tell: what had reached the gateway is absorbed; nothing: void."""
        if request.checkpoint_tokens > 0:
            result = await metering.settle(self._sessions, _as_lost(request))
            return "lost" if result.applied else "overtaken"

        async def void(session: AsyncSession) -> bool:
            result = await metering.void_in(
                session,
                request.id,
                request.lease_token,
                voided_by=SWEEPER,
                error_code=GATEWAY_LOST,
            )
            # After the update, which waits for a landing that has locked the row.
            if await queries.find_landed(session, request.id, request.attempt) is not None:
                raise _LandedMeanwhileError
            return result.applied

        try:
            return "voided" if await run_transaction(self._sessions, void) else "overtaken"
        except _LandedMeanwhileError:
            return await self._come_back(request, 0.0, "waiting")

    async def _come_back(self, request: Request, after_s: float, verdict: Verdict) -> Verdict:
        async def extend(session: AsyncSession) -> bool:
            # Due again `after_s` from now: the grace comes on top of the lease.
            return await metering_queries.extend_claim(
                session, request.id, request.lease_token, after_s - self._grace_s
            )

        return verdict if await run_transaction(self._sessions, extend) else "overtaken"


def usage_of(request: Request, reason: FinishReason | str, usage: Usage) -> AttemptUsage:
    """The billing policy's view of a journal entry that no gateway has judged.

    Only a client that had left by itself pays. With stop strings only the gateway knew which token
    completed one, so no more than the last checkpoint is billed: never too much, too little by one
    renewal's tokens at most.
    """
    absorbed_anyway = 0
    outcome: Literal["aborted", "fault", "lost"] = "fault" if reason == "error" else "lost"
    if reason == "abort":
        outcome = "aborted"
        if request.has_stop_strings:
            absorbed_anyway = max(0, usage.completion_tokens - request.checkpoint_tokens)
    return AttemptUsage(
        outcome=outcome,
        source="journal",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated=usage.completion_tokens,
        absorbed_anyway=absorbed_anyway,
        attempt=request.attempt,
        replica_id=request.replica_id,
    )


def _kind_of(request: Request) -> RequestKind:
    return cast(RequestKind, request.kind)


def _as_lost(request: Request) -> Settlement:
    return Settlement(
        request_id=request.id,
        lease_token=request.lease_token,
        usage=AttemptUsage(
            outcome="lost",
            source="observed",
            prompt_tokens=request.est_prompt_tokens,
            generated=request.checkpoint_tokens,
            attempt=request.attempt,
            replica_id=request.replica_id,
        ),
        settled_by=SWEEPER,
        kind=_kind_of(request),
        finish_reason="error",
        error_code=GATEWAY_LOST,
    )
