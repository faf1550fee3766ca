"""An engine replica without a model: speaks `protocol.py` over a real ZeroMQ ROUTER, no torch.

For tests of whatever talks to engines. Tokens are deterministic; what happens to a request is its
`Script`: which tokens, how fast, an error, a refusal, silence, death in the middle.

    async with FakeEngine(tmp_path) as engine:             # engine.address is ipc://...
        engine.script = Script(token_ids=[5, 6, 7])         # for every request from now on
        engine.script_for = lambda request: Script(...)     # or chosen per request
        engine.pause(); ...; engine.resume()                # hold all token events
        await engine.crash(); await engine.start()          # kill -9 and restart: new incarnation,
                                                            # the journal stays

`python -m tests.support.fake_engine --address ipc:///tmp/x/engine.sock` runs one as a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import itertools
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import zmq
import zmq.asyncio
from loraplex_engine.protocol import (
    GIVEN_UP,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    AdapterLoadTimes,
    EngineMessage,
    EngineStats,
    FinishReason,
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
    TokenLogprobs,
    UnpinAdapter,
    Usage,
    UsageQuery,
    UsageReply,
    Welcome,
    decode_from_gateway,
    encode,
)

# What it says of its loads, for whoever shows that.
LOAD_TIMES = AdapterLoadTimes(loads_total=3, last_s=0.04, p50_s=0.05, p95_s=1.25)


@dataclass(frozen=True)
class Script:
    """What becomes of a request. Counts are of output tokens; times in seconds.

    `token_ids` None: tokens derived from prompt, adapter, seed and position, in [0, vocab_size).
    `choices` are the token ids of each of n choices; None: `token_ids` for all of them, or derived
    with seed + i. Choices take turns, and all counts below are of each one's tokens but
    `error_after` and `crash_after`, which are of all together.
    A scripted list is cut at `max_tokens` and at a stop token; if it ends before either, the
    request finishes as "stop" there. A request that tells its own tokens gets those.
    """

    token_ids: Sequence[int] | None = None
    choices: Sequence[Sequence[int]] | None = None
    tokens_per_event: int = 1
    first_token_delay_s: float = 0.0
    token_delay_s: float = 0.0
    cached_tokens: int = 0
    reject: RejectCode | None = None
    reject_message: str = "refused by the script"
    retry_after_s: float | None = None
    error_after: int | None = None  # finish "error" after so many tokens
    error_code: str = "internal_error"
    crash_after: int | None = None  # the replica dies after so many tokens
    never_accepts: bool = False  # no answer to the Generate at all
    forgets_end_of: int | None = None  # a fault: this choice ends without saying so
    never_answers: bool = False  # accepted, then nothing (until an abort)


@dataclass
class _Choice:
    index: int
    wanted: list[int]
    reason: FinishReason
    num_sent: int = 0
    is_stopped: bool = False  # by an abort of this choice alone
    is_over: bool = False


@dataclass
class _Running:
    identity: bytes
    request: Generate
    script: Script
    choices: list[_Choice]
    task: asyncio.Task[None] | None = None
    abort: Abort | None = None
    has_crashed: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_sent(self) -> int:
        return sum(choice.num_sent for choice in self.choices)

    @property
    def live(self) -> list[_Choice]:
        return [choice for choice in self.choices if not choice.is_over]


class FakeEngine:
    """See the module's header. `received` holds every message but heartbeats, in order."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        address: str | None = None,
        script: Script | None = None,
        replica_id: str = "fake-0",
        model_fingerprint: str = "sha256:" + "f" * 64,
        max_model_len: int = 2048,
        vocab_size: int = 256,
        gateway_timeout_s: float = 0.0,
    ) -> None:
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        if address is None:
            # pytest's tmp_path is often too long for a unix socket (107 bytes): only a short one.
            if folder is None or len(str(folder)) > 80:
                self._own_folder = tempfile.TemporaryDirectory(prefix="fe-")
                folder = Path(self._own_folder.name)
            address = f"ipc://{folder / f'{replica_id}.sock'}"
        self.address = address
        self.script = script or Script()
        self.script_for: Callable[[Generate], Script] | None = None
        self.replica_id = replica_id
        self.model_fingerprint = model_fingerprint
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.gateway_timeout_s = (
            gateway_timeout_s  # as `GATEWAY_TIMEOUT_S`; 0: nobody is ever there
        )
        self._heard_at_s: dict[str, float] = {}  # gateway id -> monotonic
        self.is_ready = True
        self.is_draining = False
        self.waiting_by_priority: dict[int, int] = {}  # what it says of its queue
        self.pinned: frozenset[str] = frozenset()
        self.pin_refusal: PinRefusal | None = None
        self.pinned_at_start: frozenset[str] = frozenset()  # by a flag, besides `pinned`
        self.pin_failures: dict[str, str] = {}  # digest -> why it does not load
        self.is_mute = False  # True: receives, and answers nothing, not even heartbeats
        self.incarnation = ""
        self.journal_id = uuid.uuid4().hex
        self.journal: list[JournalEntry] = []
        self.received: list[GatewayMessage] = []
        self.num_tokens_sent = 0
        self._running: dict[tuple[str, int], _Running] = {}
        self._step_ids = itertools.count(1)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._crashing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._crashing is not None:
            await self._crashing
        await self.crash()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    async def start(self) -> None:
        """Bind; also after `crash`."""
        assert self._socket is None, "already running"
        self.incarnation = uuid.uuid4().hex
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.bind(self.address)
        self._receiver = asyncio.create_task(self._receive())

    async def crash(self) -> None:
        """Die without a word: everything that was running is lost and nothing of it journaled."""
        if self._socket is None or self._context is None or self._receiver is None:
            return
        tasks = [self._receiver, *(r.task for r in self._running.values() if r.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()
        self._socket.close(linger=0)
        self._context.term()
        self._socket = self._context = self._receiver = None

    def pause(self) -> None:
        """Hold all token events (heartbeats, queries and aborts go on)."""
        self._flowing.clear()

    def resume(self) -> None:
        """Undo `pause`."""
        self._flowing.set()

    @property
    def num_running(self) -> int:
        """Requests accepted and not ended."""
        return len(self._running)

    def received_of(self, kind: type[GatewayMessage]) -> list[GatewayMessage]:
        """The received messages of one kind."""
        return [message for message in self.received if isinstance(message, kind)]

    def tokens_for(self, request: Generate, count: int, index: int = 0) -> list[int]:
        """The first `count` tokens of the default script, of choice `index`.

        None is a stop token: an answer that ends early once in a hundred times fails a test as rarely.
        """
        choice_seed = (request.sampling.seed + index) % 2**64
        seed = msgspec.msgpack.encode(
            (request.prompt_token_ids, request.adapter_digest, choice_seed)
        )
        stops = set(request.sampling.stop_token_ids)
        others = [i for i in range(min(self.vocab_size, len(stops) + 1)) if i not in stops]
        ids = (
            int.from_bytes(hashlib.sha256(seed + i.to_bytes(4)).digest()[:4]) % self.vocab_size
            for i in range(count)
        )
        return [others[0] if others and token_id in stops else token_id for token_id in ids]

    # ------------------------------------------------------------------ insides

    async def _send(self, identity: bytes, message: EngineMessage) -> None:
        if self._socket is not None and not self.is_mute:
            await self._socket.send_multipart([identity, encode(message)])

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            identity, frame = await self._socket.recv_multipart()
            try:
                message = decode_from_gateway(frame)
            except msgspec.MsgspecError:
                continue
            if not isinstance(message, Hello):
                self.received.append(message)
            await self._handle(identity, message)

    async def _handle(self, identity: bytes, message: GatewayMessage) -> None:
        match message:
            case Hello():
                self._heard_at_s[message.gateway_id] = time.monotonic()
                await self._send(identity, self._welcome())
            case Generate():
                await self._admit(identity, message)
            case Abort():
                running = self._running.get((message.request_id, message.attempt))
                if running is not None:
                    if message.index is None:
                        running.abort = message
                    else:
                        running.choices[message.index].is_stopped = True
                    running.wake.set()
            case StatsQuery():
                await self._send(
                    identity, StatsReply(query_id=message.query_id, stats=self._stats())
                )
            case UsageQuery():
                await self._send(identity, self._usage(message))
            case JournalQuery():
                entries = [e for e in self.journal if e.seq > message.after_seq]
                await self._send(
                    identity,
                    JournalReply(
                        query_id=message.query_id,
                        journal_id=self.journal_id,
                        entries=entries[: message.limit],
                    ),
                )
            case PrefetchAdapter():
                pass
            case PinAdapter() | UnpinAdapter():
                digest = message.adapter_digest
                self.pinned |= {digest}
                if isinstance(message, UnpinAdapter):
                    self.pinned -= {digest}
                reply = PinReply(query_id=message.query_id, pinned=sorted(self.pinned))
                if self.pin_refusal is not None:
                    reply = PinReply(
                        query_id=message.query_id, refusal=self.pin_refusal, message="no"
                    )
                await self._send(identity, reply)

    async def _admit(self, identity: bytes, request: Generate) -> None:
        script = self.script_for(request) if self.script_for is not None else self.script
        if script.never_accepts:
            return
        code = "draining" if self.is_draining else script.reject
        if code is not None:
            rejected = Rejected(
                request_id=request.request_id,
                attempt=request.attempt,
                code=code,
                message=script.reject_message,
                num_waiting=len(self._running),
                retry_after_s=script.retry_after_s,
            )
            await self._send(identity, rejected)
            return
        await self._send(identity, Accepted(request_id=request.request_id, attempt=request.attempt))
        key = (request.request_id, request.attempt)
        if key not in self._running:
            choices = [self._plan(request, script, i) for i in range(request.sampling.n)]
            running = self._running[key] = _Running(identity, request, script, choices)
            running.task = asyncio.create_task(self._run(running))

    async def _run(self, running: _Running) -> None:
        script = running.script
        await self._rest(running, script.first_token_delay_s)
        if script.never_answers:
            await running.wake.wait()
        while running.abort is None:
            for choice in running.live:
                if not await self._let_flow(running):
                    break
                await self._advance(running, choice)
                if running.has_crashed or not running.live:
                    return
                if script.error_after is not None and running.num_sent >= script.error_after:
                    await self._emit_end(running, "error")
                    return
            await self._rest(running, script.token_delay_s)
        is_fault = running.abort.is_platform_fault
        reason: FinishReason = "error" if is_fault else "abort"
        await self._emit_end(running, "stop" if running.abort.as_stop else reason)

    async def _advance(self, running: _Running, choice: _Choice) -> None:
        """Send one event of a choice."""
        script = running.script
        if choice.is_stopped:
            choice.is_over = True
            running.wake.clear()
            await self._emit(running, choice, [], "stop")
            return
        stop = choice.num_sent + script.tokens_per_event
        if script.error_after is not None:
            stop = min(stop, choice.num_sent + script.error_after - running.num_sent)
        ids = choice.wanted[choice.num_sent : stop]
        choice.num_sent += len(ids)
        self.num_tokens_sent += len(ids)
        if script.crash_after is not None and running.num_sent >= script.crash_after:
            await self._emit(running, choice, ids, None)
            running.has_crashed = True
            self._crashing = asyncio.create_task(self.crash())
            return
        has_failed = script.error_after is not None and running.num_sent >= script.error_after
        choice.is_over = choice.num_sent == len(choice.wanted) and not has_failed
        reason = choice.reason if choice.is_over else None
        if script.forgets_end_of == choice.index and running.live:
            reason = None
        if ids or choice.is_over:
            await self._emit(running, choice, ids, reason)

    def _plan(self, request: Generate, script: Script, index: int) -> _Choice:
        sampling = request.sampling
        scripted = script.token_ids if script.choices is None else script.choices[index]
        ids = (
            self.tokens_for(request, sampling.max_tokens, index)
            if scripted is None
            else list(scripted)
        )
        reason: FinishReason = "stop"
        if sampling.forced_token_ids:
            ids = list(sampling.forced_token_ids)
        if len(ids) >= sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        for position, token_id in enumerate(ids):
            if token_id in sampling.stop_token_ids:
                ids, reason = ids[: position + 1], "stop"
                break
        return _Choice(index, ids, reason)

    async def _rest(self, running: _Running, delay_s: float) -> None:
        if delay_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.wake.wait(), delay_s)
        else:
            await asyncio.sleep(0)

    async def _let_flow(self, running: _Running) -> bool:
        """Wait while paused; False: aborted meanwhile."""
        while not self._flowing.is_set() and running.abort is None:
            waits = [
                asyncio.ensure_future(self._flowing.wait()),
                asyncio.ensure_future(running.wake.wait()),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return running.abort is None

    async def _emit(
        self, running: _Running, choice: _Choice, ids: list[int], reason: FinishReason | None
    ) -> None:
        """An event of one choice; its last is the terminal one if no other choice is live."""
        request = running.request
        is_stop_token = bool(ids) and ids[-1] in request.sampling.stop_token_ids
        logprobs = None
        if request.sampling.logprobs is not None:
            tops = range(request.sampling.logprobs)
            logprobs = [
                TokenLogprobs(-0.5, [i + k for k in tops], [-0.5 - k for k in tops]) for i in ids
            ]
        await self._send_event(
            running,
            TokenEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                index=choice.index,
                token_ids=ids,
                logprobs=logprobs,
                finish_reason=reason,
                stop_token_id=ids[-1] if reason == "stop" and is_stop_token else None,
                usage=self._close(running, reason) if reason and not running.live else None,
            ),
        )

    async def _emit_end(self, running: _Running, reason: FinishReason) -> None:
        """The terminal event of a request that ended as a whole."""
        request = running.request
        error_code = running.script.error_code if running.abort is None else GIVEN_UP
        await self._send_event(
            running,
            TokenEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                finish_reason=reason,
                usage=self._close(running, reason),
                error_code=error_code if reason == "error" else None,
                error_message="failed by the script" if reason == "error" else None,
            ),
        )

    async def _send_event(self, running: _Running, event: TokenEvent) -> None:
        frame = StepFrame(step_id=next(self._step_ids), events=[event])
        await self._send(running.identity, frame)

    def _close(self, running: _Running, reason: FinishReason) -> Usage:
        """Journal a request and forget it."""
        request = running.request
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=running.num_sent,
            cached_tokens=running.script.cached_tokens,
        )
        self._write_journal(request, reason, usage)
        del self._running[(request.request_id, request.attempt)]
        return usage

    def _write_journal(self, request: Generate, reason: FinishReason, usage: Usage) -> None:
        entry = JournalEntry(
            seq=len(self.journal) + 1,
            request_id=request.request_id,
            attempt=request.attempt,
            lease_token=request.lease_token,
            tenant_id=request.tenant_id,
            adapter_digest=request.adapter_digest,
            finish_reason=reason,
            usage=usage,
            ended_at_unix_s=time.time(),
        )
        self.journal.append(entry)

    def _usage(self, query: UsageQuery) -> UsageReply:
        key = (query.request_id, query.attempt)
        entry = next((e for e in self.journal if (e.request_id, e.attempt) == key), None)
        heard_at_s = self._heard_at_s.get(query.gateway_id or "", 0.0)
        return UsageReply(
            query_id=query.query_id,
            state="running" if key in self._running else "finished" if entry else "unknown",
            entry=entry,
            is_gateway_connected=time.monotonic() - heard_at_s < self.gateway_timeout_s,
        )

    def _welcome(self) -> Welcome:
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            model_fingerprint=self.model_fingerprint,
            max_model_len=self.max_model_len,
            is_ready=self.is_ready,
            is_draining=self.is_draining,
        )

    def _stats(self) -> EngineStats:
        finished: dict[str, int] = {}
        for entry in self.journal:
            finished[entry.finish_reason] = finished.get(entry.finish_reason, 0) + 1
        return EngineStats(
            num_running=len(self._running),
            num_waiting=sum(self.waiting_by_priority.values()),
            waiting_by_priority=self.waiting_by_priority,
            kv_blocks_total=1024,
            kv_blocks_free=1024 - len(self._running),
            kv_usage=len(self._running) / 1024,
            prompt_tokens_total=sum(e.usage.prompt_tokens for e in self.journal),
            generation_tokens_total=self.num_tokens_sent,
            requests_finished_total=finished,
            num_preemptions_total=0,
            steps_total=self.num_tokens_sent,
            adapters_resident=[],
            adapters_host=sorted(self.pinned - self.pin_failures.keys()),
            adapters_pinned=sorted(self.pinned),
            adapters_pinned_at_start=sorted(self.pinned_at_start),
            adapters_pin_failed=self.pin_failures,
            adapter_leases=0,
            adapter_loads_total=LOAD_TIMES.loads_total,
            adapter_load_times={"store": LOAD_TIMES},
            max_adapters_in_step=0,
            mixed_steps_total=0,
            rss_bytes=1 << 20,
            uptime_s=1.0,
        )


async def _serve(address: str, script: Script) -> None:
    async with FakeEngine(address=address, script=script):
        print("fake_engine_ready", address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    gc.freeze()  # a benchmark's answers are not to wait while all that is imported is looked through
    gc.set_threshold(100_000, 50, 1000)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.address, Script(token_delay_s=arguments.token_delay_s)))
