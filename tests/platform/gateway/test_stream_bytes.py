"""What a stream's bytes are, to the byte: a golden file, and whole documents as the encoder writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.protocol import TokenLogprobs
from loraplex_platform.gateway.answers import AnswerHead, ChatAnswer, CompletionAnswer
from loraplex_platform.gateway.completions import _chunks
from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.event_stream import PING, EventStream
from loraplex_platform.gateway.job import ChoiceEnded, ChoicePiece, Finished, PumpEvent, Started
from loraplex_platform.gateway.openai_schemas import (
    ChatCompletionChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    UsageReport,
    encode_json,
)
from loraplex_platform.gateway.pump import Pump
from loraplex_platform.gateway.text_stream import ShownToken, TextPiece
from msgspec import UNSET
from starlette.types import Message

GOLDEN = Path(__file__).parents[2] / "golden" / "stream_bytes.txt"
TOKENS = TokenBytes({0: "a", 1: "Ġb", 2: "<end>"}, [2])
NASTY = [
    'Hi "you"\\',
    "\n\t\r\b\f\x00\x1f\x7f",
    "é\u2028\u2029\ufeff",
    "\U0001f600</script>",
    "\ufffd",
]
USAGE = UsageReport.of(7, 5, 2)


def head(**changes: Any) -> AnswerHead:
    values: dict[str, Any] = {
        "request_id": UUID(int=0x0123456789ABCDEF0123456789ABCDEF),
        "created": 1_700_000_000,
        "model": 'we"ird/é',
        "system_fingerprint": "fp_0123456789abcdef",
        "includes_usage": False,
        "num_top_logprobs": None,
        "num_choices": 1,
    }
    return AnswerHead(**values | changes)


async def body(answer: ChatAnswer | CompletionAnswer, events: list[PumpEvent]) -> bytes:
    """What is sent when these events come one by one."""
    pump = _SpokenPump(events)
    first = events[0]
    chunks = _chunks(cast("Pump", pump), answer, first, "req_1")
    return b"".join([chunk async for chunk in chunks])


class _SpokenPump:
    def __init__(self, events: list[PumpEvent]) -> None:
        self._events = iter(events[1:])

    async def next_events(self) -> list[PumpEvent]:
        return [next(self._events)]


def told(num_choices: int, *, logprobs: bool = False) -> list[PumpEvent]:
    """Nasty pieces, choice after choice, then the ends."""
    events: list[PumpEvent] = [Started("model")]
    for number, text in enumerate(NASTY):
        for index in range(num_choices):
            token = ShownToken(
                number % 3,
                TokenLogprobs(logprob=-0.5, top_ids=[0, 2], top_logprobs=[-0.5, float("-inf")]),
                0,
            )
            events.append(ChoicePiece(index, TextPiece(text, [token] if logprobs else [])))
    events += [ChoiceEnded(index, "stop" if index else "length") for index in range(num_choices)]
    return [*events, Finished(USAGE)]


async def streams() -> bytes:
    """One stream of every kind."""
    kinds: list[tuple[ChatAnswer | CompletionAnswer, list[PumpEvent]]] = [
        (ChatAnswer(head(), TOKENS), told(1)),
        (ChatAnswer(head(includes_usage=True, num_choices=2), TOKENS), told(2)),
        (ChatAnswer(head(num_top_logprobs=1), TOKENS), told(1, logprobs=True)),
        (CompletionAnswer(head(), TOKENS), told(1)),
        (CompletionAnswer(head(includes_usage=True, num_choices=2), TOKENS), told(2)),
        (CompletionAnswer(head(num_top_logprobs=1), TOKENS), told(1, logprobs=True)),
    ]
    return b"".join([await body(answer, events) for answer, events in kinds])


async def test_streams_are_the_golden_bytes() -> None:
    assert await streams() == GOLDEN.read_bytes()


@pytest.mark.parametrize("includes_usage", [False, True])
@given(text=st.text(), index=st.integers(0, 1))
def test_a_chat_frame_is_the_document_that_the_encoder_writes(
    includes_usage: bool, text: str, index: int
) -> None:
    about = head(includes_usage=includes_usage, num_choices=2)

    frame = ChatAnswer(about, TOKENS).frame(index, TextPiece(text))

    assert frame == encode_json(
        ChatCompletionChunk(
            id=f"chatcmpl-{about.request_id.hex}",
            created=about.created,
            model=about.model,
            system_fingerprint=about.system_fingerprint,
            choices=[ChunkChoice(index=index, delta=Delta(content=text))],
            usage=None if includes_usage else UNSET,
        )
    )


@pytest.mark.parametrize("includes_usage", [False, True])
@given(text=st.text(), index=st.integers(0, 1))
def test_a_completion_frame_is_the_document_that_the_encoder_writes(
    includes_usage: bool, text: str, index: int
) -> None:
    about = head(includes_usage=includes_usage, num_choices=2)

    frame = CompletionAnswer(about, TOKENS).frame(index, TextPiece(text))

    assert frame == encode_json(
        Completion(
            id=f"cmpl-{about.request_id.hex}",
            created=about.created,
            model=about.model,
            system_fingerprint=about.system_fingerprint,
            choices=[CompletionChoice(index=index, text=text)],
            usage=None if includes_usage else UNSET,
        )
    )


async def test_a_ping_that_cannot_be_sent_ends_the_request() -> None:
    ended = asyncio.Event()
    release = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        await release.wait()
        yield b""

    async def send(message: Message) -> None:
        if message.get("body") == PING:
            raise OSError("the client is gone")

    async def receive() -> Message:
        raise AssertionError("receive belongs to whoever watches for the client's going")

    stream = EventStream(chunks(), headers={}, ping_interval_s=0.01, on_end=ended.set)
    answering = asyncio.create_task(stream({}, receive, send))
    async with asyncio.timeout(10):
        await ended.wait()
        release.set()
        await answering
