"""Grammars to matchers, off the step loop, bounded in every direction.

A compiled grammar cannot leave its process: llguidance's parser has no serial form. So a worker process
tries it first, under limits of time and memory that kill (`worker.py`), and what survives is built again
here, on this module's own thread, under the same parser limits. llguidance is deterministic, so the
second build costs what the first was measured to cost; it runs without the interpreter's lock.

| what a hostile tenant may want | what holds it |
|---|---|
| endless or huge compilations | the worker is killed; only that grammar fails |
| a long queue | `max_queued` in all, `max_queued_per_tenant` of them each; more is refused |
| to go first | tenants take turns |
| the same bad grammar again | a failure of its own is remembered for `FAILURE_TTL_S` |
| to fill the cache, to learn of others' grammars | keys hold the tenant; half of the bytes at most are one's |

A compiled grammar in use outlives its place in the cache.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from loraplex_engine.errors import InvalidRequestError, QueueFullError
from loraplex_engine.protocol import MAX_GRAMMAR_CHARS, Grammar
from loraplex_engine.structured.errors import (
    GRAMMAR_ERRORS,
    GrammarError,
    GrammarFailedError,
    GrammarUnavailableError,
)
from loraplex_engine.structured.matcher import Compilation, LlMatcher, Matcher
from loraplex_engine.structured.meter import GrammarMeter
from loraplex_engine.structured.worker_frames import Setup, TokenizerSpec, Verdict
from loraplex_engine.structured.worker_process import WorkerProcess

log = structlog.get_logger(__name__)

FAILURE_TTL_S = 60.0
_MAX_FAILURES = 1024
_MIN_SIZE_BYTES = 64 * 1024  # charged for the smallest: a process grows by pages, unevenly
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLimits:
    """Bounds; `EngineConfig` names those that may be set."""

    cpu_limit_s: float = 2.0
    wall_limit_s: float = 20.0  # for a worker that gets no CPU
    memory_bytes: int = 512 * 1024**2
    max_queued: int = 64
    max_queued_per_tenant: int = 16
    cache_bytes: int = 64 * 1024**2


class GrammarSource(Protocol):
    """What the core needs of a compiler."""

    meter: GrammarMeter  # on which the core counts as well

    def request(self, grammar: Grammar, tenant_id: str) -> Compilation:
        """Have it compiled, unless it is already. Returns at once.

        Raises:
            QueueFullError: too much is being compiled.
            InvalidRequestError: no grammar can be followed here, or this one is too long.
        """
        ...


class Worker(Protocol):
    """Where grammars are tried; `worker_process.WorkerProcess`."""

    num_starts: int

    def try_grammar(self, grammar: Grammar) -> Verdict:
        """Raises `GrammarTooComplexError`, `GrammarUnavailableError`."""
        ...

    def end(self) -> None:
        """Fail what is being tried; any thread."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class NoGrammars:
    """`GrammarSource` of an engine whose model folder has no tokenizer."""

    def __init__(self) -> None:
        self.meter = GrammarMeter()

    def request(self, grammar: Grammar, tenant_id: str) -> Compilation:
        """Raises `InvalidRequestError`, always."""
        raise InvalidRequestError(
            "sampling.grammar: this replica's model folder has no tokenizer.json and end token"
        )


@dataclass(slots=True, eq=False)
class _Entry:
    """One grammar of one tenant, shared by its requests: a `Compilation`. `template` or `error` is set
    once, after all else; an `error` may follow a `template`.
    """

    tenant_id: str
    grammar: Grammar
    key: bytes
    remember: Callable[[_Entry, GrammarError], None]
    template: LlMatcher | None = None
    error: GrammarError | None = None
    failed_at_s: float = 0.0
    size_bytes: int = 0

    @property
    def is_done(self) -> bool:
        return self.template is not None or self.error is not None

    def note_failure(self, error: GrammarError) -> None:
        self.remember(self, error)

    def matcher(self) -> Matcher:
        if self.error is not None:
            raise self.error
        assert self.template is not None, "it is still being compiled"
        return self.template.fork()


class GrammarCompiler:
    """`GrammarSource` with a worker process and a thread; `close` ends both.

    Args:
        spec: the tokenizer, opened here, which takes some 100 ms.
        clock: monotonic seconds, for `FAILURE_TTL_S`.
        worker: None: a process of its own, started when it is first needed.

    Raises:
        ValueError: the tokenizer cannot be read.
    """

    def __init__(
        self,
        spec: TokenizerSpec,
        limits: CompilerLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker: Worker | None = None,
    ) -> None:
        from loraplex_engine.structured.tokenizer import open_tokenizer

        self.limits = limits or CompilerLimits()
        self.meter = GrammarMeter()
        self.num_compiled = 0
        self.num_failed = 0
        self._spec = spec
        self._clock = clock
        self._tokenizer = open_tokenizer(spec)
        self._worker: Worker = worker or WorkerProcess(
            Setup(
                tokenizer=spec,
                cpu_limit_s=self.limits.cpu_limit_s,
                memory_bytes=self.limits.memory_bytes,
            ),
            wall_limit_s=self.limits.wall_limit_s,
        )
        self._changed = threading.Condition()
        self._is_closing = False
        # All below belong to whoever holds `_changed`.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # oldest use first
        self._queues: OrderedDict[str, deque[_Entry]] = OrderedDict()  # next tenant first
        self._size_bytes = 0
        self._tenant_bytes: dict[str, int] = {}
        self._thread: threading.Thread | None = None  # started by the first request

    @property
    def size_bytes(self) -> int:
        """Of the compiled grammars kept."""
        return self._size_bytes

    @property
    def num_worker_starts(self) -> int:
        """One, and one more after each death."""
        return self._worker.num_starts

    def request(self, grammar: Grammar, tenant_id: str) -> Compilation:
        if len(grammar.value) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"sampling.grammar has {len(grammar.value)} characters: at most {MAX_GRAMMAR_CHARS}"
            )
        key = _key(grammar, tenant_id)
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None and not self._is_forgotten(entry):
                self._entries.move_to_end(key)
                self.meter.note_query(is_hit=True)
                return entry
            queue = self._queues.get(tenant_id, deque())
            num_queued = sum(map(len, self._queues.values()))
            if (
                num_queued >= self.limits.max_queued
                or len(queue) >= self.limits.max_queued_per_tenant
            ):
                raise QueueFullError(
                    f"{num_queued} grammars are being compiled already",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self.meter.note_query(is_hit=False)
            entry = _Entry(tenant_id, grammar, key, self._remember)
            self._entries[key] = entry
            self._entries.move_to_end(key)
            self._queues.setdefault(tenant_id, queue).append(entry)
            self._changed.notify()
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(
                    target=self._run, name="grammar-compiler", daemon=True
                )
                self._thread.start()
        return entry

    def close(self) -> None:
        """End the worker and the thread. What was being compiled never will be."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._worker.end()
        if self._thread is not None:
            self._thread.join()
        self._worker.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            template, error, size_bytes = None, None, 0
            began_s = self._clock()
            try:
                template, size_bytes = self._compile(entry.grammar)
            except GrammarError as failure:
                error = failure
            except Exception as failure:
                log.exception("grammar_compiler_failed")
                error = GrammarFailedError(f"the grammar broke: {type(failure).__name__}")
            self.meter.note_compile(self._clock() - began_s)
            with self._changed:
                self._settle(entry, template, error, size_bytes)

    def _next(self) -> _Entry | None:
        """The next tenant's oldest; None: closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._queues)
            if self._is_closing:
                return None
            tenant_id, queue = self._queues.popitem(last=False)
            entry = queue.popleft()
            if queue:
                self._queues[tenant_id] = queue  # behind the others
            return entry

    def _compile(self, grammar: Grammar) -> tuple[LlMatcher, int]:
        from loraplex_engine.structured.tokenizer import native_matcher

        verdict = self._worker.try_grammar(grammar)
        if verdict.code is not None:
            raise GRAMMAR_ERRORS.get(verdict.code, GrammarFailedError)(verdict.message)
        try:
            native = native_matcher(self._tokenizer, grammar)
        except (GrammarError, Exception):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise GrammarFailedError(f"the grammar broke: {type(error).__name__}") from error
        template = LlMatcher(native, self._spec.vocab_size)
        # The first mask builds most of what all others use: here, not in somebody's step.
        template.masks_for()
        return template, max(_MIN_SIZE_BYTES, verdict.size_bytes)

    def _settle(
        self,
        entry: _Entry,
        template: LlMatcher | None,
        error: GrammarError | None,
        size_bytes: int,
    ) -> None:
        if error is not None:
            self.num_failed += 1
            entry.failed_at_s = self._clock()
            entry.error = error
            if isinstance(error, GrammarUnavailableError):
                self._forget(entry)  # a passing fault, and not the grammar's
            log.info("grammar_refused", tenant_id=entry.tenant_id, code=error.code)
        else:
            self.num_compiled += 1
            entry.size_bytes = size_bytes
            self._size_bytes += size_bytes
            used = self._tenant_bytes.get(entry.tenant_id, 0) + size_bytes
            self._tenant_bytes[entry.tenant_id] = used
            entry.template = template
        self._evict(entry.tenant_id)

    def _remember(self, entry: _Entry, error: GrammarError) -> None:
        """What compiled well failed in use: it is a failure from now on."""
        with self._changed:
            if entry.error is not None:
                return
            self.num_failed += 1
            entry.failed_at_s = self._clock()
            entry.error = error
            if entry.key not in self._entries:  # there was no room for what it had compiled to
                entry.template, entry.size_bytes = None, 0
                self._entries[entry.key] = entry
            log.info("grammar_refused", tenant_id=entry.tenant_id, code=error.code)
            self._evict(entry.tenant_id)

    def _evict(self, tenant_id: str) -> None:
        """Forget least recently used ones of whoever has too much: this tenant first, then all."""
        half = self.limits.cache_bytes // 2
        for entry in list(self._entries.values()):
            is_over_share = (
                entry.tenant_id == tenant_id and self._tenant_bytes.get(tenant_id, 0) > half
            )
            is_over = self._size_bytes > self.limits.cache_bytes
            if entry.template is not None and (is_over_share or is_over):
                self._forget(entry)
        failures = [entry for entry in self._entries.values() if entry.error is not None]
        for entry in failures[: max(0, len(failures) - _MAX_FAILURES)]:
            self._forget(entry)

    def _is_forgotten(self, entry: _Entry) -> bool:
        """A failure that is old enough to be tried again."""
        if entry.error is None or self._clock() < entry.failed_at_s + FAILURE_TTL_S:
            return False
        self._forget(entry)
        return True

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self._size_bytes -= entry.size_bytes
        left = self._tenant_bytes.get(entry.tenant_id, 0) - entry.size_bytes
        if left > 0:
            self._tenant_bytes[entry.tenant_id] = left
        else:
            self._tenant_bytes.pop(entry.tenant_id, None)


def _key(grammar: Grammar, tenant_id: str) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(("grammar", tenant_id, grammar))).digest()
