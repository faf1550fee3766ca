"""`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`: Mistral's models from 7B v0.3 on.

A single object without the array is read too. An item that is no call ends its array: what follows it is
text, up to another mark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.tool_formats.call_parser import CallParser
from loraplex_platform.gateway.tool_formats.json_call import SPACES, JsonCall
from loraplex_platform.gateway.tool_formats.tool_format import Holding, ToolFormat, quoted

MARK: Final = "[TOOL_CALLS]"
_OTHER_FORM: Final = "[ARGS]"  # of newer models, which name the function outside of any JSON
_ID_CHARS: Final = 9  # Mistral's templates refuse ids of any other length


class Mistral(ToolFormat):
    """See the module's header."""

    name = "mistral"
    marks = (MARK,)
    several = "Write all calls into one such list"

    @classmethod
    def is_used_by(cls, template: str) -> bool:
        return MARK in template and _OTHER_FORM not in template

    def parser(self, names: Collection[str], *, is_marked: bool = False) -> CallParser:
        return MistralParser(names)

    def rules(self, holding: Holding, *, is_single: bool) -> list[str]:
        items = "body" if is_single else f"body ({quoted(', ')} body)*"
        array = f"{quoted('[')} {items} {quoted(']')}"
        if holding == "text":
            start = "start: text_call? tail" if is_single else "start: text_call* tail"
            head = self.head_rules(MARK)
            return [start, "tail: TEXT", "TEXT: /(?s:.*)/", *head, f"text_call: head {array}"]
        start = f"start: {self.literal(MARK)} {array}"
        return [start + (" | otherwise" if holding == "calls_or_other" else "")]

    def head(self, name: str) -> str:
        return f'{{"name": {quoted(name)}, "arguments": '

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        items = ", ".join(f"{self.head(name)}{arguments}}}" for name, arguments in calls)
        return f"{MARK}[{items}]"

    def arrange(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """With ids that Mistral's templates take; equal ones stay equal."""
        return [
            replace(
                message,
                calls=tuple(replace(call, id=_short(call.id)) for call in message.calls),
                call_id=None if message.call_id is None else _short(message.call_id),
            )
            for message in messages
        ]


def _short(id_: str) -> str:
    if len(id_) == _ID_CHARS and id_.isascii() and id_.isalnum():
        return id_
    return hashlib.sha256(id_.encode()).hexdigest()[:_ID_CHARS]


class _Place(Enum):
    TEXT = auto()
    MARKED = auto()  # behind the mark
    ITEM = auto()  # in the array, before an item
    AFTER = auto()  # in the array, after one


class MistralParser(CallParser):
    """A block is over with its object."""

    mark = MARK

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._place = _Place.TEXT

    def _take_between(self, text: str, position: int) -> int:
        if self._place is _Place.TEXT:
            return self._take_text(text, position)
        match = SPACES.match(text, position)
        if match is not None and match.end() > position:
            if self._place is not _Place.AFTER:
                self._opening.append(match[0])
            return match.end()
        match self._place, text[position]:
            case (_Place.MARKED, "["):
                self._opening.append("[")
                self._place = _Place.ITEM
            case (_Place.MARKED | _Place.ITEM, "{"):
                self._open_call()
                return position
            case (_Place.AFTER, ","):
                self._opening = [","]
                self._place = _Place.ITEM
            case (_Place.AFTER, "]"):
                self._place = _Place.TEXT
            case _:  # no call: what led to it is text too
                self._show("".join(self._opening))
                self._opening = []
                self._place = _Place.TEXT
                return position
        return position + 1

    def _note_mark(self) -> None:
        self._opening = [MARK]
        self._place = _Place.MARKED

    def _note_call(self, call: JsonCall) -> None:
        is_in_array = self._place is _Place.ITEM and not call.has_refused
        self._place = _Place.AFTER if is_in_array else _Place.TEXT
        super()._note_call(call)

    def _leave_call(self, call: JsonCall, held: str) -> None:
        super()._leave_call(call, held)
        if not call.has_begun:
            self._place = _Place.TEXT
