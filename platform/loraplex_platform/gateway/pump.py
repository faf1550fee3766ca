"""One request, from reservation to settlement, in a task that nothing but its own end stops.

The HTTP response only listens. When the client goes away the pump aborts the engine, waits for the
terminal event with the usage, and settles; when the engine goes away it settles as a fault. Exactly
one of these closes the books:

| ending | books |
|---|---|
| stop, length | billed in full |
| stop string completed | billed up to the token that completes it; the rest discarded past stop |
| n choices | each by the rows above: the prompt once, the completions of all; done when all are |
| client gone | billed: prompt and what the engine had generated when it saw the abort |
| engine lost, engine error, deadline, shutdown | absorbed: the tenant pays nothing |
| refused by the engine, or gone before dispatch | void |
| lease lost (the sweeper took over) | none here: the sweeper settles |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError, EngineStream
from loraplex_engine.protocol import Generate, SamplingParams, TokenEvent, Usage

from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import (
    InvalidRequestError,
    OverloadedError,
    PlatformError,
    UnavailableError,
)
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.errors import (
    AbandonedError,
    ContextLengthError,
    DeadlineExceededError,
    EngineFailedError,
    EngineLostMidwayError,
    GrammarRefusedError,
    NoTokenAllowedError,
)
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.openai_schemas import FinishReasonText, UsageReport
from loraplex_platform.gateway.queries import ServedModel
from loraplex_platform.gateway.routing import RETRY_AFTER_S, Replica, Router
from loraplex_platform.gateway.text_stream import TextPiece, TextStream
from loraplex_platform.gateway.tools import ToolPlan
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage, Outcome, Source
from loraplex_platform.metering.records import Renewal, Reservation, Settlement

log = structlog.get_logger(__name__)

_ATTEMPT = 1
_ABORT_ANSWER_S = 10.0  # a live engine answers an abort within a step
_SETTLE_WAIT_S = 2.0  # how long an answer waits for the books; the books do not wait for the answer
_SETTLE_RETRY_S = 0.5
_MAX_REASON_CHARS = 500  # of the engine's own words
_SETTLE_GIVE_UP_S = 120.0  # by then the lease is long over and the sweeper has settled


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """What the client called what the engine may refuse."""

    max_tokens: str = "max_tokens"
    grammar: str | None = None  # which field the grammar is from
    bans: str | None = None  # which field rules out tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that has been checked and only needs running."""

    request_id: UUID
    tenant_id: UUID
    key_id: UUID
    tenant_salt: bytes
    model: ServedModel
    endpoint: Literal["chat.completions", "completions"]
    is_stream: bool
    prompt_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    shows_stop: bool  # whether the answer includes the stop string
    arrived_s: float  # monotonic
    timeout_s: float
    tools: ToolPlan | None = None
    params: FieldNames = FieldNames()

    @property
    def num_tokens(self) -> int:
        """Prompt and one choice's longest completion."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has produced the first token."""

    model_fingerprint: str


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """Released text of one choice."""

    index: int
    piece: TextPiece


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice has all its text."""

    index: int
    reason: FinishReasonText


@dataclass(frozen=True, slots=True)
class Finished:
    """The end: every choice has ended, and this is billed."""

    usage: UsageReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The end, with what the client is told."""

    error: PlatformError


PumpEvent = Started | ChoicePiece | ChoiceEnded | Finished | Failed


@dataclass(frozen=True, slots=True)
class _Ending:
    """What to write on the books and what to say to the client. `usage` None: void."""

    usage: AttemptUsage | None
    event: Finished | Failed
    finish_reason: str | None = None


@dataclass(slots=True)
class _Choice:
    """One completion on its way."""

    text: TextStream
    num_observed: int = 0  # tokens that have reached us
    last_token_s: float | None = None
    reason: FinishReasonText | None = None  # it has ended
    has_aborted: bool = False

    @property
    def num_kept(self) -> int:
        """Tokens that count: none past a stop string."""
        return self.text.num_tokens if self.text.is_stopped else self.num_observed


@dataclass(slots=True, eq=False)
class Pump:
    """See the module's header. `run` is the task; `next_event` and `abandon` are the listener's."""

    job: Job
    replica: Replica
    owner: str
    sessions: SessionFactory
    router: Router
    token_bytes: TokenBytes
    metrics: GatewayMetrics
    events: asyncio.Queue[PumpEvent] = field(default_factory=asyncio.Queue)
    lease_token: int | None = None
    is_over: bool = False
    _choices: list[_Choice] = field(init=False)
    _first_token_s: float | None = field(default=None, init=False)
    _stream: EngineStream | None = field(default=None, init=False)
    _is_abandoned: bool = field(default=False, init=False)
    _is_dispatched: bool = field(default=False, init=False)  # the engine may know of it
    _has_aborted: bool = field(default=False, init=False)
    _has_lost_lease: bool = field(default=False, init=False)
    _killed_by: PlatformError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        job = self.job
        tools = job.tools
        self._choices = [
            _Choice(
                TextStream(
                    self.token_bytes,
                    job.stops,
                    min_tokens=job.sampling.min_tokens,
                    shows_stop=job.shows_stop,
                    shown_ids=tools.format.shown_ids if tools else (),
                    one_call=tools.parser() if tools and tools.ends_after_call else None,
                )
            )
            for _ in range(job.sampling.n)
        ]

    # ------------------------------------------------------------------ the listener's side

    async def next_event(self) -> PumpEvent:
        """The next thing to tell the client; the last one is `Finished` or `Failed`."""
        return await self.events.get()

    def abandon(self) -> None:
        """The client is gone: abort, bill what was generated. After the end: no-op."""
        if self.is_over or self._is_abandoned:
            return
        self._is_abandoned = True
        self.events.put_nowait(Failed(AbandonedError("The client closed the connection.")))
        self._abort(is_platform_fault=False)

    def kill(self, error: PlatformError) -> None:
        """End it for a reason of ours: nothing is billed. A client that left first pays."""
        if not (self.is_over or self._is_abandoned or self._killed_by):
            self._killed_by = error
            self._abort(is_platform_fault=True)

    def lose_lease(self) -> None:
        """The sweeper has taken over: stop the engine, leave the books alone."""
        self._has_lost_lease = True
        self.kill(EngineLostMidwayError("The request was given up.", retry_after_s=RETRY_AFTER_S))

    @property
    def renewal(self) -> Renewal | None:
        """The lease to extend, if one is held."""
        if self.lease_token is None or self.is_over:
            return None
        # The sweeper may bill up to the checkpoint: nothing past a stop string may be in it.
        checkpoint = sum(choice.num_kept for choice in self._choices)
        return Renewal(self.job.request_id, self.lease_token, checkpoint)

    # ------------------------------------------------------------------ the task

    async def run(self) -> None:
        """Reserve, generate, settle."""
        structlog.contextvars.bind_contextvars(tenant_id=str(self.job.tenant_id))
        self.metrics.in_flight.inc()
        try:
            try:
                await self._reserve()
            except PlatformError as error:
                self.events.put_nowait(Failed(error))
                return
            try:
                ending = await self._generate()
            except Exception as error:  # noqa: BLE001 - the books must close
                log_crash("pump_crashed", error)
                self._abort(is_platform_fault=True)
                crash = PlatformError("Something went wrong on our side; nothing is billed.")
                ending = self._fault(crash, "fault", "observed")
            await self._close_books(ending)
        except Exception as error:  # noqa: BLE001 - see below
            # The listener must hear of an end, whatever happened to the books.
            log_crash("pump_crashed", error)
            self.events.put_nowait(Failed(PlatformError("Something went wrong on our side.")))
        finally:
            self.is_over = True
            self.metrics.in_flight.dec()
            elapsed_s = time.monotonic() - self.job.arrived_s
            self.metrics.e2e_latency.labels(self.job.endpoint).observe(elapsed_s)

    async def _reserve(self) -> None:
        job = self.job
        reserved = await metering.reserve(
            self.sessions,
            Reservation(
                request_id=job.request_id,
                tenant_id=job.tenant_id,
                key_id=job.key_id,
                endpoint=job.endpoint,
                model=job.model.public_name,
                owner=self.owner,
                est_prompt_tokens=len(job.prompt_ids),
                est_completion_tokens=job.sampling.max_tokens * job.sampling.n,
                is_stream=job.is_stream,
                has_stop_strings=bool(job.stops or (job.tools and job.tools.ends_after_call)),
                deployment_id=job.model.deployment_id,
                revision_id=job.model.revision_id,
                adapter_version_id=job.model.adapter_version_id,
                replica_id=self.replica.record.replica_id,
                attempt=_ATTEMPT,
            ),
        )
        self.lease_token = reserved.lease_token

    # ------------------------------------------------------------------ generating

    async def _generate(self) -> _Ending:
        deadline_s = self.job.arrived_s + self.job.timeout_s
        try:
            async with asyncio.timeout_at(_loop_time(deadline_s)):
                refusal = await self._dispatch()
                if refusal is not None:
                    return refusal
                return await self._follow()
        except TimeoutError:
            self.kill(
                DeadlineExceededError(
                    f"The request took longer than {self.job.timeout_s:g} s; nothing is billed."
                )
            )
        return await self._wind_up()

    async def _dispatch(self) -> _Ending | None:
        """Hand the request to a replica that takes it; an ending if none does."""
        refused_by: set[str] = set()
        while True:
            if self._is_unwanted:
                return self._void(self._killed_by or AbandonedError("The client is gone."))
            self._is_dispatched = True
            try:
                self._stream = await self.replica.client.generate(self._message())
            except EngineRejectedError as error:
                self._is_dispatched = False
                refused_by.add(self.replica.record.replica_id)
                answer = _refusal(error, self.job.params)
                if not isinstance(answer, OverloadedError) or not await self._reroute(refused_by):
                    return self._void(answer)
                continue
            except EngineLostError:
                lost = EngineLostMidwayError(
                    "The engine was lost before it answered; nothing is billed.",
                    retry_after_s=RETRY_AFTER_S,
                )
                return self._fault(lost, "lost", "observed")
            return None

    async def _reroute(self, refused_by: set[str]) -> bool:
        """Choose another replica and note it, so that the sweeper would ask the right one."""
        try:
            self.replica = self.router.choose(
                self.job.model.base_model, self.job.num_tokens, refused_by
            )
            return await metering.assign(
                self.sessions,
                self.job.request_id,
                self.lease_token or 0,
                replica_id=self.replica.record.replica_id,
                attempt=_ATTEMPT,
            )
        except UnavailableError:  # no other replica, or no database to note it in
            return False

    def _message(self) -> Generate:
        job = self.job
        waited_s = time.monotonic() - job.arrived_s
        return Generate(
            request_id=str(job.request_id),
            attempt=_ATTEMPT,
            lease_token=self.lease_token or 0,
            tenant_id=str(job.tenant_id),
            tenant_salt=job.tenant_salt,
            prompt_token_ids=job.prompt_ids,
            sampling=job.sampling,
            adapter_digest=job.model.adapter_digest,
            deadline_unix_s=time.time() + job.timeout_s - waited_s,
        )

    async def _follow(self) -> _Ending:
        """Relay events until the terminal one."""
        if self._stream is None:
            raise RuntimeError("not dispatched")
        try:
            async for event in self._stream:
                self._take(event)
                if event.usage is not None:
                    return self._ended_by(event, event.usage)
        except EngineLostError:
            pass
        # Lost, or a stream that ended without a terminal event, which is the same to us.
        if self._has_all_text:
            return self._completed(self._observed_usage(), "observed")
        lost = EngineLostMidwayError(
            "The engine was lost while it ran the request; nothing is billed.",
            retry_after_s=RETRY_AFTER_S,
        )
        return self._fault(self._killed_by or lost, "lost", "observed")

    async def _wind_up(self) -> _Ending:
        """After the deadline: the engine has been told to stop; wait for its account, not for long."""
        error = self._killed_by or DeadlineExceededError("The request took too long.")
        if self._stream is None:
            # Dispatched, never answered: what it did, if anything, was not seen by anyone.
            return self._fault(error, "lost", "observed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_ANSWER_S):
                return await self._follow()
        return self._fault(error, "lost", "observed")

    def _take(self, event: TokenEvent) -> None:
        """Count a choice's tokens and release their text."""
        choice = self._choices[event.index]
        if event.token_ids:
            self._note_times(choice, len(event.token_ids))
            choice.num_observed += len(event.token_ids)
            self._release(event.index, self._text_of(choice, event))
        if choice.text.is_stopped:
            self._end_choice(event.index, "stop")
            if event.finish_reason is None:
                self._abort_choice(event.index)
        elif event.finish_reason in ("stop", "length"):
            self._end_choice(event.index, event.finish_reason)

    def _text_of(self, choice: _Choice, event: TokenEvent) -> TextPiece:
        piece = TextPiece()
        for position, token_id in enumerate(event.token_ids):
            if choice.text.is_stopped:
                break
            is_last = position == len(event.token_ids) - 1
            is_stop = is_last and event.finish_reason == "stop" and event.stop_token_id == token_id
            if is_stop and not self.job.shows_stop:
                choice.text.count()
            else:
                logprobs = None if event.logprobs is None else event.logprobs[position]
                piece.extend(choice.text.push(token_id, logprobs))
        return piece

    def _release(self, index: int, piece: TextPiece) -> None:
        if piece:
            self.events.put_nowait(ChoicePiece(index, piece))

    def _end_choice(self, index: int, reason: FinishReasonText) -> None:
        """Release the rest of a choice and say that it has ended, once."""
        choice = self._choices[index]
        if choice.reason is None:
            self._release(index, choice.text.finish())
            choice.reason = reason
            self.events.put_nowait(ChoiceEnded(index, reason))

    @property
    def _has_all_text(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    def _ended_by(self, event: TokenEvent, usage: Usage) -> _Ending:
        # A "stop" or "length" is of the event's own choice. Should the engine have said nothing of
        # another's end, then nobody knows its text: a fault.
        if self._has_all_text:
            return self._completed(usage, "terminal")
        if event.finish_reason == "abort" and self._killed_by is None and self._is_abandoned:
            attempt = self._attempt(usage, "aborted", "terminal")
            return _Ending(attempt, Failed(AbandonedError("The client is gone.")), "abort")
        error = self._killed_by or _engine_error(event, self.job.params)
        return self._fault(error, "fault", "terminal", usage)

    # ------------------------------------------------------------------ endings

    def _completed(self, usage: Usage, source: Source) -> _Ending:
        attempt = self._attempt(usage, "completed", source)
        billed = attempt.generated - attempt.discarded_past_stop
        report = UsageReport.of(usage.prompt_tokens, billed, usage.cached_tokens)
        reasons = {choice.reason for choice in self._choices}
        return _Ending(attempt, Finished(report), "length" if "length" in reasons else "stop")

    def _fault(
        self, error: PlatformError, outcome: Outcome, source: Source, usage: Usage | None = None
    ) -> _Ending:
        attempt = self._attempt(usage or self._observed_usage(), outcome, source)
        return _Ending(attempt, Failed(error), "error")

    def _void(self, error: PlatformError) -> _Ending:
        return _Ending(None, Failed(error))

    def _attempt(self, usage: Usage, outcome: Outcome, source: Source) -> AttemptUsage:
        return AttemptUsage(
            outcome=outcome,
            source=source,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated=usage.completion_tokens,
            discarded_past_stop=self._num_past_stop(usage),
            attempt=_ATTEMPT,
            replica_id=self.replica.record.replica_id,
        )

    def _num_past_stop(self, usage: Usage) -> int:
        """Tokens that choices generated after their stop string."""
        if all(choice.text.is_stopped for choice in self._choices):
            # Also what the engine sampled and never sent.
            return usage.completion_tokens - sum(choice.num_kept for choice in self._choices)
        return sum(choice.num_observed - choice.num_kept for choice in self._choices)

    def _observed_usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.job.prompt_ids),
            completion_tokens=sum(choice.num_observed for choice in self._choices),
        )

    async def _close_books(self, ending: _Ending) -> None:
        """Write the ending, trying for as long as it can matter; tell the client meanwhile."""
        if self._has_lost_lease:
            self.events.put_nowait(ending.event)
            return
        writing = asyncio.create_task(self._write_books(ending))
        await asyncio.wait({writing}, timeout=_SETTLE_WAIT_S)
        self.events.put_nowait(ending.event)
        await writing

    async def _write_books(self, ending: _Ending) -> None:
        give_up_s = time.monotonic() + _SETTLE_GIVE_UP_S
        while True:
            try:
                await self._write_books_once(ending)
            except UnavailableError:
                if time.monotonic() > give_up_s:
                    log.error("settle_given_up", request_id=str(self.job.request_id))
                    return
                self.metrics.settle_retries.inc()
                await asyncio.sleep(_SETTLE_RETRY_S)
            else:
                return

    async def _write_books_once(self, ending: _Ending) -> None:
        status, code = _http_outcome(ending.event)
        lease_token = self.lease_token or 0
        if ending.usage is None:
            await metering.void(
                self.sessions,
                self.job.request_id,
                lease_token,
                voided_by=self.owner,
                http_status=status,
                error_code=code,
            )
            self.metrics.requests_finished.labels("rejected").inc()
            return
        first_s, arrived_s = self._first_token_s, self.job.arrived_s
        result = await metering.settle(
            self.sessions,
            Settlement(
                request_id=self.job.request_id,
                lease_token=lease_token,
                usage=ending.usage,
                settled_by=self.owner,
                finish_reason=ending.finish_reason,
                http_status=status,
                error_code=code,
                ttft_ms=None if first_s is None else round((first_s - arrived_s) * 1000),
                e2e_ms=round((time.monotonic() - arrived_s) * 1000),
            ),
        )
        if result.applied:
            self._count(ending.usage, ending.finish_reason or "")

    # ------------------------------------------------------------------ small things

    @property
    def _is_unwanted(self) -> bool:
        return self._is_abandoned or self._killed_by is not None

    def _abort(self, *, is_platform_fault: bool) -> None:
        """Tell the engine to stop, once: the first reason is the one that it records.

        Should we die before we settle, the sweeper bills by that record alone.
        """
        if self._is_dispatched and not self._has_aborted:
            self._has_aborted = True
            self.replica.client.abort(
                str(self.job.request_id),
                _ATTEMPT,
                as_stop=self._has_all_text,
                is_platform_fault=is_platform_fault,
            )

    def _abort_choice(self, index: int) -> None:
        """A stop string has completed: this choice needs no more tokens."""
        choice = self._choices[index]
        if len(self._choices) == 1:
            self._abort(is_platform_fault=False)
        elif not (choice.has_aborted or self._has_aborted):
            choice.has_aborted = True
            self.replica.client.abort(str(self.job.request_id), _ATTEMPT, as_stop=True, index=index)

    def _note_times(self, choice: _Choice, num_tokens: int) -> None:
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
            histogram = self.metrics.time_to_first_token.labels(self.job.endpoint)
            histogram.observe(now_s - self.job.arrived_s)
            welcome = self.replica.client.welcome
            fingerprint = self.replica.record.model_fingerprint
            self.events.put_nowait(
                Started(fingerprint if welcome is None else welcome.model_fingerprint)
            )
        if choice.last_token_s is not None:
            gap_s = (now_s - choice.last_token_s) / num_tokens
            for _ in range(num_tokens):
                self.metrics.inter_token_latency.labels(self.job.endpoint).observe(gap_s)
        choice.last_token_s = now_s

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


class PumpSupervisor:
    """Owns the pumps: keeps their tasks alive, renews their leases, ends them at shutdown.

    Args:
        sessions: for renewals alone. They must not wait behind requests that crowd a shared pool, or
            a busy gateway loses its leases and with them the requests.
    """

    def __init__(self, sessions: SessionFactory, *, renew_interval_s: float = 5.0) -> None:
        self._sessions = sessions
        self._renew_interval_s = renew_interval_s
        self._tasks: dict[asyncio.Task[None], Pump] = {}

    @property
    def num_live(self) -> int:
        """How many those are."""
        return len(self._tasks)

    @property
    def live(self) -> list[Pump]:
        """Pumps that have not ended."""
        return list(self._tasks.values())

    def start(self, pump: Pump) -> None:
        """Run a pump to its end."""
        task = asyncio.create_task(pump.run(), name=f"pump {pump.job.request_id}")
        self._tasks[task] = pump
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def renew_forever(self) -> None:
        """Extend the leases of all pumps every few seconds; stop those that lost theirs."""
        while True:
            await asyncio.sleep(self._renew_interval_s)
            try:
                await self.renew_once()
            except UnavailableError as error:
                log.warning("renew_failed", reason=error.message)
            except Exception as error:  # noqa: BLE001 - other leases still need renewing
                log_crash("renew_crashed", error)

    async def renew_once(self) -> None:
        """One round."""
        pumps = {pump.job.request_id: pump for pump in self._tasks.values()}
        renewals = [r for pump in pumps.values() if (r := pump.renewal) is not None]
        for request_id in await metering.renew(self._sessions, renewals):
            pump = pumps[request_id]
            if pump.renewal is not None:  # not settled by itself meanwhile
                log.warning("lease_lost", request_id=str(request_id))
                pump.lose_lease()

    async def drain(self, grace_s: float, error: PlatformError) -> None:
        """Let pumps finish for `grace_s`, then end them, and wait until all have settled."""
        await self.wait(grace_s)
        for pump in self.live:
            pump.kill(error)
        await self.wait(_ABORT_ANSWER_S + _SETTLE_WAIT_S)

    async def wait(self, timeout_s: float) -> None:
        """Until the pumps of this moment have ended, or the time is over."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)


def _loop_time(monotonic_s: float) -> float:
    """A time of `time.monotonic` on the running loop's own clock."""
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()


def _refusal(error: EngineRejectedError, params: FieldNames) -> PlatformError:
    """What the client hears of a refusal at the engine's door."""
    retry_after_s = error.retry_after_s or 1.0
    match error.code:
        case "queue_full":
            state = f" ({error.num_waiting} requests are waiting)" if error.num_waiting else ""
            return OverloadedError(
                f"The engines are full{state}; try again.", retry_after_s=retry_after_s
            )
        case "draining":
            return OverloadedError(
                "The engine is restarting; try again.", code="draining", retry_after_s=retry_after_s
            )
        case "never_fits":
            return ContextLengthError(
                f"Prompt and {params.max_tokens} together can never fit the engine:"
                f" {error.message[:_MAX_REASON_CHARS]}",
                param=params.max_tokens,
            )
        case "invalid_request":
            return InvalidRequestError(
                f"The engine refused the request: {error.message[:_MAX_REASON_CHARS]}"
            )
        case "adapter_unavailable":
            return UnavailableError(
                "The model's adapter cannot be loaded right now; try again.",
                code="adapter_unavailable",
                retry_after_s=retry_after_s,
            )
        case "adapter_invalid":
            return EngineFailedError("The model's adapter is damaged.", code="adapter_invalid")


def _engine_error(event: TokenEvent, params: FieldNames) -> PlatformError:
    """What the client hears of a request that the engine ended by itself."""
    if event.error_code == "deadline_exceeded":
        return DeadlineExceededError("The request waited too long for its turn; nothing is billed.")
    if event.error_code in ("adapter_unavailable", "draining"):
        return UnavailableError(
            "The engine gave the request up; nothing is billed. Try again.",
            code=event.error_code,
            retry_after_s=RETRY_AFTER_S,
        )
    if event.error_code == "grammar_unavailable":
        return UnavailableError(
            "The engine cannot follow grammars right now; nothing is billed. Try again.",
            code=event.error_code,
            retry_after_s=RETRY_AFTER_S,
        )
    if event.error_code is not None and event.error_code.startswith("grammar_"):
        return GrammarRefusedError(
            f"The grammar of the answer ('{params.grammar}') cannot be followed:"
            f" {(event.error_message or '')[:_MAX_REASON_CHARS]}. Nothing is billed.",
            code=event.error_code,
            param=params.grammar,
        )
    if event.error_code == "no_token_allowed":
        return NoTokenAllowedError(
            f"No token is left to choose: '{params.bans}', or it together with other fields, rules"
            " all of them out; nothing is billed.",
            param=params.bans,
        )
    code = f" ({event.error_code})" if event.error_code else ""
    return EngineFailedError(f"The engine could not complete the request{code}; nothing is billed.")


def _http_outcome(event: Finished | Failed) -> tuple[int, str | None]:
    """For the request log: how it really ended, even where a stream's 200 had gone out before."""
    if isinstance(event, Finished):
        return 200, None
    return event.error.status, event.error.error_code
