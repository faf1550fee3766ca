"""What the engine and its grammar worker say to each other: msgpack, with the length before it."""

from __future__ import annotations

import struct

import msgspec

from loraplex_engine.protocol import Grammar

HEADER = struct.Struct("<I")  # bytes that follow


class TokenizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokenizer lies and what the model makes of it."""

    path: str  # tokenizer.json
    vocab_size: int  # of the logits; ids beyond the tokenizer's are never allowed
    eos_token_ids: tuple[int, ...]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame; answered with a `Verdict` once the worker is ready."""

    tokenizer: TokenizerSpec
    cpu_limit_s: float  # per trial
    memory_bytes: int  # of trials, beyond what the process has when it is ready


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to try; answered with a `Verdict`."""

    grammar: Grammar


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it. `code` None: it may be used."""

    code: str | None = None  # a `GrammarError`'s
    message: str = ""
    cpu_s: float = 0.0
    size_bytes: int = 0  # by how much the worker grew


def frame(message: Setup | Trial | Verdict) -> bytes:
    """A message with its length before it."""
    payload = msgspec.msgpack.encode(message)
    return HEADER.pack(len(payload)) + payload
