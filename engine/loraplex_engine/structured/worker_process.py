"""The parent's side of `worker.py`: start it, ask it, kill it. One thread uses it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import msgspec

from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import GrammarTooComplexError, GrammarUnavailableError
from loraplex_engine.structured.worker_frames import HEADER, Setup, Trial, Verdict, frame

_START_LIMIT_S = 60.0  # an interpreter and a tokenizer, on a machine that may be busy
_NUM_TRIES = 2  # of a grammar whose worker got no CPU, or was killed by somebody
_COMMAND = (sys.executable, "-m", "loraplex_engine.structured.worker")


class _GoneError(Exception):
    """The process has died, or says nothing in time."""


class WorkerProcess:
    """A worker that is started when it is first needed, and again after each death.

    Args:
        wall_limit_s: a trial that takes longer is killed, however little CPU time it had. What its CPU
            time allows takes less, so then the machine is at fault, not the grammar.
    """

    def __init__(self, setup: Setup, *, wall_limit_s: float) -> None:
        self.num_starts = 0
        self._setup = setup
        self._wall_limit_s = wall_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def try_grammar(self, grammar: Grammar) -> Verdict:
        """Compile it in the worker.

        Raises:
            GrammarTooComplexError: the worker died of it.
            GrammarUnavailableError: there is no worker to be had, or none that is left to work.
        """
        has_fresh_worker = self._process is None
        num_tries = 0
        while True:
            process = self._started()
            try:
                return self._ask(process, Trial(grammar=grammar), self._wall_limit_s)
            except _GoneError as error:
                self.close()
                # SIGKILL is no limit of ours: the system lacks memory.
                was_killed = str(error) == "read" and process.returncode == -signal.SIGKILL
                if str(error) == "silent" or was_killed:
                    has_fresh_worker = True
                    num_tries += 1
                    if num_tries < _NUM_TRIES:
                        continue
                    raise GrammarUnavailableError(
                        "the grammar could not be tried: the replica has no time or memory for it now"
                    ) from None
                if not has_fresh_worker and process.poll() is not None and str(error) == "write":
                    has_fresh_worker = True  # it had died before, of something else
                    continue
                raise GrammarTooComplexError(
                    "compiling the grammar takes more time or memory than a request may have"
                ) from None

    def end(self) -> None:
        """Kill it and start no other; any thread. What is being tried fails at once."""
        self._is_ending = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill it and free its pipes."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        if self._is_ending:
            raise GrammarUnavailableError("the engine is stopping")
        self.num_starts += 1
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A panic's message quotes the grammar, which is nobody's to read in a log.
                stderr=subprocess.DEVNULL,
                bufsize=0,
                # Other arenas reserve address space ahead, which would soften the limit on memory.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
            if self._is_ending:
                raise _GoneError("ending")
            verdict = self._ask(self._process, self._setup, _START_LIMIT_S)
        except (OSError, _GoneError):
            self.close()
            raise GrammarUnavailableError("the grammar worker does not start") from None
        if verdict.code is not None:
            self.close()
            raise GrammarUnavailableError(f"the grammar worker does not start: {verdict.message}")
        return self._process

    def _ask(
        self, process: subprocess.Popen[bytes], message: Setup | Trial, limit_s: float
    ) -> Verdict:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline_s = time.monotonic() + limit_s
        try:
            _write(process.stdin.fileno(), frame(message), deadline_s)
        except OSError:
            raise _GoneError("write") from None
        source = process.stdout.fileno()
        (size,) = HEADER.unpack(_read(source, HEADER.size, deadline_s))
        return msgspec.msgpack.decode(_read(source, size, deadline_s), type=Verdict)


def _write(sink: int, payload: bytes, deadline_s: float) -> None:
    # Piece by piece: a worker that does not read must not hold us for ever.
    left = memoryview(payload)
    while left:
        _, ready, _ = select.select([], [sink], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise _GoneError("silent")
        left = left[os.write(sink, left[: select.PIPE_BUF]) :]


def _read(source: int, size: int, deadline_s: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        ready, _, _ = select.select([source], [], [], max(0.0, deadline_s - time.monotonic()))
        piece = os.read(source, size - len(received)) if ready else b""
        if not piece:
            raise _GoneError("read" if ready else "silent")
        received += piece
    return bytes(received)
