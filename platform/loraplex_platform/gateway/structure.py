"""What an answer must be: checked off the event loop, and before the request is on the books.

A schema's check is bounded in time, but a few hundred milliseconds are too long for everybody else's
streams: whatever may hold a schema or a grammar is looked at in a thread, however small its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from loraplex_engine.protocol import Grammar

from loraplex_platform.errors import PlatformError
from loraplex_platform.gateway.crash_log import log_crash
from loraplex_platform.gateway.errors import InvalidValueError, UncheckedGrammarError
from loraplex_platform.gateway.openai_schemas import ChatRequest, CompletionRequest
from loraplex_platform.gateway.response_format import output_grammar
from loraplex_platform.gateway.tool_formats.tool_format import ToolFormat
from loraplex_platform.gateway.tools import ToolPlan, plan_tools


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must be; `tools` only in chats."""

    tools: ToolPlan | None = None
    grammar: Grammar | None = None


async def chat_structure(request: ChatRequest, tool_format: ToolFormat) -> Structure:
    """Of a chat's answer; raises an `InvalidRequestError` that names the field.

    Args:
        tool_format: how the model writes calls.
    """
    if request.response_format or request.structured_outputs or request.tools:
        return await asyncio.to_thread(_chat_structure, request, tool_format)
    return _chat_structure(request, tool_format)


async def completion_structure(request: CompletionRequest) -> Structure:
    """Of a completion; raises an `InvalidRequestError` that names the field."""
    if request.structured_outputs is None:
        return Structure()
    return await asyncio.to_thread(_completion_structure, request)


def _chat_structure(request: ChatRequest, tool_format: ToolFormat) -> Structure:
    with _naming("response_format" if request.response_format else "structured_outputs"):
        output = output_grammar(request.response_format, request.structured_outputs)
    if request.tools is None:
        _refuse_without_tools(request)
    with _naming("tools"):
        tools = plan_tools(
            request.tools, request.tool_choice, request.parallel_tool_calls, output, tool_format
        )
    return Structure(tools, output if tools is None else tools.grammar)


def _completion_structure(request: CompletionRequest) -> Structure:
    with _naming("structured_outputs"):
        return Structure(grammar=output_grammar(None, request.structured_outputs))


def _refuse_without_tools(request: ChatRequest) -> None:
    for name in ("tool_choice", "parallel_tool_calls"):
        if getattr(request, name) is not None:
            raise InvalidValueError(f"'{name}' is allowed only with 'tools'.", param=name)


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """A check that crashes is a fault of ours, which the log says; the client hears what it can change.

    Only here: tests of the checks themselves see the crash, and tests over HTTP know its code.
    """
    try:
        yield
    except PlatformError:
        raise
    except Exception as error:
        log_crash("grammar_check_crashed", error, param=param)
        raise UncheckedGrammarError(param) from error
