"""The thread that steps the engine: takes messages between steps, hands events on, never does I/O.

Sockets, journal and HTTP live on other threads, so a long step delays nobody's heartbeat; in turn
everything that a gateway asks for is honoured before the next step starts. The engine is built on
this thread too: torch's thread pools and settings belong to the thread that computes.

An exception from one request's admission ends that request. An exception from a step cannot be laid
at one request's door, and the cache may be half written: the loop stops and says so, and the process
exits loudly for its supervisor to restart.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from loraplex_engine.artifact import UNKNOWN_MODEL, ModelIdentity
from loraplex_engine.errors import PinRefusedError, RequestRejectedError
from loraplex_engine.protocol import (
    Abort,
    EngineStats,
    Generate,
    PrefetchAdapter,
    TokenEvent,
    Usage,
)

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 0.5  # with nothing to do; a message ends the wait at once
# With requests that cannot run yet: a grammar compiles; or an adapter loads, whose end wakes the loop.
BLOCKED_WAIT_S = 0.005
MAX_BEFORE_PREFETCH = 1024  # with so much queued, prefetches, which nobody waits for, are dropped


@dataclass(frozen=True, slots=True)
class Pin:
    """Have an adapter kept, or not any more; `answer` is told on the loop's thread, and must not block.

    answer: takes what is pinned then, or why it was refused.
    """

    digest: str
    is_wanted: bool
    answer: Callable[[frozenset[str] | PinRefusedError], None]


Work = Generate | Abort | PrefetchAdapter | Pin


class Core(Protocol):
    """What the loop needs of `core.EngineCore`."""

    last_step_num_tokens: int  # that the last `step` computed; 0: nothing could run

    @property
    def is_stuck(self) -> bool:
        """Nobody runs, and somebody waits for neither an adapter to load nor a grammar to compile."""
        ...

    def add(self, generate: Generate) -> None: ...
    def abort(
        self,
        request_id: str,
        attempt: int,
        as_stop: bool = False,
        is_platform_fault: bool = False,
        index: int | None = None,
    ) -> None: ...
    def has_work(self) -> bool: ...
    def live_usage(self) -> dict[tuple[str, int], Usage]: ...
    def step(self) -> list[TokenEvent]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What a built engine says of itself: the constant part of `ReplicaRecord`."""

    model_fingerprint: str
    kv_format: str
    device: str
    isa: str
    dtype: str
    torch_version: str
    backends: dict[str, str]
    max_model_len: int
    row_rule_holds: bool
    identity: ModelIdentity = UNKNOWN_MODEL


class Engine(Protocol):
    """A core with what surrounds it; `build.assemble_engine` makes the real one."""

    @property
    def core(self) -> Core: ...
    @property
    def facts(self) -> ReplicaFacts: ...
    def attach(self, wake: Callable[[], None], observe_load: Callable[[str, float], None]) -> None:
        """Call `wake`, from any thread, when something that a request may wait for has happened, and
        `observe_load` with tier and seconds of each adapter load.
        """
        ...

    def prefetch(self, digest: str) -> None: ...
    def pin(self, digest: str) -> None:
        """Raises `PinRefusedError`."""
        ...

    def unpin(self, digest: str) -> None: ...
    @property
    def pinned(self) -> frozenset[str]:
        """Digests that are kept."""
        ...

    def tidy(self) -> None:
        """Called now and then while there is nothing to do."""
        ...

    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


# ---------------------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class Started:
    """The engine is built and takes requests."""

    facts: ReplicaFacts


@dataclass(frozen=True, slots=True)
class Admitted:
    """A `Generate` was queued, or refused."""

    request: Generate
    refusal: RequestRejectedError | None = None


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Admitting this request raised what it must not: it ends alone, with an error."""

    request: Generate


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The events of one step."""

    step_id: int
    events: list[TokenEvent]


@dataclass(frozen=True, slots=True)
class Failed:
    """The loop has stopped and all its requests with it.

    `usage` is what they had cost, by (request_id, attempt); one that never was queued is not there.
    """

    reason: str
    usage: dict[tuple[str, int], Usage] = field(default_factory=dict)


Output = Started | Admitted | Poisoned | StepOutput | Failed


class StepLoop:
    """See the module's header.

    Args:
        build: makes the engine; runs on the loop's thread.
        publish: takes each output, in order; called on the loop's thread, must not block.
        observe_step: (seconds, tokens computed) of each step that computed something.
        observe_load: (tier, seconds) of each adapter load.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        publish: Callable[[Output], None],
        *,
        observe_step: Callable[[float, int], None] = lambda seconds, num_tokens: None,
        observe_load: Callable[[str, float], None] = lambda tier, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats: EngineStats | None = None  # as of the last step; replaced whole
        self.error: Exception | None = None  # what ended the loop
        self.last_step_unix_s = 0.0
        self._build = build
        self._publish = publish
        self._observe_step = observe_step
        self._observe_load = observe_load
        self._clock = clock
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._is_stopping = False
        self._next_step_id = 1
        self._progress_at: float | None = None  # None: idle, or still building

    def start(self) -> None:
        """Build the engine and begin, on the loop's own thread."""
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Have it done before the next step; any thread. A prefetch may be dropped."""
        if isinstance(work, PrefetchAdapter) and self._inbox.qsize() >= MAX_BEFORE_PREFETCH:
            return
        self._inbox.put(work)

    def wake(self) -> None:
        """Have the loop look for work now; any thread."""
        self._inbox.put(None)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the current step; False: it did not end in time."""
        self._is_stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stalled_s(self) -> float:
        """Seconds for which there has been work that waits for no other thread, and none was done; 0: fine."""
        progress_at = self._progress_at
        return 0.0 if progress_at is None else max(0.0, self._clock() - progress_at)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        engine = None
        try:
            engine = self._build()
            engine.attach(self.wake, self._observe_load)
            self.stats = engine.stats()
            self._publish(Started(engine.facts))
            self._loop(engine)
        except Exception as error:
            log.exception("step_loop_failed")
            self.error = error
            usage = {} if engine is None else engine.core.live_usage()
            self._publish(Failed(f"{type(error).__name__}: {error}", usage))
        finally:
            if engine is not None:
                with contextlib.suppress(Exception):  # the process ends; only tidiness is at stake
                    engine.close()

    def _loop(self, engine: Engine) -> None:
        wait_s = IDLE_WAIT_S
        while not self._is_stopping:
            wait_s = self.turn(engine, wait_s)

    def turn(self, engine: Engine, wait_s: float) -> float:
        """Take messages, wait for one up to `wait_s` seconds, and compute a step if there is work.

        The loop's thread calls it over and over; of a loop that was not started, whoever drives it.

        Returns:
            How many seconds the next turn may wait.
        """
        core = engine.core
        self._take_messages(engine, wait_s)
        if not core.has_work():
            self._progress_at = None
            engine.tidy()
            self.stats = engine.stats()
            return IDLE_WAIT_S
        started_at = self._clock()
        if self._progress_at is None:
            self._progress_at = started_at
        events = core.step()
        num_tokens = core.last_step_num_tokens
        stats = self.stats = engine.stats()
        if num_tokens:
            self._progress_at = self._clock()
            self.last_step_unix_s = time.time()
            self._observe_step(self._progress_at - started_at, num_tokens)
        elif stats.num_running == 0 and not core.is_stuck:
            # All wait for adapters and grammars: slow, perhaps, but this thread is well.
            self._progress_at = self._clock()
        if events:
            self._publish(StepOutput(self._next_step_id, events))
            self._next_step_id += 1
        return 0.0 if num_tokens or not core.has_work() else BLOCKED_WAIT_S

    def _take_messages(self, engine: Engine, wait_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            work = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                if work is not None:
                    self._do(engine, work)
                work = self._inbox.get_nowait()

    def _do(self, engine: Engine, work: Work) -> None:
        match work:
            case Generate():
                self._admit(engine.core, work)
            case Abort():
                engine.core.abort(
                    work.request_id,
                    work.attempt,
                    work.as_stop,
                    work.is_platform_fault,
                    work.index,
                )
            case PrefetchAdapter():
                engine.prefetch(work.adapter_digest)
            case Pin():
                try:
                    (engine.pin if work.is_wanted else engine.unpin)(work.digest)
                except PinRefusedError as refusal:
                    work.answer(refusal)
                else:
                    work.answer(engine.pinned)

    def _admit(self, core: Core, request: Generate) -> None:
        try:
            core.add(request)
        except RequestRejectedError as refusal:
            self._publish(Admitted(request, refusal))
        except Exception:
            log.exception("request_poisoned", request_id=request.request_id)
            core.abort(request.request_id, request.attempt)  # whatever it had got hold of
            self._publish(Poisoned(request))
        else:
            self._publish(Admitted(request))
