"""How a model whose chat template knows no tools is told of them, and of calls and results.

Our convention, in plain messages that any template renders. It uses the marks of `tool_parser.py`, which
many models were trained on:

| | becomes |
|---|---|
| tools | a paragraph at the end of the system message, which is made if there is none |
| an assistant's calls | its content, and each call between marks, as it is to write them itself |
| results | one user message for those that follow each other, each between `<tool_response>` marks |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loraplex_platform.gateway.chat_message import CalledFunction, ChatMessage
from loraplex_platform.gateway.tool_parser import END, START

_INTRODUCTION = (
    "You can call functions. Each line is one of them, described in JSON:\n"
    "{functions}\n\n"
    "To call one, write its name and its arguments as JSON, like this:\n"
    f'{START}\n{{{{"name": "function_name", "arguments": {{{{"key": "value"}}}}}}}}\n{END}\n'
    "Write one such block per call and wait for the results. Without need of a function, just answer."
)


def fold(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
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
            blocks = [_block(call) for call in message.calls]
            content = "\n".join([message.content, *blocks] if message.content else blocks)
            folded.append(replace(message, content=content, calls=()))
        else:
            folded.append(message)
        was_result = message.role == "tool"
    return _with_tools(folded, tools) if tools else folded


def _with_tools(messages: list[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(functions=functions)
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]


def _block(call: CalledFunction) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{START}\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n{END}'
