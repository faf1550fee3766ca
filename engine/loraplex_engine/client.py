"""A gateway's connection to one engine replica: asyncio, msgspec over ZeroMQ, no torch.

One `EngineClient` per replica; choosing among replicas is the router's job. The client keeps itself
connected: it says `Hello` as soon as a connection stands and every few seconds after that, and when
the replica dies, restarts or falls silent it fails every request in flight with `EngineLostError`
and starts over on a new socket. Nothing is ever kept for a replica that is not there.

Why a new socket each time: ZeroMQ would reconnect by itself and hide that frames were lost between,
which in a token stream is a silent hole in somebody's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from loraplex_engine.errors import EngineError
from loraplex_engine.protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    EngineMessage,
    EngineStats,
    GatewayMessage,
    Generate,
    Hello,
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
    UsageQuery,
    UsageReply,
    Welcome,
    decode_from_engine,
    encode,
)

log = structlog.get_logger(__name__)

ENGINE_SILENCE_S = 10.0  # three heartbeats missed: the replica hangs or the network is cut
QUERY_TIMEOUT_S = 5.0
_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_CLOSED = "the client was closed"
_FAREWELL_MS = 200  # how long closing may wait to hand over the last aborts

_RETRY_S, _MAX_RETRY_S = 0.05, 2.0  # between connections; doubles while they fail on our side
_REST_S = 0.02  # how long a lost connection may stay quiet before it is closed
_POLLIN = int(zmq.POLLIN)  # as a flag it is ten times as slow

Attempt = tuple[str, int]  # (request_id, attempt)
Query = StatsQuery | UsageQuery | JournalQuery | PinAdapter | UnpinAdapter
AnyReply = StatsReply | UsageReply | JournalReply | PinReply
Reply = TypeVar("Reply", bound=AnyReply)


class EngineRejectedError(EngineError):
    """The replica refused the request at admission: no work was done, nothing was journaled."""

    def __init__(
        self,
        code: RejectCode,
        message: str,
        retry_after_s: float | None = None,
        num_waiting: int = 0,
    ) -> None:
        super().__init__(message)
        self.num_waiting = num_waiting  # in the replica's queue
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class EnginePinRefusedError(EngineError):
    """The replica cannot keep the adapter; nothing was pinned or let go for it."""

    def __init__(self, code: PinRefusal, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineLostError(EngineError):
    """The replica died, restarted, fell silent or is not connected.

    What it had done for a request may still be in its journal: `query_usage` when it is back.
    """


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys for a replica on TCP: whom we expect, and who we are (on its allow-list)."""

    server_public_key: bytes
    public_key: bytes
    secret_key: bytes = field(repr=False)


class EngineStream:
    """The events of one accepted request, in order; iteration ends after the terminal event.

    Raises `EngineLostError` from the iteration when the replica is gone. After `abort` keep
    iterating: the terminal event with the usage still comes. `finish_reason` "error" is an event,
    not an exception. `follow` is the same without a turn of the event loop for each event.
    """

    def __init__(self, client: EngineClient, request: Generate) -> None:
        self.request_id = request.request_id
        self.attempt = request.attempt
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._events: asyncio.Queue[TokenEvent | EngineLostError] = asyncio.Queue()
        self._is_over = False
        self._take: Callable[[TokenEvent], None] | None = None  # set while somebody follows
        self._followed: asyncio.Future[TokenEvent] | None = None
        # Of whoever followed to the end: a cancellation may have met it before it was told.
        self._outcome: asyncio.Future[TokenEvent] | None = None

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._events.get()
        if isinstance(item, EngineLostError):
            self._is_over = True
            raise item
        self._is_over = item.usage is not None
        return item

    def abort(
        self, *, as_stop: bool = False, is_platform_fault: bool = False, index: int | None = None
    ) -> None:
        """Ask the replica to stop; see `EngineClient.abort`."""
        self._client.abort(self.request_id, self.attempt, as_stop, is_platform_fault, index=index)

    async def follow(self, take: Callable[[TokenEvent], None]) -> TokenEvent:
        """Have `take` called with every event, at once where frames are received; returns the terminal one.

        All events of a frame are dealt with in one go, whoever's they are, so `take` must be quick. What it
        raises is raised here. Cancelled, or ended by that, the events that come after it are kept for
        another `follow`, or for iteration. Once the terminal event has been taken, however that ended, every
        `follow` returns it.

        Raises:
            EngineLostError: the replica is gone.
        """
        if self._outcome is not None:
            return await self._outcome
        while not self._events.empty():
            event = await self.__anext__()  # which is there: nothing waits
            if self._is_over:
                self._outcome = asyncio.get_running_loop().create_future()
                self._outcome.set_result(event)
            take(event)
            if self._is_over:
                return event
        self._followed = asyncio.get_running_loop().create_future()
        self._take = take
        try:
            return await self._followed
        finally:
            self._take = self._followed = None

    def deliver(self, item: TokenEvent | EngineLostError) -> None:
        """Called by the client's receive loop."""
        take, followed = self._take, self._followed
        if take is None or followed is None or followed.done():
            self._events.put_nowait(item)
            return
        if isinstance(item, EngineLostError):
            self._is_over, self._outcome = True, followed
            followed.set_exception(item)
            return
        try:
            take(item)
        except Exception as error:  # noqa: BLE001 - the follower's own, not the receive loop's
            followed.set_exception(error)
            if item.usage is not None:
                self._is_over, self._outcome = True, asyncio.get_running_loop().create_future()
                self._outcome.set_result(item)
            return
        if item.usage is not None:
            self._is_over, self._outcome = True, followed
            followed.set_result(item)

    def refuse(self, error: EngineError) -> None:
        """Called by the client: the request was never accepted, or the replica is gone."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # retrieved: `generate` may have been cancelled meanwhile
        elif isinstance(error, EngineLostError):
            self.deliver(error)


class EngineClient:
    """See the module's header. Use as `async with EngineClient(address, gateway_id=...) as engine`.

    Entering starts connecting in the background and does not wait; `connect` does. All methods
    belong to the event loop that entered the client.

    Args:
        address: `ipc:///path` or `tcp://host:port`.
        gateway_id: who we are; goes into every heartbeat.
        curve: required for TCP, not used on ipc.
        silence_timeout_s: a connected replica that says nothing for so long is taken for lost.
    """

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        curve: CurveKeys | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        silence_timeout_s: float = ENGINE_SILENCE_S,
    ) -> None:
        if address.startswith("tcp://") and curve is None:
            raise EngineError(f"{address}: TCP needs CURVE keys; use ipc:// on one machine.")
        self.address = address
        self.gateway_id = gateway_id
        self.welcome: Welcome | None = None
        self._curve = curve
        self._heartbeat_s = heartbeat_s
        self._silence_timeout_s = silence_timeout_s
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._take: Callable[[], None] | None = None  # set while frames are received
        self._runner: asyncio.Task[None] | None = None
        self._welcomed = asyncio.Event()
        self._streams: dict[Attempt, EngineStream] = {}
        self._queries: dict[int, asyncio.Future[AnyReply]] = {}
        self._query_ids = itertools.count(1)
        self._lost_reason = "not connected yet"
        self._heard_at = 0.0

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._runner = asyncio.create_task(self._stay_connected(), name=f"engine {self.address}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort what is still running here and disconnect; harmless when already closed."""
        if self._runner is None or self._context is None:
            return
        for request_id, attempt in list(self._streams):
            self.abort(request_id, attempt, is_platform_fault=True)
        runner, self._runner = self._runner, None
        runner.cancel()
        try:
            await asyncio.gather(runner, return_exceptions=True)
        finally:
            self._context.term()

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        """Wait until the replica has answered; it may still be loading (`is_ready`).

        Raises:
            EngineLostError: no answer in `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.welcome is None:
                    await self._welcomed.wait()
        except TimeoutError:
            raise EngineLostError(
                f"{self.address}: no answer in {timeout_s:g} s ({self._lost_reason})."
            ) from None
        return self.welcome

    @property
    def is_ready(self) -> bool:
        """Connected, loaded and not draining."""
        welcome = self.welcome
        return welcome is not None and welcome.is_ready and not welcome.is_draining

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self._streams)

    # ------------------------------------------------------------------ requests

    async def generate(self, request: Generate) -> EngineStream:
        """Send a request and wait until the replica has queued it.

        Cancelling the wait aborts the request, as a fault of the platform's.

        Raises:
            EngineRejectedError: refused at admission.
            EngineLostError: not connected, or lost before it answered.
            ValueError: this (request_id, attempt) is already in flight here.
        """
        key = (request.request_id, request.attempt)
        if key in self._streams:
            raise ValueError(f"request {key[0]} attempt {key[1]} is already in flight")
        stream = EngineStream(self, request)
        self._send(request)
        self._streams[key] = stream
        try:
            await stream.accepted
        except asyncio.CancelledError:
            if self._streams.get(key) is stream:
                self.abort(*key, is_platform_fault=True)
            raise
        return stream

    def abort(
        self,
        request_id: str,
        attempt: int,
        as_stop: bool = False,
        is_platform_fault: bool = False,
        *,
        index: int | None = None,
    ) -> None:
        """Fire and forget; the terminal event still arrives on the stream. Unknown: no-op.

        `as_stop` says that a stop string completed: the request then finishes as "stop"; with
        `index` only that choice does. `is_platform_fault` says that not the client wants it: it then
        finishes as "error".
        """
        # A lost replica has nothing left to abort: its streams already ended.
        with contextlib.suppress(EngineLostError):
            self._send(
                Abort(
                    request_id=request_id,
                    attempt=attempt,
                    index=index,
                    as_stop=as_stop,
                    is_platform_fault=is_platform_fault,
                )
            )

    def prefetch(self, digest: str) -> None:
        """Have an adapter loaded before it is needed; best effort, no answer."""
        with contextlib.suppress(EngineLostError):
            self._send(PrefetchAdapter(adapter_digest=digest))

    async def pin(self, digest: str, timeout_s: float = QUERY_TIMEOUT_S) -> list[str]:
        """Have the replica load an adapter and keep it in host memory until `unpin` or its end.

        Returns when the replica has taken note, not when the load is done: `PinReply`. After a restart it
        knows nothing of it.

        Returns:
            All digests that it keeps now.

        Raises:
            EnginePinRefusedError: with the reason as its `code`.
            EngineLostError: no answer in time; or from a replica that is too old to know this message.
        """
        query = PinAdapter(query_id=next(self._query_ids), adapter_digest=digest)
        return _pinned(await self._ask(query, PinReply, timeout_s))

    async def unpin(self, digest: str, timeout_s: float = QUERY_TIMEOUT_S) -> list[str]:
        """Undo `pin`; not pinned: no-op. Returns and raises as that does."""
        query = UnpinAdapter(query_id=next(self._query_ids), adapter_digest=digest)
        return _pinned(await self._ask(query, PinReply, timeout_s))

    async def stats(self, timeout_s: float = QUERY_TIMEOUT_S) -> EngineStats:
        """A snapshot of the replica. Raises `EngineLostError` when it does not answer in time."""
        reply = await self._ask(StatsQuery(query_id=next(self._query_ids)), StatsReply, timeout_s)
        return reply.stats

    async def query_usage(
        self,
        request_id: str,
        attempt: int,
        *,
        gateway_id: str | None = None,
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> UsageReply:
        """What became of an attempt, also of an earlier incarnation, and whether its gateway is there.

        Raises:
            EngineLostError: no answer in time.
        """
        query = UsageQuery(
            query_id=next(self._query_ids),
            request_id=request_id,
            attempt=attempt,
            gateway_id=gateway_id,
        )
        return await self._ask(query, UsageReply, timeout_s)

    async def read_journal(
        self, after_seq: int, limit: int = 1000, timeout_s: float = QUERY_TIMEOUT_S
    ) -> JournalReply:
        """Journal entries after `after_seq`, oldest first. Raises `EngineLostError`."""
        query = JournalQuery(query_id=next(self._query_ids), after_seq=after_seq, limit=limit)
        return await self._ask(query, JournalReply, timeout_s)

    # ------------------------------------------------------------------ insides

    def _send(self, message: GatewayMessage) -> None:
        if self._socket is None or self._socket.closed:
            raise EngineLostError(f"{self.address}: {self._lost_reason}.")
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
            # Sending takes note of what has come meanwhile, and then its descriptor wakes nobody for that.
            if self._take is not None and _has_frames(self._socket):
                asyncio.get_running_loop().call_soon(self._take)
        except zmq.ZMQError as error:
            raise EngineLostError(f"{self.address}: cannot send ({error}).") from error

    async def _ask(self, query: Query, kind: type[Reply], timeout_s: float) -> Reply:
        future: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._send(query)
        self._queries[query.query_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            raise EngineLostError(f"{self.address}: no answer in {timeout_s:g} s.") from None
        finally:
            del self._queries[query.query_id]
        if not isinstance(reply, kind):
            raise EngineLostError(f"{self.address}: answered {type(reply).__name__} to a query.")
        return reply

    async def _stay_connected(self) -> None:
        wait_s = _RETRY_S
        while True:
            reason = _CLOSED
            try:
                reason = await self._serve_one_connection()
                wait_s = _RETRY_S
            except EngineLostError as error:  # a heartbeat could not be sent
                reason = str(error)
                wait_s = _RETRY_S
            except Exception as error:  # out of descriptors, say: this task must outlive it
                log.exception("engine_connection_failed", address=self.address, retry_s=wait_s)
                reason = f"{type(error).__name__}: {error}"
                wait_s = min(2 * wait_s, _MAX_RETRY_S)
            finally:
                self._drop_connection(reason)
            await asyncio.sleep(wait_s)

    async def _serve_one_connection(self) -> str:
        """Connect, then receive until the connection is lost; returns why."""
        assert self._context is not None
        # Without asyncio: a wait of its for every frame costs more than all that is done with the frame.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        socket = context.socket(zmq.DEALER)
        try:
            monitor = self._set_up(socket)
        except BaseException:
            socket.close(linger=0)
            raise
        linger_ms = 0
        try:
            socket.connect(self.address)
            await self._wait_for_handshake(monitor)
            self._socket = socket
            self._heard_at = time.monotonic()
            self._say_hello()
            reason = await _first_of(
                self._receive(socket), self._watch_silence(socket), self._watch_disconnect(monitor)
            )
            await self._receive_rest(socket)
            return reason
        except asyncio.CancelledError:
            linger_ms = _FAREWELL_MS
            raise
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=linger_ms)

    def _set_up(self, socket: zmq.Socket[bytes]) -> zmq.asyncio.Socket:
        """Set the options; returns the monitor."""
        socket.linger = 0
        # Not `immediate`: with it, libzmq throws away what has come but was not read yet when the
        # peer goes, and those may be a replica's last words. `_send` knows whether we are connected;
        # what it sends just after a loss is closed with the socket, or refused for want of a Hello.
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 1000
        socket.sndhwm = socket.rcvhwm = 0  # streams must not be cut; both ends bound their queues
        if self._curve is not None:
            socket.curve_serverkey = self._curve.server_public_key
            socket.curve_publickey = self._curve.public_key
            socket.curve_secretkey = self._curve.secret_key
        assert self._context is not None
        address = f"inproc://monitor-{socket.FD}"
        socket.monitor(address, _MONITORED)
        monitor: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        try:
            monitor.connect(address)
        except BaseException:
            monitor.close(linger=0)  # else the context is not closed before it is
            raise
        return monitor

    async def _wait_for_handshake(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._lost_reason = "the replica refused our CURVE key"

    async def _watch_disconnect(self, monitor: zmq.asyncio.Socket) -> str:
        while (await recv_monitor_message(monitor))["event"] != zmq.EVENT_DISCONNECTED:
            pass
        return "the replica closed the connection"

    async def _watch_silence(self, socket: zmq.Socket[bytes]) -> str:
        while True:
            asleep_s = time.monotonic()
            await asyncio.sleep(self._heartbeat_s)
            # If this loop stood still, then for so long nobody listened and nobody said Hello: that was
            # our own silence, not the replica's. What it said meanwhile may still be unread.
            overslept_s = time.monotonic() - asleep_s - self._heartbeat_s
            self._heard_at = min(self._heard_at + overslept_s, time.monotonic())
            reason = self._take_frames(socket)
            if reason is not None:
                return reason
            if time.monotonic() - self._heard_at > self._silence_timeout_s:
                return f"the replica said nothing for {self._silence_timeout_s:g} s"
            self._say_hello()

    def _say_hello(self) -> None:
        self._send(Hello(protocol_version=PROTOCOL_VERSION, gateway_id=self.gateway_id))

    async def _receive(self, socket: zmq.Socket[bytes]) -> str:
        """Deliver frames as they come, until there is a reason to end the connection.

        ZeroMQ's descriptor tells of a change once: whoever is woken takes all there is, and whatever else
        may take note of the change (`_send`) looks as well.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def take() -> None:
            if ended.done():
                return
            try:
                reason = self._take_frames(socket)
            except Exception as error:  # noqa: BLE001 - raised where the connection is served
                ended.set_exception(error)
                return
            if reason is not None:
                ended.set_result(reason)

        descriptor = socket.FD
        loop.add_reader(descriptor, take)
        self._take = take
        take()  # what has come before
        try:
            return await ended
        finally:
            self._take = None
            loop.remove_reader(descriptor)

    async def _receive_rest(self, socket: zmq.Socket[bytes]) -> None:
        """What came before the end: the last events of a replica that drained, say."""
        while self._take_frames(socket) is None:
            await asyncio.sleep(_REST_S)
            if not _has_frames(socket):
                return

    def _take_frames(self, socket: zmq.Socket[bytes]) -> str | None:
        """Deliver what is there; a reason ends the connection.

        Never suspends: a frame that was taken from the socket must not be lost to a cancellation.
        """
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self._heard_at = time.monotonic()
            try:
                message = decode_from_engine(frame)
            except msgspec.MsgspecError as error:
                return f"the replica sent a frame that is not of this protocol ({error})"
            reason = self._handle(message)
            if reason is not None:
                return reason

    def _handle(self, message: EngineMessage) -> str | None:
        """Deliver one message; a reason ends the connection."""
        match message:
            case StepFrame():
                for event in message.events:
                    self._deliver(event)
            case Accepted():
                stream = self._streams.get((message.request_id, message.attempt))
                if stream is not None and not stream.accepted.done():
                    stream.accepted.set_result(None)
            case Rejected():
                stream = self._streams.pop((message.request_id, message.attempt), None)
                if stream is not None:
                    stream.refuse(
                        EngineRejectedError(
                            message.code,
                            message.message,
                            message.retry_after_s,
                            message.num_waiting,
                        )
                    )
            case Welcome():
                return self._note_welcome(message)
            case StatsReply() | UsageReply() | JournalReply() | PinReply():
                future = self._queries.get(message.query_id)
                if future is not None and not future.done():
                    future.set_result(message)
        return None

    def _note_welcome(self, message: Welcome) -> str | None:
        if message.protocol_version != PROTOCOL_VERSION:
            return (
                f"the replica speaks protocol {message.protocol_version}, we speak"
                f" {PROTOCOL_VERSION}"
            )
        known = self.welcome
        if known is not None and known.incarnation != message.incarnation:
            return "the replica restarted"
        self.welcome = message
        self._welcomed.set()
        return None

    def _deliver(self, event: TokenEvent) -> None:
        key = (event.request_id, event.attempt)
        stream = self._streams.get(key)
        if stream is None:
            return  # its generate() was cancelled
        if not stream.accepted.done():
            stream.accepted.set_result(None)
        stream.deliver(event)
        if event.usage is not None:
            del self._streams[key]

    def _drop_connection(self, reason: str) -> None:
        if self._socket is not None and reason != _CLOSED:
            log.warning("engine_lost", address=self.address, reason=reason)
        self._lost_reason = reason
        self._socket = None
        self.welcome = None
        self._welcomed.clear()
        error_text = f"{self.address}: {reason}."
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.refuse(EngineLostError(error_text))
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineLostError(error_text))


def _has_frames(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _pinned(reply: PinReply) -> list[str]:
    if reply.refusal is not None:
        raise EnginePinRefusedError(reply.refusal, reply.message)
    return reply.pinned


async def _first_of(*coroutines: Coroutine[Any, Any, str]) -> str:
    """The result of the coroutine that returns first; the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
