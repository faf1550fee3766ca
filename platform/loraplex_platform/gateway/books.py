"""Closing the books of one request, exactly once, for as long as it can matter."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from uuid import UUID

import structlog

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import UnavailableError
from loraplex_platform.gateway.job import Failed, Finished
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.metering.records import Settlement

log = structlog.get_logger(__name__)

SETTLE_WAIT_S = 2.0  # how long an answer waits for the books; the books do not wait for the answer
_SETTLE_RETRY_S = 0.5
_SETTLE_GIVE_UP_S = 120.0  # by then the lease is long over and the sweeper has settled


@dataclass(frozen=True, slots=True)
class Ending:
    """What to write on the books and what to say to the client. `usage` None: void."""

    usage: AttemptUsage | None
    event: Finished | Failed
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Books:
    """Of one request."""

    request_id: UUID
    owner: str
    arrived_s: float  # monotonic
    sessions: SessionFactory
    metrics: GatewayMetrics

    async def close(self, ending: Ending, lease_token: int, first_token_s: float | None) -> None:
        """Write the ending, trying again while the database is away."""
        give_up_s = time.monotonic() + _SETTLE_GIVE_UP_S
        while True:
            try:
                await self._write(ending, lease_token, first_token_s)
            except UnavailableError:
                if time.monotonic() > give_up_s:
                    log.error("settle_given_up", request_id=str(self.request_id))
                    return
                self.metrics.settle_retries.inc()
                await asyncio.sleep(_SETTLE_RETRY_S)
            else:
                return

    async def _write(self, ending: Ending, lease_token: int, first_token_s: float | None) -> None:
        status, code = _http_outcome(ending.event)
        if ending.usage is None:
            await metering.void(
                self.sessions,
                self.request_id,
                lease_token,
                voided_by=self.owner,
                http_status=status,
                error_code=code,
            )
            self.metrics.requests_finished.labels("rejected").inc()
            return
        since_s = self.arrived_s
        result = await metering.settle(
            self.sessions,
            Settlement(
                request_id=self.request_id,
                lease_token=lease_token,
                usage=ending.usage,
                settled_by=self.owner,
                finish_reason=ending.finish_reason,
                http_status=status,
                error_code=code,
                ttft_ms=None if first_token_s is None else round((first_token_s - since_s) * 1000),
                e2e_ms=round((time.monotonic() - since_s) * 1000),
            ),
        )
        if result.applied:
            self._count(ending.usage, ending.finish_reason or "")

    def _count(self, usage: AttemptUsage, reason: str) -> None:
        is_fault = usage.outcome in ("fault", "lost")
        self.metrics.requests_finished.labels(usage.outcome if is_fault else reason).inc()
        discarded = usage.discarded_past_stop + usage.discarded_past_abort
        kept = usage.generated - discarded
        tokens = self.metrics.tokens
        tokens.labels("prompt").inc(usage.prompt_tokens)
        tokens.labels("cached").inc(usage.cached_tokens)
        tokens.labels("absorbed" if is_fault else "billed").inc(kept)
        tokens.labels("discarded").inc(discarded)


def _http_outcome(event: Finished | Failed) -> tuple[int, str | None]:
    """For the request log: how it really ended, even where a stream's 200 had gone out before."""
    if isinstance(event, Finished):
        return 200, None
    return event.error.status, event.error.error_code
