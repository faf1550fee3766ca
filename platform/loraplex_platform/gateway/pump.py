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
| refused by the engine, gone before dispatch, or not the first with its Idempotency-Key | void |
| lease lost (the sweeper took over) | none here: the sweeper settles, and the tenant pays nothing |

A rollout's shadow (`copying.py`) is run by the same rules, so that it ends as its original would, but for a
tenant who pays for none of it.

Where Postgres does not take the ending it goes to the spool (`spool.py`), before the client hears of it.
So whoever has heard the end of an answer pays for it, and nobody hears more of one whose lease we know
to be lost: a process that stood still asks before it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog
from loraplex_engine.client import EngineLostError, EngineRejectedError, EngineStream
from loraplex_engine.protocol import Generate, TokenEvent, Usage

from loraplex_platform.db.deadline import within
from loraplex_platform.db.session import SessionFactory
from loraplex_platform.errors import OverloadedError, PlatformError, UnavailableError
from loraplex_platform.gateway.admissions import RateGate
from loraplex_platform.gateway.books import ANSWER_WAIT_S, Books, Closed, Ending, Pace
from loraplex_platform.gateway.choice import Choice
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.engine_refusals import engine_error, refusal
from loraplex_platform.gateway.errors import (
    AbandonedError,
    DeadlineExceededError,
    EngineLostMidwayError,
)
from loraplex_platform.gateway.event_queue import EventQueue
from loraplex_platform.gateway.failpoints import INERT, Failpoints
from loraplex_platform.gateway.idempotency import Retries
from loraplex_platform.gateway.job import (
    ChoiceEnded,
    ChoicePiece,
    Failed,
    Finished,
    Job,
    PumpEvent,
    Started,
)
from loraplex_platform.gateway.metrics import GatewayMetrics
from loraplex_platform.gateway.openai_schemas import FinishReasonText, UsageReport
from loraplex_platform.gateway.routing import RETRY_AFTER_S, Replica, Router
from loraplex_platform.gateway.spool import Spool
from loraplex_platform.gateway.text_stream import TextPiece
from loraplex_platform.gateway.token_times import TokenTimes
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage, Outcome, Source
from loraplex_platform.metering.records import LEASE_S, Renewal, Reservation
from loraplex_platform.quotas.errors import LimitError
from loraplex_platform.quotas.refusal_log import RefusalLog
from loraplex_platform.rates.admission import RateLimitedError, TokenUse

log = structlog.get_logger(__name__)

_ATTEMPT = 1
ABORT_ANSWER_S = 10.0  # a live engine answers an abort within a step


@dataclass(slots=True, eq=False)
class Pump:
    """See the module's header. `run` is the task; `next_event` and `abandon` are the listener's."""

    job: Job
    replica: Replica
    owner: str
    sessions: SessionFactory
    router: Router
    retries: Retries
    refusals: RefusalLog
    spool: Spool | None
    database_deadline_s: float  # of its reservation
    token_bytes: TokenBytes
    metrics: GatewayMetrics
    failpoints: Failpoints = INERT
    lease_s: float = LEASE_S
    gate: RateGate | None = None  # None: no limits, as in a profile
    # Told once the books are closed by us: what is done with an answer after its client has it.
    on_closed: Callable[[Pump, Ending], None] | None = None
    events: EventQueue[PumpEvent] = field(default_factory=EventQueue)
    lease_token: int | None = None
    clamped_max_tokens: int | None = (
        None  # of each choice, if a quota does not pay what was asked for
    )
    is_over: bool = False
    _choices: list[Choice] = field(init=False)
    _times: TokenTimes = field(default_factory=TokenTimes, init=False)  # of the first choice
    _kept_ids: list[int] | None = field(default=None, init=False)  # of the first choice
    _first_token_s: float | None = field(default=None, init=False)
    _fingerprint: str | None = field(default=None, init=False)  # of whoever it was handed to
    _stream: EngineStream | None = field(default=None, init=False)
    _lease_ends_s: float = field(default=0.0, init=False)  # monotonic
    _is_abandoned: bool = field(default=False, init=False)
    _is_dispatched: bool = field(default=False, init=False)  # the engine may know of it
    _has_aborted: bool = field(default=False, init=False)
    _has_lost_lease: bool = field(default=False, init=False)
    _last_end: ChoiceEnded | None = field(default=None, init=False)
    # What is not told yet, while somebody asks whether the lease is still ours; None: nobody does.
    _held: list[PumpEvent] | None = field(default=None, init=False)
    _asking: asyncio.Task[None] | None = field(default=None, init=False)
    _killed_by: PlatformError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._choices = [Choice.of(self.job, self.token_bytes) for _ in range(self.job.sampling.n)]
        if self.job.copies is not None and self.job.copies.is_scored:
            self._kept_ids = []

    # ------------------------------------------------------------------ the listener's side

    async def next_event(self) -> PumpEvent:
        """The next thing to tell the client; the last one is `Finished` or `Failed`."""
        return await self.events.get()

    async def next_events(self) -> list[PumpEvent]:
        """All there is to tell, at least one."""
        return await self.events.get_all()

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
        self.kill(_given_up())

    def note_renewed(self, asked_s: float) -> None:
        """The lease was extended by a statement that began then (monotonic)."""
        self._lease_ends_s = asked_s + self.lease_s

    def note_database_away(self) -> None:
        """The lease could not be extended. What runs goes on: we are awake, and nobody can sweep either.

        Should only we be cut off, the sweeper stops the engine, and we hear of it from there.
        """
        now_s = time.monotonic()
        if self._is_dispatched and now_s < self._lease_ends_s:
            self._lease_ends_s = now_s + self.lease_s

    @property
    def answer_ids(self) -> list[int]:
        """Tokens of the first choice, with the one that ended it and none past a stop string; kept only for
        answers that are to be scored.
        """
        return (self._kept_ids or [])[: self._choices[0].num_kept]

    @property
    def renewal(self) -> Renewal | None:
        """The lease to extend, if one is held."""
        if self.lease_token is None or self.is_over:
            return None
        # The sweeper may bill an abort up to the checkpoint: nothing past a stop string may be in it.
        checkpoint = sum(choice.num_kept for choice in self._choices)
        return Renewal(self.job.request_id, self.lease_token, checkpoint)

    # ------------------------------------------------------------------ the task

    async def run(self) -> None:
        """Admit, reserve, generate, settle."""
        structlog.contextvars.bind_contextvars(tenant_id=str(self.job.tenant_id))
        self.metrics.in_flight.inc()
        try:
            try:
                await self._enter()
                self.failpoints.hit("after_admit")
                await self._reserve()
            except PlatformError as error:
                await self._leave(None)
                if isinstance(error, LimitError | RateLimitedError):
                    job = self.job
                    self.refusals.note(job.tenant_id, job.key_id, job.request_id, error)
                self.events.put_nowait(Failed(error))
                return
            try:
                ending = await self._claim() or await self._generate()
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
            await self._leave(None)  # only what nobody else has given back
            elapsed_s = time.monotonic() - self.job.arrived_s
            self.metrics.e2e_latency.labels(self.job.endpoint).observe(elapsed_s)

    async def _enter(self) -> None:
        """Take the request's share of the rate limits."""
        if self.gate is not None:
            await self.gate.enter()

    async def _leave(self, used: TokenUse | None) -> None:
        """Give back what it does not need any more; the first call counts."""
        if self.gate is not None:
            await self.gate.leave(used)

    async def _reserve(self) -> None:
        job = self.job
        side = job.side
        self.failpoints.hit("before_tx1")
        self.failpoints.hit("inside_tx1")
        reserving = metering.reserve(
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
                num_choices=job.sampling.n,
                min_completion_tokens=max(1, job.sampling.min_tokens),
                is_stream=job.is_stream,
                has_stop_strings=bool(job.stops or (job.tools and job.tools.ends_after_call)),
                deployment_id=job.model.deployment_id,
                revision_id=job.model.revision.id,
                adapter_version_id=job.model.revision.adapter_version_id,
                replica_id=self.replica.record.replica_id,
                attempt=_ATTEMPT,
                kind=job.kind,
                lease_s=self.lease_s,
                rollout_id=None if side is None else side.rollout_id,
                rollout_step=None if side is None else side.step,
                arm=None if side is None else side.arm,
                subject_key=None if side is None else side.subject_key,
                shadow_of=job.shadow_of,
                sampling=job.sampling_record,
            ),
        )
        self._lease_ends_s = time.monotonic() + self.lease_s  # or later: it begins in the database
        # Should it come true after all, the sweeper lets go of it when its lease is over.
        reserved = await within(self.database_deadline_s, reserving)
        self.lease_token = reserved.lease_token
        self.failpoints.hit("after_tx1")
        if reserved.max_tokens < job.sampling.max_tokens:
            # No more than a quota pays: so a hard limit cannot be exceeded, however it ends.
            sampling = msgspec.structs.replace(job.sampling, max_tokens=reserved.max_tokens)
            self.job = dataclasses.replace(job, sampling=sampling)
            self.clamped_max_tokens = reserved.max_tokens

    async def _claim(self) -> Ending | None:
        """Have the Idempotency-Key stand for this request; an ending if it cannot."""
        if self.job.retry is not None:
            try:
                await self.retries.claim(self.job.retry.claim, self.job.request_id)
            except PlatformError as error:
                return self._void(error)
        return None

    # ------------------------------------------------------------------ generating

    async def _generate(self) -> Ending:
        deadline_s = self.job.arrived_s + self.job.timeout_s
        try:
            async with asyncio.timeout_at(_loop_time(deadline_s)):
                ended = await self._dispatch()
                if ended is not None:
                    return ended
                return await self._follow()
        except TimeoutError:
            self.kill(
                DeadlineExceededError(
                    f"The request took longer than {self.job.timeout_s:g} s; nothing is billed."
                )
            )
        return await self._wind_up()

    async def _dispatch(self) -> Ending | None:
        """Hand the request to a replica that takes it; an ending if none does."""
        refused_by: set[str] = set()
        while True:
            if self._is_unwanted:
                return self._void(self._killed_by or AbandonedError("The client is gone."))
            self.failpoints.hit("before_dispatch")
            try:
                if not await self._holds_lease():
                    self.lose_lease()
                    continue
            except UnavailableError as error:
                return self._void(error)
            self.failpoints.hit("before_send")
            self._is_dispatched = True
            self._fingerprint = self.replica.fingerprint
            try:
                self._stream = await self.replica.client.generate(self._message())
            except EngineRejectedError as error:
                self._is_dispatched = False
                refused_by.add(self.replica.record.replica_id)
                answer = refusal(error, self.job.params)
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

    async def _holds_lease(self) -> bool:
        """Whether the request is still ours.

        A process that had no time for it until its lease was over may find it void, and what it held of
        a quota given to others: then it must not run.
        """
        renewal = self.renewal
        if renewal is None or time.monotonic() < self._lease_ends_s:
            return True
        asked_s = time.monotonic()
        renewing = metering.renew(self.sessions, [renewal], lease_s=self.lease_s)
        lost = await within(self.database_deadline_s, renewing)
        self.note_renewed(asked_s)
        return not lost

    async def _reroute(self, refused_by: set[str]) -> bool:
        """Choose another replica and note it, so that the sweeper would ask the right one."""
        try:
            model = self.job.model
            self.replica = self.router.choose(
                model.base_model, self.job.num_tokens, refused_by, builds=model.builds
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
            adapter_digest=job.model.revision.adapter_digest,
            priority=job.priority,
            weight=job.weight,
            memory_weight=job.memory_weight,
            max_adapters=job.max_adapters,
            deadline_unix_s=time.time() + job.timeout_s - waited_s,
        )

    async def _follow(self) -> Ending:
        """Relay events until the terminal one."""
        if self._stream is None:
            raise RuntimeError("not dispatched")
        with contextlib.suppress(EngineLostError):
            event = await self._stream.follow(self._take)
            self.failpoints.hit("after_terminal")
            if event.usage is not None:  # else without an account, which is as if it were lost
                return self._ended_by(event, event.usage)
        if self._has_all_text:
            return self._completed(self._observed_usage(), "observed")
        lost = EngineLostMidwayError(
            "The engine was lost while it ran the request; nothing is billed.",
            retry_after_s=RETRY_AFTER_S,
        )
        return self._fault(self._killed_by or lost, "lost", "observed")

    async def _wind_up(self) -> Ending:
        """After the deadline: the engine has been told to stop; wait for its account, not for long."""
        error = self._killed_by or DeadlineExceededError("The request took too long.")
        if self._stream is None:
            # Dispatched, never answered: what it did, if anything, was not seen by anyone.
            return self._fault(error, "lost", "observed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_ANSWER_S):
                return await self._follow()
        return self._fault(error, "lost", "observed")

    def _take(self, event: TokenEvent) -> None:
        """Count a choice's tokens and release their text."""
        choice = self._choices[event.index]
        self.failpoints.hit("mid_stream" if event.usage is None else "before_terminal")
        if event.token_ids:
            self._note_times(choice, event.index, len(event.token_ids))
            if self._kept_ids is not None and event.index == 0:
                self._kept_ids += event.token_ids
            self._release(event.index, choice.take(event))
        if choice.text.is_stopped:
            self._end_choice(event.index, "stop")
            if event.finish_reason is None:
                self._abort_choice(event.index)
        elif event.finish_reason in ("stop", "length"):
            self._end_choice(event.index, event.finish_reason)

    def _release(self, index: int, piece: TextPiece) -> None:
        if piece:
            self._tell(ChoicePiece(index, piece))

    def _tell(self, event: PumpEvent) -> None:
        """Let the listener have it, unless we stood still past the end of our lease: then ask first.

        What we held may be void by then, and what we reserved given to others.
        """
        if self._has_lost_lease:
            return
        if self._held is None:
            if time.monotonic() < self._lease_ends_s:
                self.events.put_nowait(event)
                return
            self._held = []
            self._asking = asyncio.create_task(self._tell_if_held())
        self._held.append(event)

    async def _tell_if_held(self) -> None:
        """Tell what waits for it, once the lease is known to be ours."""
        try:
            if not await self._holds_lease():
                self.lose_lease()
        except UnavailableError:
            self._lease_ends_s = time.monotonic() + self.lease_s  # as `note_database_away`
        held, self._held = self._held or [], None
        for event in held:
            self._tell(event)

    def _end_choice(self, index: int, reason: FinishReasonText) -> None:
        """Release the rest of a choice and say that it has ended, once."""
        choice = self._choices[index]
        if choice.reason is None:
            self._release(index, choice.text.finish())
            choice.reason = reason
            event = ChoiceEnded(index, reason)
            if self._has_all_text:
                self._last_end = event  # with which the answer is complete: after the books
            else:
                self._tell(event)

    @property
    def _has_all_text(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    def _ended_by(self, event: TokenEvent, usage: Usage) -> Ending:
        # A "stop" or "length" is of the event's own choice. Should the engine have said nothing of
        # another's end, then nobody knows its text: a fault.
        if self._has_all_text:
            return self._completed(usage, "terminal")
        if event.finish_reason == "abort" and self._killed_by is None and self._is_abandoned:
            attempt = self._attempt(usage, "aborted", "terminal")
            return Ending(attempt, Failed(AbandonedError("The client is gone.")), "abort")
        error = self._killed_by or engine_error(event, self.job.params)
        return self._fault(error, "fault", "terminal", usage)

    # ------------------------------------------------------------------ endings

    def _completed(self, usage: Usage, source: Source) -> Ending:
        attempt = self._attempt(usage, "completed", source)
        billed = attempt.generated - attempt.discarded_past_stop
        report = UsageReport.of(usage.prompt_tokens, billed, usage.cached_tokens)
        reasons = {choice.reason for choice in self._choices}
        return Ending(attempt, Finished(report), "length" if "length" in reasons else "stop")

    def _fault(
        self, error: PlatformError, outcome: Outcome, source: Source, usage: Usage | None = None
    ) -> Ending:
        attempt = self._attempt(usage or self._observed_usage(), outcome, source)
        return Ending(attempt, Failed(error), "error")

    def _void(self, error: PlatformError) -> Ending:
        return Ending(None, Failed(error))

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

    async def _close_books(self, ending: Ending) -> None:
        """Write the ending, then tell the client.

        A client is told the end of its answer only where it is on the books or on our disk; where both are
        away for longer than a client may wait, we answer on what we remember.
        """
        if self._asking is not None:
            await self._asking
        if self._has_lost_lease:
            await self._leave(TokenUse(0, 0))
            self.events.put_nowait(_unless_finished(ending.event))
            return
        job = self.job
        books = Books(
            job.request_id,
            job.kind,
            self.owner,
            job.arrived_s,
            self.sessions,
            self.metrics,
            self.spool,
        )
        pace = Pace(self._first_token_s, self._fingerprint, self._times.mean_ms, self._times.p95_ms)
        self.failpoints.hit("before_tx2")
        self.failpoints.hit("inside_tx2")
        closing = asyncio.create_task(books.close(ending, self.lease_token or 0, pace))
        # A client that asks again as soon as it has its answer must find its place free.
        await self._leave(_use_of(ending))
        await asyncio.wait({closing}, timeout=ANSWER_WAIT_S)
        self.failpoints.hit("after_tx2")
        is_ours = await self._is_ours(closing.result() if closing.done() else None)
        self._tell_end(ending.event if is_ours else _unless_finished(ending.event))
        if await closing != "overtaken" and self.on_closed is not None:
            self.on_closed(self, ending)

    def _tell_end(self, event: Finished | Failed) -> None:
        """The last thing that the listener hears."""
        if isinstance(event, Finished) and self._last_end is not None:
            self.events.put_nowait(self._last_end)
        self.events.put_nowait(event)

    async def _is_ours(self, closed: Closed | None) -> bool:
        """Whether our ending counts. None: it is not written yet.

        If we stood still past our lease, the sweeper may have been faster than what we wrote to our disk.
        """
        if closed in ("booked", "overtaken"):
            return closed == "booked"
        if time.monotonic() < self._lease_ends_s:
            return True
        try:
            return await self._holds_lease() or await metering.was_closed_by(
                self.sessions, self.job.request_id, self.owner
            )
        except UnavailableError:
            return True

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

    def _note_times(self, choice: Choice, index: int, num_tokens: int) -> None:
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
            histogram = self.metrics.time_to_first_token.labels(self.job.endpoint)
            histogram.observe(now_s - self.job.arrived_s)
            self.failpoints.hit("after_first_token")
            self._tell(Started(self.replica.fingerprint))
        if choice.last_token_s is not None:
            gap_s = (now_s - choice.last_token_s) / num_tokens
            self.metrics.inter_token_latency.observe(self.job.endpoint, gap_s, num_tokens)
            if index == 0:
                self._times.note(gap_s, num_tokens)
        choice.last_token_s = now_s


def _given_up() -> EngineLostMidwayError:
    return EngineLostMidwayError(
        "The request was given up; nothing is billed.", retry_after_s=RETRY_AFTER_S
    )


def _unless_finished(event: Finished | Failed) -> Failed:
    """What a client hears whose request the sweeper has settled: not the end of a free answer."""
    return event if isinstance(event, Failed) else Failed(_given_up())


def _use_of(ending: Ending) -> TokenUse | None:
    """What a request counts for in token rates: what its client got; None: it did not run."""
    usage = ending.usage
    if usage is None:
        return None
    if usage.outcome in ("fault", "lost"):
        return TokenUse(0, 0)
    discarded = usage.discarded_past_stop + usage.discarded_past_abort
    return TokenUse(usage.prompt_tokens, usage.generated - discarded)


def _loop_time(monotonic_s: float) -> float:
    """A time of `time.monotonic` on the running loop's own clock."""
    return asyncio.get_running_loop().time() + monotonic_s - time.monotonic()
