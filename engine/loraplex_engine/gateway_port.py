"""The engine's side of the wire: one ROUTER socket, the gateways behind it, and the journal.

Runs on its own thread, so that heartbeats, queries and refusals are answered during a long step. It
keeps who asked for which request; it computes nothing. What it promises:

* A terminal event leaves only after its journal entry is on disk. All that is waiting when the
  thread comes round is written with one fsync (group commit).
* One `StepFrame` per gateway and step.
* (request_id, attempt) runs at most once: a copy of a live one is answered and ignored, a copy of an
  ended one is refused.
* Nothing is lost silently: a gateway that cannot be sent to, has more bytes waiting than it may have
  (`gateway_queues.py`), or has been silent too long, is cut off as a whole and its requests end with an
  error; it will find us silent and connect anew. Nobody else's are touched.
* A frame that does not parse is counted and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import structlog
import zmq

from loraplex_engine.endpoint import FAREWELL_MS, Endpoint
from loraplex_engine.errors import PinRefusedError, QueueFullError
from loraplex_engine.gateway_queues import CutReason, GatewayQueues
from loraplex_engine.journal import Journal, JournalError
from loraplex_engine.protocol import (
    GATEWAY_TIMEOUT_S,
    GIVEN_UP,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    EngineMessage,
    EngineStats,
    GatewayMessage,
    Generate,
    Hello,
    JournalEntry,
    JournalQuery,
    JournalReply,
    PinAdapter,
    PinRefusal,
    PinReply,
    PrefetchAdapter,
    RejectCode,
    Rejected,
    StatsQuery,
    StatsReply,
    StepFrame,
    TokenEvent,
    UnpinAdapter,
    Usage,
    UsageQuery,
    UsageReply,
    Welcome,
    decode_from_gateway,
    encode,
    is_adapter_digest,
)
from loraplex_engine.step_loop import (
    Admitted,
    Failed,
    Output,
    Pin,
    Poisoned,
    ReplicaFacts,
    Started,
    StepOutput,
    Work,
)

log = structlog.get_logger(__name__)

POLL_MS = 250
RETRY_MS = 5  # while frames wait: ZeroMQ does not say when a gateway reads again
MAX_FRAMES_PER_TURN = 512  # then events get their turn
MAX_JOURNAL_PAGE = 2000
MAX_PINS_UNDER_WAY = 64  # more would only pile up in a long step
NUM_CUT_OFF_REMEMBERED = 4096
RETRY_AFTER_S = 1.0

GATEWAY_QUEUE_BYTES = 64 * 1024**2
MIN_GATEWAY_QUEUE_BYTES = 1024**2

Attempt = tuple[str, int]
_CUT: dict[CutReason, str] = {
    "silent": "lost",
    "slow": "too slow to read what was sent",
    "unreachable": "lost",
}


class PortMetrics(Protocol):
    """What the port counts."""

    def count_rejected(self, code: RejectCode) -> None: ...
    def count_malformed(self) -> None: ...
    def observe_first_token(self, seconds: float) -> None: ...
    def observe_end(self, seconds: float, usage: Usage) -> None: ...
    def observe_commit(self, seconds: float) -> None: ...
    def count_cut(self, reason: CutReason) -> None: ...
    def note_queued_bytes(self, num_bytes: int) -> None: ...


@dataclass(slots=True)
class _Gateway:
    gateway_id: str
    heard_at: float
    live: set[Attempt] = field(default_factory=set)


@dataclass(slots=True)
class _Live:
    """A request that was taken and has not ended."""

    identity: bytes
    request: Generate
    arrived_at: float
    num_tokens: int = 0
    is_aborted: bool = False  # by its gateway; the first word counts
    stopped: set[int] = field(default_factory=set)  # choices of which the gateway said so
    cut_short: tuple[str, str] | None = None  # by us, not the client: error code and message

    def is_news(self, abort: Abort) -> bool:
        """Whether this abort asks for what was not asked for before; remembers it."""
        if self.is_aborted:
            return False
        if abort.as_stop and abort.index is not None:
            if not 0 <= abort.index < self.request.sampling.n or abort.index in self.stopped:
                return False
            self.stopped.add(abort.index)
            return True
        self.is_aborted = True
        return True


class GatewayPort:
    """See the module's header. `publish`, `begin_drain`, `abort_all`, `stop`: from any thread.

    Args:
        endpoint: the bound socket.
        submit: hands work to the step loop.
        latest_stats: the step loop's last snapshot; None while the model loads.
        gateway_queue_bytes: a gateway for which more waits is cut off.
        max_live: more unfinished requests than the engine could even queue are refused here.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        journal: Journal,
        submit: Callable[[Work], None],
        latest_stats: Callable[[], EngineStats | None],
        metrics: PortMetrics,
        *,
        replica_id: str,
        incarnation: str,
        max_live: int,
        gateway_timeout_s: float = GATEWAY_TIMEOUT_S,
        gateway_queue_bytes: int = GATEWAY_QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts: ReplicaFacts | None = None
        self.failure: str | None = None  # why the port or the step loop gave up
        self.is_draining = False
        self.is_stalled = False  # no step completes: send us nothing more
        self.changed = threading.Event()  # set when facts, failure or the number of requests change
        self._endpoint = endpoint
        self._router = endpoint.router
        self._journal = journal
        self._submit = submit
        self._latest_stats = latest_stats
        self._metrics = metrics
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._max_live = max_live
        self._gateway_timeout_s = gateway_timeout_s
        self._queues = GatewayQueues(endpoint.router, gateway_queue_bytes)
        self._clock = clock
        self._gateways: dict[bytes, _Gateway] = {}
        self._cut_off: dict[bytes, None] = {}  # identities that we no longer answer, oldest first
        self._live: dict[Attempt, _Live] = {}
        self._num_pins = 0  # that the step loop has not answered
        self._outbox: deque[Output | Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="gateway-port", daemon=True)

    # ------------------------------------------------------------------ from any thread

    @property
    def num_live(self) -> int:
        """Requests taken and not ended."""
        return len(self._live)

    @property
    def num_gateways(self) -> int:
        """Gateways that are connected and heard of lately."""
        return len(self._gateways)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def publish(self, output: Output) -> None:
        """Hand over what the step loop produced."""
        self._enqueue(output)

    def begin_drain(self) -> None:
        """Refuse new requests and tell every gateway."""
        self.is_draining = True
        self._enqueue(self._welcome_all)

    def note_stall(self, is_stalled: bool) -> None:
        """Tell every gateway that steps have stopped, or go on."""
        self.is_stalled = is_stalled
        self._enqueue(self._welcome_all)

    def abort_all(self) -> None:
        """Cut every request short: they end with an error, not billed to the tenant."""
        self._enqueue(self._cut_all_short)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Send what is queued and end; False: the thread did not end in time."""
        self._is_stopping = True
        self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _enqueue(self, item: Output | Callable[[], None]) -> None:
        self._outbox.append(item)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"!")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        except JournalError as error:
            # Nothing more may be acknowledged: gateways learn of the loss from our death.
            log.exception("journal_failed")
            self.failure = str(error)
        except Exception as error:
            log.exception("gateway_port_failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._endpoint.close()
            self.changed.set()

    def _serve(self) -> None:
        while True:
            is_last_turn = self._is_stopping
            pause_ms = POLL_MS if self._queues.is_empty else RETRY_MS
            self.turn(0 if self._outbox or is_last_turn else pause_ms)
            if self.failure is not None or (is_last_turn and not self._outbox):
                self._say_farewell()
                return

    def turn(self, wait_ms: int) -> None:
        """Wait up to `wait_ms` for something to come, then take all frames and send all outputs.

        The port's thread calls it over and over; of a port that was not started, whoever drives it.
        """
        ready = dict(self._poller.poll(wait_ms))
        if self._wake_read in ready:
            os.read(self._wake_read, 65536)
        if self._router in ready:
            self._take_frames()
        self._send_outputs()
        self._flush_queues()
        self._drop_silent_gateways()

    def _say_farewell(self) -> None:
        """What still waits for gateways, for as long as closing the socket may take besides."""
        give_up = time.monotonic() + FAREWELL_MS / 1000
        while not self._queues.is_empty and time.monotonic() < give_up:
            self._flush_queues()
            time.sleep(RETRY_MS / 1000)

    def _take_frames(self) -> None:
        for _ in range(MAX_FRAMES_PER_TURN):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            identity = parts[0]
            if identity in self._cut_off:
                continue
            try:
                if len(parts) != 2:
                    raise msgspec.DecodeError(f"{len(parts)} parts")
                message = decode_from_gateway(parts[1])
            except Exception as error:  # noqa: BLE001 - RecursionError too: a frame of brackets
                self._metrics.count_malformed()
                gateway = self._gateways.get(identity)
                log.warning(
                    "frame_malformed",
                    gateway_id=gateway.gateway_id if gateway else None,
                    size_bytes=sum(len(part) for part in parts[1:]),
                    error=str(error)[:200],
                )
                continue
            self._handle(identity, message)

    def _handle(self, identity: bytes, message: GatewayMessage) -> None:
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        gateway = self._gateways.get(identity)
        if gateway is None:
            if isinstance(message, Generate):
                self._reject(identity, message, "invalid_request", "say hello first")
            return
        gateway.heard_at = self._clock()
        match message:
            case Generate():
                self._take_request(identity, gateway, message)
            case Abort():
                live = self._live.get((message.request_id, message.attempt))
                if live is not None and live.is_news(message):  # more would pile up in a long step
                    self._submit(message)
            case PrefetchAdapter():
                if self.facts is not None:
                    self._submit(message)
            case PinAdapter() | UnpinAdapter():
                self._take_pin(identity, message)
            case StatsQuery():
                stats = self._latest_stats()
                if stats is not None:
                    self._send(identity, StatsReply(query_id=message.query_id, stats=stats))
            case UsageQuery():
                self._send(identity, self._find_usage(message))
            case JournalQuery():
                limit = min(max(message.limit, 0), MAX_JOURNAL_PAGE)
                reply = JournalReply(
                    query_id=message.query_id,
                    journal_id=self._journal.journal_id,
                    entries=self._journal.read(max(message.after_seq, 0), limit),
                )
                self._send(identity, reply)

    def _take_pin(self, identity: bytes, message: PinAdapter | UnpinAdapter) -> None:
        def refuse(code: PinRefusal, text: str) -> None:
            reply = PinReply(query_id=message.query_id, refusal=code, message=text)
            self._send(identity, reply)

        def answer(outcome: frozenset[str] | PinRefusedError) -> None:
            self._enqueue(lambda: finish(outcome))  # from the loop's thread to this one

        def finish(outcome: frozenset[str] | PinRefusedError) -> None:
            self._num_pins -= 1
            if identity not in self._gateways:
                return
            if isinstance(outcome, PinRefusedError):
                refuse(outcome.code, str(outcome))
            else:
                reply = PinReply(query_id=message.query_id, pinned=sorted(outcome))
                self._send(identity, reply)

        if not is_adapter_digest(message.adapter_digest):
            refuse("invalid_digest", "adapter_digest is not 'sha256:' and 64 lower-case hex digits")
        elif self.facts is None or self.failure is not None:
            refuse("not_ready", "the replica does not run steps")
        elif self._num_pins >= MAX_PINS_UNDER_WAY:
            refuse("busy", f"{self._num_pins} pins wait for a step to end")
        else:
            self._num_pins += 1
            is_wanted = isinstance(message, PinAdapter)
            self._submit(Pin(message.adapter_digest, is_wanted, answer))

    # ------------------------------------------------------------------ gateways

    def _greet(self, identity: bytes, hello: Hello) -> None:
        known = self._gateways.get(identity)
        if known is not None:
            known.heard_at = self._clock()
        elif hello.protocol_version == PROTOCOL_VERSION:
            self._gateways[identity] = _Gateway(hello.gateway_id, self._clock())
            log.info("gateway_connected", gateway_id=hello.gateway_id)
        else:  # our Welcome names the version that we speak
            log.warning("gateway_version", gateway_id=hello.gateway_id, has=hello.protocol_version)
        self._send(identity, self._welcome())

    def _welcome(self) -> Welcome:
        facts = self.facts
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            model_fingerprint=facts.model_fingerprint if facts else "",
            max_model_len=facts.max_model_len if facts else 0,
            is_ready=facts is not None and not self.is_stalled,
            is_draining=self.is_draining,
        )

    def _welcome_all(self) -> None:
        for identity in list(self._gateways):
            self._send(identity, self._welcome())

    def _drop_silent_gateways(self) -> None:
        oldest = self._clock() - self._gateway_timeout_s
        for identity, gateway in list(self._gateways.items()):
            if gateway.heard_at < oldest:
                self._cut(identity, "silent")

    def _cut(self, identity: bytes, reason: CutReason) -> None:
        self._queues.forget(identity)
        gateway = self._gateways.pop(identity, None)
        if gateway is None:
            return
        self._metrics.count_cut(reason)
        self._cut_off[identity] = None
        if len(self._cut_off) > NUM_CUT_OFF_REMEMBERED:
            del self._cut_off[next(iter(self._cut_off))]
        log.log(
            logging.WARNING if gateway.live else logging.INFO,
            "gateway_lost",
            gateway_id=gateway.gateway_id,
            reason=reason,
            num_requests=len(gateway.live),
        )
        for key in gateway.live:
            self._cut_short(
                key, "gateway_lost", f"its gateway was {_CUT[reason]} before the request was done"
            )

    def _send(self, identity: bytes, message: EngineMessage) -> None:
        outcome = self._queues.send(identity, encode(message))
        if outcome in ("slow", "unreachable"):
            self._cut(identity, outcome)
        elif outcome == "waits" and identity not in self._gateways:
            self._queues.forget(identity)  # a stranger that does not read what it is told

    def _flush_queues(self) -> None:
        for identity in self._queues.flush():
            self._cut(identity, "unreachable")
        self._metrics.note_queued_bytes(self._queues.num_bytes)

    # ------------------------------------------------------------------ requests

    def _take_request(self, identity: bytes, gateway: _Gateway, request: Generate) -> None:
        key = (request.request_id, request.attempt)
        live = self._live.get(key)
        if live is not None:
            if live.identity == identity:
                self._send(identity, Accepted(request_id=key[0], attempt=key[1]))
            else:
                self._reject(
                    identity, request, "invalid_request", "this attempt runs; use a new one"
                )
        elif self._journal.find(*key) is not None:
            self._reject(identity, request, "invalid_request", "this attempt ended; use a new one")
        elif self.is_draining:
            self._reject(identity, request, "draining", "the replica is shutting down")
        elif self.facts is None:
            self._reject(identity, request, "queue_full", "the replica is loading its model")
        elif len(self._live) >= self._max_live:
            stats = self._latest_stats()
            num_live, num_running = len(self._live), 0 if stats is None else stats.num_running
            self._reject(
                identity,
                request,
                "queue_full",
                f"{num_live} requests are unfinished",
                None if stats is None else stats.queue_retry_after_s,
                num_live - num_running,
            )
        else:
            self._live[key] = _Live(identity, request, self._clock())
            gateway.live.add(key)
            self._submit(request)

    def _reject(
        self,
        identity: bytes,
        request: Generate,
        code: RejectCode,
        message: str,
        retry_after_s: float | None = None,
        num_waiting: int | None = None,
    ) -> None:
        self._metrics.count_rejected(code)
        stats = self._latest_stats()
        if num_waiting is None:
            num_waiting = stats.num_waiting if stats is not None else 0
        is_passing = code in ("queue_full", "draining", "adapter_unavailable")
        rejected = Rejected(
            request_id=request.request_id,
            attempt=request.attempt,
            code=code,
            message=message,
            num_waiting=num_waiting,
            retry_after_s=retry_after_s or (RETRY_AFTER_S if is_passing else None),
        )
        self._send(identity, rejected)

    def _cut_all_short(self) -> None:
        for key in self._live:
            self._cut_short(key, "draining", "the replica shut down before the request was done")

    def _cut_short(self, key: Attempt, code: str, message: str) -> None:
        """End a request by ourselves: an error, which no tenant pays for."""
        live = self._live[key]
        live.cut_short = live.cut_short or (code, message)
        self._submit(Abort(request_id=key[0], attempt=key[1], is_platform_fault=True))

    def _find_usage(self, query: UsageQuery) -> UsageReply:
        is_connected = any(
            gateway.gateway_id == query.gateway_id for gateway in self._gateways.values()
        )
        entry = None
        if (query.request_id, query.attempt) in self._live:
            state: Literal["running", "finished", "unknown"] = "running"
        else:
            entry = self._journal.find(query.request_id, query.attempt)
            state = "finished" if entry else "unknown"
        return UsageReply(
            query_id=query.query_id,
            state=state,
            entry=entry,
            is_gateway_connected=is_connected,
        )

    # ------------------------------------------------------------------ events

    def _send_outputs(self) -> None:
        """Everything that is queued: journal once, then send."""
        ended: list[JournalEntry] = []
        frames: list[tuple[bytes, StepFrame]] = []
        for _ in range(len(self._outbox)):
            item = self._outbox.popleft()
            match item:
                case StepOutput():
                    frames += self._make_frames(item.step_id, item.events, ended)
                case Admitted():
                    self._answer(item)
                case Poisoned():
                    key = (item.request.request_id, item.request.attempt)
                    poisoned = [item.request] if key in self._live else []
                    events = self._fail(poisoned, "the request could not be queued", {})
                    frames += self._make_frames(0, events, ended)
                case Started():
                    self.facts = item.facts
                    self._welcome_all()
                    self.changed.set()
                case Failed():
                    self.failure = item.reason
                    requests = [live.request for live in self._live.values()]
                    events = self._fail(requests, "the engine failed", item.usage)
                    frames += self._make_frames(0, events, ended)
                    # Another thread may have said so while steps went on: every request has ended
                    # now, and nothing that comes after is about any.
                    break
                case _:
                    item()
        if ended:
            started_at = time.monotonic()
            self._journal.append(ended)
            self._metrics.observe_commit(time.monotonic() - started_at)
            self.changed.set()
        for identity, frame in frames:
            if identity in self._gateways:
                self._send(identity, frame)

    def _answer(self, admitted: Admitted) -> None:
        request, refusal = admitted.request, admitted.refusal
        key = (request.request_id, request.attempt)
        live = self._live.get(key)
        if live is None:
            return  # it has been ended without the loop
        is_there = live.identity in self._gateways  # else its abort is on the way to the loop
        if refusal is None:
            if is_there:
                self._send(live.identity, Accepted(request_id=key[0], attempt=key[1]))
            return
        self._forget(key, live)
        if is_there:
            self._reject(
                live.identity,
                request,
                refusal.code,
                str(refusal),
                refusal.retry_after_s,
                refusal.num_waiting if isinstance(refusal, QueueFullError) else None,
            )

    def _fail(
        self, requests: list[Generate], message: str, usage: Mapping[Attempt, Usage]
    ) -> list[TokenEvent]:
        """Terminal error events for requests whose own events will not come."""

        def cost_of(key: Attempt) -> Usage:
            sent = Usage(prompt_tokens=0, completion_tokens=self._live[key].num_tokens)
            return usage.get(key, sent)

        return [
            TokenEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                finish_reason="error",
                usage=cost_of((request.request_id, request.attempt)),
                error_code="internal_error",
                error_message=message,
            )
            for request in requests
        ]

    def _make_frames(
        self, step_id: int, events: list[TokenEvent], ended: list[JournalEntry]
    ) -> list[tuple[bytes, StepFrame]]:
        """Sort a step's events by gateway; terminal ones leave `_live` and join `ended`."""
        by_gateway: dict[bytes, list[TokenEvent]] = {}
        now = self._clock()
        for raw_event in events:
            event = raw_event
            key = (event.request_id, event.attempt)
            live = self._live.get(key)
            if live is None:
                continue  # the remains of a poisoned request
            if event.token_ids and not live.num_tokens:
                self._metrics.observe_first_token(now - live.arrived_at)
            live.num_tokens += len(event.token_ids)
            if event.usage is not None:
                event = self._end(key, live, event, ended)
                assert event.usage is not None
                self._metrics.observe_end(now - live.arrived_at, event.usage)
            by_gateway.setdefault(live.identity, []).append(event)
        return [
            (identity, StepFrame(step_id=step_id, events=batch))
            for identity, batch in by_gateway.items()
        ]

    def _end(
        self, key: Attempt, live: _Live, event: TokenEvent, ended: list[JournalEntry]
    ) -> TokenEvent:
        if live.cut_short is not None and event.error_code == GIVEN_UP:
            code, message = live.cut_short
            event = msgspec.structs.replace(event, error_code=code, error_message=message)
        reason, usage = event.finish_reason, event.usage
        assert reason is not None
        assert usage is not None, "a terminal event without usage"
        self._forget(key, live)
        entry = JournalEntry(
            seq=0,  # the journal numbers it
            request_id=key[0],
            attempt=key[1],
            lease_token=live.request.lease_token,
            tenant_id=live.request.tenant_id,
            adapter_digest=live.request.adapter_digest,
            finish_reason=reason,
            usage=usage,
            ended_at_unix_s=time.time(),
        )
        ended.append(entry)
        return event

    def _forget(self, key: Attempt, live: _Live) -> None:
        del self._live[key]
        gateway = self._gateways.get(live.identity)
        if gateway is not None:
            gateway.live.discard(key)
        self.changed.set()
