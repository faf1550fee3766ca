"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call: Hermes, Qwen 2 and 3, and ours
for models that know no tools.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from loraplex_platform.gateway.tool_formats.call_parser import CallParser
from loraplex_platform.gateway.tool_formats.json_call import JsonCall
from loraplex_platform.gateway.tool_formats.tool_format import Holding, ToolFormat, quoted

START: Final = "<tool_call>"
END: Final = "</tool_call>"


class Hermes(ToolFormat):
    """See the module's header."""

    name = "hermes"
    marks = (START, END)
    several = "Write one such block per call"

    @classmethod
    def is_used_by(cls, template: str) -> bool:
        return START in template

    def parser(self, names: Collection[str], *, is_marked: bool = False) -> CallParser:
        return HermesParser(names)

    def rules(self, holding: Holding, *, is_single: bool) -> list[str]:
        newline = quoted("\n")
        rest = f"{newline} body {newline} {self.literal(END)}"
        if holding == "text":
            # From the first mark on there is only a call.
            start = "start: text_call? tail" if is_single else "start: text_call* tail"
            head = self.head_rules(START)
            return [start, "tail: TEXT", "TEXT: /(?s:.*)/", *head, f"text_call: head {rest}"]
        start = "start: call" if is_single else f"start: call ({newline} call)*"
        if holding == "calls_or_other":
            start += " | otherwise"
        return [start, f"call: {self.literal(START)} {rest}"]

    def head(self, name: str) -> str:
        return f'{{"name": {quoted(name)}, "arguments": '

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(
            f"{START}\n{self.head(name)}{arguments}}}\n{END}" for name, arguments in calls
        )


class HermesParser(CallParser):
    """A block is over with its object, or with the end mark before that."""

    mark = START

    def _take_between(self, text: str, position: int) -> int:
        return self._take_text(text, position)

    def _note_mark(self) -> None:
        self._opening = [START]
        self._open_call()

    def _take_end_mark(self, call: JsonCall, text: str, position: int) -> int:
        if text.startswith(END, position):
            if call.has_begun and not call.is_over:
                self._note_end(position + len(END))
            self._leave_call(call, END)
            return position + len(END)
        if END.startswith(text[position:]):
            self._held = text[position:]
        return position

    def _note_call(self, call: JsonCall) -> None:
        if call.has_refused:
            self._leave_call(call, "")  # else the end mark is to come
