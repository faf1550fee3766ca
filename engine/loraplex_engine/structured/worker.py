"""The process in which a grammar is tried before the engine takes it: `python -m ...structured.worker`.

Reads one `Setup` frame, answers `Verdict`, then a verdict for each `Trial`, over stdin and stdout. It may
be killed at any time; nothing but the verdict comes out of it. What a trial may use:

| of | bound | what happens beyond it |
|---|---|---|
| CPU time | ITIMER_PROF | SIGPROF ends the process |
| memory | RLIMIT_AS | the allocation fails, which ends the process |
| stack | a small thread | deep recursion ends the process here, far from the engine's own stack |
| wall time | the parent's clock | the parent kills the process |
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from llguidance import LLTokenizer

from loraplex_engine.lifetime import die_with_parent
from loraplex_engine.protocol import Grammar
from loraplex_engine.structured.errors import (
    GrammarError,
    GrammarInvalidError,
    GrammarTooComplexError,
)
from loraplex_engine.structured.matcher import LlMatcher
from loraplex_engine.structured.tokenizer import native_matcher, open_tokenizer
from loraplex_engine.structured.worker_frames import HEADER, Setup, Trial, Verdict, frame

_STACK_BYTES = 2 * 1024 * 1024  # a fourth of what the engine's threads have
# A trial also follows the grammar for some tokens: what is built lazily is built, and counted, here.
_NUM_WALK_TOKENS = 32
_MASK_LIMIT_S = 0.05  # of CPU: everybody's step waits for a mask


def read_frame(source: BinaryIO) -> bytes | None:
    """One length-prefixed frame; None: the other side is gone."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    payload = source.read(size)
    return payload if len(payload) == size else None


def try_grammar(tokenizer: LLTokenizer, grammar: Grammar, vocab_size: int) -> Verdict:
    """Compile it, follow it for some tokens, and measure."""
    started_s, size_bytes = time.process_time(), _size_bytes()
    try:
        matcher = LlMatcher(native_matcher(tokenizer, grammar), vocab_size)
        _walk(matcher, vocab_size)
    except GrammarError as error:
        return Verdict(code=error.code, message=str(error))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic in Rust is no Exception
        return Verdict(code=GrammarInvalidError.code, message=f"it broke: {type(error).__name__}")
    return Verdict(
        cpu_s=time.process_time() - started_s, size_bytes=max(0, _size_bytes() - size_bytes)
    )


def _walk(matcher: LlMatcher, vocab_size: int) -> None:
    """Only the first mask must allow something: a dead end further on is the model's to avoid or find."""
    choice = random.Random(0)  # noqa: S311 - any tokens will do, the same each time
    mask = matcher.masks_for()[0]  # the engine takes this one off the step loop, so it may be slow
    for _ in range(_NUM_WALK_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
        matcher.advance(int(choice.choice(allowed)))
        if matcher.is_complete:
            return
        started_s = time.thread_time()
        try:
            mask = matcher.masks_for()[0]
        except GrammarError:
            return
        if time.thread_time() - started_s > _MASK_LIMIT_S:
            raise GrammarTooComplexError("a step of the grammar takes too much work")


def _size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    first = read_frame(source)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    try:
        tokenizer = open_tokenizer(setup.tokenizer)
    except (ValueError, OSError) as error:
        sink.write(frame(Verdict(code="grammar_unavailable", message=str(error))))
        sink.flush()
        return
    _limit_memory(setup.memory_bytes)
    sink.write(frame(Verdict()))
    sink.flush()
    while (payload := read_frame(source)) is not None:
        trial = msgspec.msgpack.decode(payload, type=Trial)
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_limit_s)
        verdict = try_grammar(tokenizer, trial.grammar, setup.tokenizer.vocab_size)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(frame(verdict))
        sink.flush()


def main() -> None:
    """Serve until stdin closes."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then ends us
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
    # Whatever a trial left behind must not hold up the exit.
    os._exit(0)


if __name__ == "__main__":
    main()
