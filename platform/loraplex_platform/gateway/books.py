"""Closing the books of one request, exactly once, for as long as it can matter."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

import structlog

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import UnavailableError
from loraplex_platform.gateway.job import Failed, Finished
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.spool import Spool, SpoolError, SpoolRecord, Void, write
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage, RequestKind
from loraplex_platform.metering.records import Settlement

log = structlog.get_logger(__name__)

SETTLE_WAIT_S = 2.0  # how long the books are waited for before an ending goes to the spool
ANSWER_WAIT_S = 3.0  # how long an answer waits for either; neither waits for the answer
_SETTLE_RETRY_S = 0.5
_SETTLE_GIVE_UP_S = 120.0  # by then the lease is long over and the sweeper has settled


# What has become of an ending: it is on the books; on our disk; or somebody else has closed the books.
Closed = Literal["booked", "kept", "overtaken"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What to write on the books and what to say to the client. `usage` None: void."""

    usage: AttemptUsage | None
    event: Finished | Failed
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Who answered, and how fast. `first_token_s`: monotonic; the others as in `Settlement`."""

    first_token_s: float | None
    fingerprint: str | None
    itl_mean_ms: float | None
    itl_p95_ms: float | None


@dataclass(frozen=True, slots=True)
class Books:
    """Of one request."""

    request_id: UUID
    kind: RequestKind
    owner: str
    arrived_s: float  # monotonic
    sessions: SessionFactory
    metrics: GatewayMetrics
    spool: Spool | None

    async def close(self, ending: Ending, lease_token: int, pace: Pace) -> Closed:
        """Write the ending: to the database or, while that is away, to the spool.

        It is on a disk when this returns, unless there is no spool or it refuses: then this tries
        again and again, and gives up when the sweeper has long settled.
        """
        record = self._record(ending, lease_token, pace)
        writing = asyncio.create_task(self._write(record))
        await asyncio.wait({writing}, timeout=SETTLE_WAIT_S)
        try:
            is_late = not writing.done()
            if is_late and self.spool is not None and await self._has_spooled(record):
                # Not cancelled: it may be at its COMMIT, and twice is as good as once.
                self.spool.watch(writing)
                closed: Closed = "kept"
            else:
                closed = await writing
        except UnavailableError:
            if await self._has_spooled(record):
                closed = "kept"
            else:
                closed = await self._write_at_last(record)
        if closed != "overtaken":
            self._count(ending)
        return closed

    async def _has_spooled(self, record: SpoolRecord) -> bool:
        if self.spool is None:
            return False
        try:
            await self.spool.put(record)
        except SpoolError:
            return False
        return True

    async def _write_at_last(self, record: SpoolRecord) -> Closed:
        """Try again for as long as it can matter."""
        give_up_s = time.monotonic() + _SETTLE_GIVE_UP_S
        while time.monotonic() < give_up_s:
            self.metrics.settle_retries.inc()
            await asyncio.sleep(_SETTLE_RETRY_S)
            with contextlib.suppress(UnavailableError):
                return await self._write(record)
        log.error("settle_given_up", request_id=str(self.request_id))
        return "overtaken"

    def _record(self, ending: Ending, lease_token: int, pace: Pace) -> SpoolRecord:
        status, code = _http_outcome(ending.event)
        if ending.usage is None:
            return SpoolRecord(
                void=Void(
                    request_id=self.request_id,
                    lease_token=lease_token,
                    voided_by=self.owner,
                    http_status=status,
                    error_code=code,
                )
            )
        since_s, first_s = self.arrived_s, pace.first_token_s
        return SpoolRecord(
            settlement=Settlement(
                request_id=self.request_id,
                lease_token=lease_token,
                usage=ending.usage,
                settled_by=self.owner,
                kind=self.kind,
                finish_reason=ending.finish_reason,
                http_status=status,
                error_code=code,
                ttft_ms=None if first_s is None else round((first_s - since_s) * 1000),
                e2e_ms=round((time.monotonic() - since_s) * 1000),
                fingerprint=pace.fingerprint,
                itl_mean_ms=pace.itl_mean_ms,
                itl_p95_ms=pace.itl_p95_ms,
            )
        )

    async def _write(self, record: SpoolRecord) -> Closed:
        if (await write(self.sessions, record)).applied:
            return "booked"
        # The acknowledgement of our own COMMIT may have been lost: then this was the second time.
        is_ours = await metering.was_closed_by(self.sessions, self.request_id, self.owner)
        return "booked" if is_ours else "overtaken"

    def _count(self, ending: Ending) -> None:
        usage, reason = ending.usage, ending.finish_reason or ""
        if usage is None:
            self.metrics.requests_finished.labels("rejected").inc()
            return
        is_fault = usage.outcome in ("fault", "lost")
        is_absorbed = is_fault or self.kind != "user"
        self.metrics.requests_finished.labels(usage.outcome if is_fault else reason).inc()
        discarded = usage.discarded_past_stop + usage.discarded_past_abort
        kept = usage.generated - discarded
        tokens = self.metrics.tokens
        tokens.labels("prompt").inc(usage.prompt_tokens)
        tokens.labels("cached").inc(usage.cached_tokens)
        tokens.labels("absorbed" if is_absorbed else "billed").inc(kept)
        tokens.labels("discarded").inc(discarded)


def _http_outcome(event: Finished | Failed) -> tuple[int, str | None]:
    """For the request log: how it really ended, even where a stream's 200 had gone out before."""
    if isinstance(event, Finished):
        return 200, None
    return event.error.status, event.error.error_code
