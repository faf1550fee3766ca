"""Tools on the real model, with the official client: what an agent's loop does."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.fleet import Fleet

pytestmark = pytest.mark.model

BASE = "smollm2-135m"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_a_forced_call_streams_as_it_is_whole_and_its_result_is_answered(
    demo_fleet: Fleet,
) -> None:
    tenant = demo_fleet.demo["tenants"][0]
    with openai.OpenAI(
        base_url=f"{demo_fleet.gateway_url}/v1",
        api_key=tenant["api_key"],
        max_retries=0,
        timeout=120,
    ) as client:
        fields: dict[str, Any] = {
            "model": BASE,
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "temperature": 0,
            "max_tokens": 80,
        }
        answer = client.chat.completions.create(messages=QUESTION, **fields)
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        streamed = ""
        for chunk in client.chat.completions.create(messages=QUESTION, stream=True, **fields):
            for part in chunk.choices:
                for delta in part.delta.tool_calls or []:
                    streamed += delta.function.arguments or ""

        assert choice.finish_reason == "tool_calls"
        assert call.function.arguments == streamed
        arguments = json.loads(streamed)
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])
        assert "Paris" in arguments["city"]  # even a model this small

        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees."}
        last = client.chat.completions.create(
            model=BASE,
            messages=[*QUESTION, choice.message.model_dump(exclude_none=True), result],
            tools=[WEATHER],
            tool_choice="none",
            temperature=0,
            max_tokens=40,
        )
        assert last.choices[0].message.content
        assert last.choices[0].message.tool_calls is None
        assert last.usage is not None
        assert answer.usage is not None
        assert last.usage.prompt_tokens > 0 < answer.usage.completion_tokens
    report = demo_fleet.check_books()
    assert report["ok"]
