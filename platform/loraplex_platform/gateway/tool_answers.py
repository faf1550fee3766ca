"""One choice's tool calls in OpenAI's shapes: whole, and in the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from loraplex_platform.gateway.openai_schemas import (
    AssistantMessage,
    ChatFinishReason,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from loraplex_platform.gateway.tool_formats.call_parser import (
    ArgumentsDelta,
    CallBegun,
    CallParser,
    ContentDelta,
    ToolDelta,
)


class ChoiceCalls:
    """What a choice's text comes to; whole or streamed, not both.

    Args:
        parser: fresh.
        key: makes the ids of its calls unique.
    """

    def __init__(self, parser: CallParser, key: str) -> None:
        self._parser = parser
        self._key = key
        self._has_content = False  # some of it was shown

    def push(self, text: str) -> Delta | None:
        """More text; None: nothing of it can be shown yet."""
        return self._delta(self._parser.push(text))

    def finish(self) -> Delta | None:
        """The rest, when the choice has ended; without calls there is content, be it empty."""
        delta = self._delta(self._parser.finish())
        if delta is None and self._parser.num_calls == 0 and not self._has_content:
            return Delta(content="")
        return delta

    def whole(self, text: str) -> AssistantMessage:
        """All of it at once."""
        content: list[str] = []
        names: list[str] = []
        arguments: list[list[str]] = []
        for delta in [*self._parser.push(text), *self._parser.finish()]:
            match delta:
                case ContentDelta():
                    content.append(delta.text)
                case CallBegun():
                    names.append(delta.name)
                    arguments.append([])
                case ArgumentsDelta():
                    arguments[delta.index].append(delta.text)
        if not names:
            return AssistantMessage(content="".join(content))
        calls = [
            ToolCall(id=self._id(index), function=FunctionCall(name=name, arguments="".join(parts)))
            for index, (name, parts) in enumerate(zip(names, arguments, strict=True))
        ]
        return AssistantMessage(content="".join(content) or None, tool_calls=calls)

    def reason(self, reason: ChatFinishReason) -> ChatFinishReason:
        """Once finished: "tool_calls" if calls are what the model stopped after, all of them whole."""
        is_after_calls = self._parser.num_calls > 0 and not self._parser.is_cut_off
        return "tool_calls" if reason == "stop" and is_after_calls else reason

    def _delta(self, deltas: Sequence[ToolDelta]) -> Delta | None:
        content: str | UnsetType = UNSET
        calls: dict[int, ToolCallDelta] = {}
        for delta in deltas:
            match delta:
                case ContentDelta():
                    content = delta.text if content is UNSET else f"{content}{delta.text}"
                case CallBegun():
                    calls[delta.index] = ToolCallDelta(
                        index=delta.index,
                        id=self._id(delta.index),
                        type="function",
                        function=FunctionCallDelta(name=delta.name, arguments=""),
                    )
                case ArgumentsDelta():
                    begun = calls.get(delta.index)
                    calls[delta.index] = ToolCallDelta(
                        index=delta.index,
                        id=UNSET if begun is None else begun.id,
                        type=UNSET if begun is None else begun.type,
                        function=FunctionCallDelta(
                            name=UNSET if begun is None else begun.function.name,
                            arguments=delta.text,
                        ),
                    )
        if content is UNSET and not calls:
            return None
        self._has_content = self._has_content or content is not UNSET
        return Delta(content=content, tool_calls=list(calls.values()) or UNSET)

    def _id(self, index: int) -> str:
        return f"call_{self._key}{index:02x}"
