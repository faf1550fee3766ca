"""Answers that are large: built beside everybody's streams, not in front of them, and bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import openai
import pytest
from loraplex_engine.protocol import TokenLogprobs
from loraplex_platform.gateway import completions, preparation
from loraplex_platform.gateway.answers import AnswerHead, ChatAnswer, CompletionAnswer, WholeChoice
from loraplex_platform.gateway.openai_schemas import UsageReport
from loraplex_platform.gateway.structured_schemas import FunctionDefinition, Tool
from loraplex_platform.gateway.text_stream import ShownToken, TextPiece
from loraplex_platform.gateway.tool_formats.hermes import START, Hermes
from loraplex_platform.gateway.tools import plan_tools

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, Stand

_HEAD = AnswerHead(UUID(int=1), 0, "m", "fp", includes_usage=False, num_top_logprobs=20)
_USAGE = UsageReport.of(1, 1, 0)
# Tokens of a choice. Eight such choices take a tenth of a second or more, in which the loop gets its turns.
_LARGE = 3000
_LOGPROBS = TokenLogprobs(-1.5, list(range(20)), [-float(i) for i in range(20)])


def _pieces(num_tokens: int) -> list[TextPiece]:
    return [TextPiece("ab", [ShownToken(5, _LOGPROBS, 2 * i)]) for i in range(num_tokens)]


@pytest.mark.parametrize("shape", [ChatAnswer, CompletionAnswer])
async def test_a_large_answer_lets_the_loop_go_on(shape: Any) -> None:
    answer = shape(_HEAD, tiny_model.base_tokenizer().token_bytes)
    choices = [_pieces(_LARGE) for _ in range(8)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    body = await completions._build(answer, choices, ["stop"] * 8, _USAGE)
    ticking.cancel()

    assert ticks > 5
    shown = json.loads(body)["choices"]
    assert [choice["index"] for choice in shown] == list(range(8))
    for choice in shown:
        logprobs = choice["logprobs"]
        if shape is ChatAnswer:
            assert choice["message"]["content"] == "ab" * _LARGE
            assert len(logprobs["content"]) == _LARGE
            assert len(logprobs["content"][-1]["top_logprobs"]) == 20
            assert logprobs["content"][-1]["logprob"] == -1.5
        else:
            assert choice["text"] == "ab" * _LARGE
            assert logprobs["text_offset"][-1] == 2 * (_LARGE - 1)


async def test_only_small_answers_are_built_on_the_loop() -> None:
    threads = []

    class Spy(ChatAnswer):
        def whole(self, choices: Sequence[WholeChoice], usage: UsageReport) -> bytes:
            threads.append(threading.current_thread())
            return super().whole(choices, usage)

    spy = Spy(_HEAD, tiny_model.base_tokenizer().token_bytes)
    for pieces in ([TextPiece("x")], [TextPiece("x" * 100_000)], _pieces(100)):
        await completions._build(spy, [pieces], ["stop"], _USAGE)

    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False, False]


async def test_whitespace_to_the_end_of_the_context_is_cheap_to_read_for_calls() -> None:
    tool = Tool(type="function", function=FunctionDefinition(name="f"))
    plan = plan_tools([tool], None, None, None, Hermes())
    head = AnswerHead(UUID(int=1), 0, "m", "fp", False, None, num_choices=16)
    answer = ChatAnswer(head, tiny_model.base_tokenizer().token_bytes, tools=plan)
    texts = [" " * 80, START, "[" * 8]
    choices = [[TextPiece(texts[i % 3])] * 8_000 for i in range(16)]

    async with asyncio.timeout(30):
        body = await completions._build(answer, choices, ["length"] * 16, _USAGE)

    shown = json.loads(body)["choices"]
    assert shown[0]["message"]["content"] == " " * 640_000


@pytest.mark.asyncio(loop_scope="package")
async def test_more_log_probabilities_than_an_answer_may_hold_are_refused_by_name(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "MAX_LOGPROB_VALUES", 2 * 10 * 6)
    chat: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "x"}]}
    chat |= {"n": 2, "max_tokens": 10, "logprobs": True}
    text: dict[str, Any] = {"model": BASE, "prompt": "x", "n": 2, "max_tokens": 10}

    await stand.client.chat.completions.create(**chat, top_logprobs=5)
    await stand.client.completions.create(**text, logprobs=5)
    with pytest.raises(openai.BadRequestError) as of_chat:
        await stand.client.chat.completions.create(**chat, top_logprobs=6)
    with pytest.raises(openai.BadRequestError) as of_text:
        await stand.client.completions.create(**text | {"n": 3}, logprobs=5)

    assert of_chat.value.param == "top_logprobs"
    assert of_text.value.param == "logprobs"
    assert len(stand.generated) == 2
