"""`{"name": ..., "parameters": {...}}`, alone or behind `<|python_tag|>`: Llama 3.1 and its kin.

An object is a call where the answer begins with it, or it follows another call, with or without `;`
between them; anywhere else it is text, unless the mark says that it is one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.tool_formats.call_parser import CallParser
from loraplex_platform.gateway.tool_formats.json_call import SPACES
from loraplex_platform.gateway.tool_formats.tool_format import Holding, ToolFormat, quoted

MARK: Final = "<|python_tag|>"
_FORMAT: Final = '{"name": function name, "parameters": '  # in the words of Meta's templates
_SEPARATOR: Final = "; "


class Llama(ToolFormat):
    """See the module's header."""

    name = "llama"
    marks = (MARK,)
    several = "Write nothing else, one such object per call with a semicolon between them,"

    @classmethod
    def is_used_by(cls, template: str) -> bool:
        return _FORMAT in template

    def parser(self, names: Collection[str], *, is_marked: bool = False) -> CallParser:
        return LlamaParser(names, is_marked=is_marked)

    def rules(self, holding: Holding, *, is_single: bool) -> list[str]:
        calls = "body" if is_single else f"body ({quoted(_SEPARATOR)} body)*"
        match holding:
            case "calls":
                return [f"start: {calls}"]
            case "calls_or_other":
                # Only the mark tells a call from an answer that looks like one.
                return [f"start: {self.literal(MARK)} {calls} | otherwise"]
            case "text":
                # Text that begins like a call is one. None follows calls: it might look like another.
                return [
                    f"start: head? {calls} | tail",
                    "tail: TEXT?",
                    r"TEXT: /[ \t\r\n]*[^{ \t\r\n](?s:.*)/",
                    *self.head_rules(MARK),
                ]

    def head(self, name: str) -> str:
        return f'{{"name": {quoted(name)}, "parameters": '

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return _SEPARATOR.join(f"{self.head(name)}{arguments}}}" for name, arguments in calls)

    def arrange(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """One call a turn, which is all that Meta's templates take, with its result behind it."""
        arranged: list[ChatMessage] = []
        position = 0
        while position < len(messages):
            message = messages[position]
            position += 1
            if len(message.calls) < 2:
                arranged.append(message)
                continue
            results: dict[str | None, list[ChatMessage]] = {}
            while position < len(messages) and messages[position].role == "tool":
                result = messages[position]
                results.setdefault(result.call_id, []).append(result)
                position += 1
            for index, call in enumerate(message.calls):
                content = "" if index else message.content
                arranged.append(replace(message, content=content, calls=(call,)))
                arranged += results.pop(call.id, [])
            arranged += [one for others in results.values() for one in others]
        return arranged


class LlamaParser(CallParser):
    """A block is over with its object.

    Args:
        is_marked: also at the beginning of the answer an object is a call only behind the mark.
    """

    mark = MARK

    def __init__(self, names: Collection[str], *, is_marked: bool = False) -> None:
        super().__init__(names)
        self._is_marked = is_marked

    def _take_between(self, text: str, position: int) -> int:
        if self._space is None:
            return self._take_text(text, position)
        # Nothing but whitespace since the beginning, or since a call.
        end = _space_end(text, position)
        if end > position:
            if self._opening:
                self._opening.append(text[position:end])
            else:
                self._show(text[position:end])
            return end
        character = text[position]
        if character == "{" and (self.num_calls or not self._is_marked):
            self._open_call()
            return position
        if character == ";" and self.num_calls and not self._opening:
            self._opening = [character]
            return position + 1
        if text.startswith(MARK, position):
            self._note_mark()
            return position + len(MARK)
        if MARK.startswith(text[position:]):
            self._held = text[position:]
            return position
        self._show("".join(self._opening))
        self._opening = []
        return self._take_text(text, position)

    def _note_mark(self) -> None:
        self._opening.append(MARK)
        self._open_call()


def _space_end(text: str, position: int) -> int:
    match = SPACES.match(text, position)
    return position if match is None else match.end()
