"""The client: what it counts, what it calls an error, and where it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest

from bench import load
from bench.load import Sample, Target
from bench.workload import WorkItem


def _frames(tokens: int, *, usage: int | None = None, is_done: bool = True) -> bytes:
    frames = [
        json.dumps({"choices": [{"text": "x", "finish_reason": None}]}) for _ in range(tokens)
    ]
    frames.append(json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}))
    count = tokens if usage is None else usage
    frames.append(json.dumps({"choices": [], "usage": {"completion_tokens": count}}))
    if is_done:
        frames.append("[DONE]")
    return "".join(f"data: {frame}\n\n" for frame in frames).encode()


@contextlib.asynccontextmanager
async def _server(answer: Callable[[dict[str, object]], bytes | None]) -> AsyncIterator[str]:
    """Answers each request once; `None`: says nothing and keeps the connection."""
    hung = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        asked["authorization"] = head.partition("authorization: ")[2].split("\r\n")[0]
        body = answer(asked)
        if body is None:
            await hung.wait()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
            writer.write(b"Connection: close\r\n\r\n" + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        hung.set()
        server.close()
        await server.wait_closed()


def _item(number: int, model: str = "m", max_tokens: int = 3, tenant: str = "t") -> WorkItem:
    return WorkItem(number, model, [1, 2], max_tokens, tenant)


async def test_every_request_is_answered_once_with_what_the_server_wants_to_be_asked() -> None:
    seen: list[dict[str, object]] = []

    def answer(asked: dict[str, object]) -> bytes:
        seen.append(asked)
        return _frames(3)

    async with _server(answer) as url:
        target = Target(url, {"t": "key-t", "": "other"}, extra={"m": {"lora": [{"id": 0}]}})
        items = [_item(0), _item(1, "n", tenant="u")]
        samples = await load.replay(target, items, concurrency=1)

    figures = load.summarise(samples)
    assert figures["errors"] == 0
    assert figures["output_tokens"] == 6
    # The frame that only says why it ended is no token.
    assert [len(sample.token_times) for sample in samples] == [3, 3]
    assert [asked["authorization"] for asked in seen] == ["bearer key-t", "bearer other"]
    assert [asked.get("lora") for asked in seen] == [[{"id": 0}], None]
    assert all(asked["ignore_eos"] is True and asked["temperature"] == 0 for asked in seen)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (_frames(2), "2 tokens came, 3 were asked for"),
        (_frames(3, is_done=False), "stream ended without [DONE]"),
        (b'data: {"error": {"message": "boom"}}\n\n', "boom"),
        (b"data: not json\n\n", "JSONDecodeError"),
    ],
)
async def test_less_than_what_was_asked_for_is_an_error(body: bytes, error: str) -> None:
    async with _server(lambda _: body) as url:
        (sample,) = await load.replay(Target(url), [_item(0)], concurrency=1)

    assert sample.error is not None
    assert error in sample.error


async def test_a_server_that_never_answers_is_cut_off_and_what_was_not_asked_counts() -> None:
    async with _server(lambda _: None) as url:
        items = [_item(number) for number in range(3)]
        samples = await load.replay(Target(url), items, concurrency=2, limit_s=0.05)

    assert [sample.error for sample in samples] == [load.NOT_FINISHED] * 2
    figures = load.summarise(samples, len(items))
    assert figures["is_cut"]
    assert (figures["requests"], figures["errors"], figures["output_tokens"]) == (3, 3, 0)


def test_a_cut_request_counts_with_the_tokens_that_came() -> None:
    whole = Sample(0, 0.0, 10, 4, [1.0, 2.0, 3.0, 4.0], 4, 4.0)
    cut = Sample(1, 0.0, 10, 4, [1.0, 3.0], 0, 8.0, load.NOT_FINISHED)

    figures = load.summarise([whole, cut])

    assert (figures["output_tokens"], figures["wall_s"]) == (6, 8.0)
    assert (figures["ttft_p50_s"], figures["inter_token_p50_s"]) == (1.0, 1.0)


def test_a_request_that_failed_counts_for_no_speed() -> None:
    whole = Sample(0, 0.0, 10, 1, [1.0], 1, 2.0)
    failed = Sample(1, 0.0, 1000, 4, [0.1], 1, 0.1, "1 tokens came, 4 were asked for")
    unbegun = Sample(2, 0.0, 500, 4, [], 0, 2.0, load.NOT_FINISHED)

    figures = load.summarise([whole, failed, unbegun])

    assert (figures["prompt_tokens"], figures["output_tokens"]) == (10, 1)
    assert (figures["errors"], figures["faults"], figures["ttft_p50_s"]) == (2, 1, 1.0)


def test_no_time_is_no_speed() -> None:
    figures = load.summarise([Sample(0, 1.0, 10, 4, [], 0, 1.0, "HTTP 500: full")])

    assert (figures["wall_s"], figures["output_tokens_per_s"], figures["faults"]) == (0.0, 0.0, 1)


async def test_a_frame_without_text_is_no_token() -> None:
    empty = b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n'
    async with _server(lambda _: empty + _frames(3)) as url:
        (sample,) = await load.replay(Target(url), [_item(0)], concurrency=1)

    assert (sample.error, len(sample.token_times)) == (None, 3)
