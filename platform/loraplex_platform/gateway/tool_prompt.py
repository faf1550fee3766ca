"""How a model whose chat template knows no tools is told of them, and of calls and results.

Our convention, in plain messages that any template renders. Calls are written in the model's format
(`tool_formats/`), Hermes' unless a setting says otherwise, which many models were trained on:

| | becomes |
|---|---|
| tools | a paragraph at the end of the system message, which is made if there is none |
| an assistant's calls | its content, and the calls as it is to write them itself |
| results | one user message for those that follow each other, each between `<tool_response>` marks |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.tool_formats.tool_format import ToolFormat, written

_INTRODUCTION = (
    "You can call functions. Each line is one of them, described in JSON:\n"
    "{functions}\n\n"
    "To call one, write its name and its arguments as JSON, like this:\n"
    "{example}\n"
    "{several} and wait for the results. Without need of a function, just answer."
)
_EXAMPLE = ("function_name", '{"key": "value"}')


def fold(
    messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], tool_format: ToolFormat
) -> list[ChatMessage]:
    """The same conversation without tools, calls and results as such."""
    folded: list[ChatMessage] = []
    was_result = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if was_result:
                folded[-1] = replace(folded[-1], content=f"{folded[-1].content}\n{text}")
            else:
                folded.append(ChatMessage("user", text))
        elif message.calls:
            calls = tool_format.write([written(call) for call in message.calls])
            content = f"{message.content}\n{calls}" if message.content else calls
            folded.append(replace(message, content=content, calls=()))
        else:
            folded.append(message)
        was_result = message.role == "tool"
    return _with_tools(folded, tools, tool_format) if tools else folded


def _with_tools(
    messages: list[ChatMessage], tools: Sequence[dict[str, Any]], tool_format: ToolFormat
) -> list[ChatMessage]:
    text = _INTRODUCTION.format(
        functions="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        example=tool_format.write([_EXAMPLE]),
        several=tool_format.several,
    )
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]
