"""A model's text to tool calls: what all formats have in common.

Works on released text only, never on tokens. What comes out does not depend on how the text was cut: a
streamed answer is the unstreamed one in pieces.

A block becomes a call the moment its arguments begin, or its object ends without any: then its name is
known, and is one of the tools offered. A block that never gets there is text, as it stands. Arguments
stop where the model stopped. Whitespace between calls, and before or after all of them, is nobody's
content; so is what a format writes between calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final

from loraplex_platform.gateway.tool_formats.json_call import SPACE, JsonCall

_CONTENT: Final = -1


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Tool call number `index`, counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments."""

    index: int
    text: str


ToolDelta = ContentDelta | CallBegun | ArgumentsDelta


class CallParser(ABC):
    """One choice's text.

    The time is in proportion to the text, however it is cut. Runs of characters that change nothing are
    taken at once: a model may be made to write whitespace, or one long string, to the end of its context.

    Args:
        names: of the tools offered.
    """

    mark: ClassVar[str]  # in text: calls begin

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self.is_cut_off = False  # once finished: the last call was not over
        # Where each call was over: characters of the text up to there, an end mark left out where the
        # object ended before it.
        self.call_ends: list[int] = []
        self._names = frozenset(names)
        self._call: JsonCall | None = None  # None: between calls
        self._num_taken = 0  # characters of all text that came before `_held`
        self._held = ""  # the beginning of a mark, if it is one
        self._opening: list[str] = []  # of the next call: it is content if none follows
        self._begun: dict[int, str] = {}  # names of calls that nobody was told of
        # Whitespace that a segment of text began with, in parts; None: it has text.
        self._space: list[str] | None = []
        self._pieces: list[tuple[int, list[str]]] = []  # (call, or _CONTENT), text in parts

    def push(self, text: str) -> list[ToolDelta]:
        """Take more text; what is certain now."""
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text) and not self._held:
            if self._call is None:
                position = self._take_between(text, position)
            else:
                position = self._take_in_call(self._call, text, position)
        self._num_taken += position
        return self._drain()

    def finish(self) -> list[ToolDelta]:
        """The rest, when generation ended, wherever that was."""
        held, self._held = self._held, ""
        self.is_cut_off = self._call is not None and self._call.has_begun and not self._call.is_over
        if self._call is not None:
            self._leave_call(self._call, held)
        else:
            opening = "".join(self._opening)
            self._opening = []
            # What separates calls is not content only because generation ended there.
            self._show((opening if self.mark in opening else "") + held)
        if self._space and self.num_calls == 0:
            self._add(_CONTENT, "".join(self._space))
            self._space = []
        return self._drain()

    # ------------------------------------------------------------------ what formats do

    # Each takes some of `text` from `position` on and returns where it stopped. What may be the beginning
    # of a mark is put in `_held`, untaken.

    @abstractmethod
    def _take_between(self, text: str, position: int) -> int: ...

    @abstractmethod
    def _note_mark(self) -> None:
        """The mark was taken."""

    def _take_end_mark(self, call: JsonCall, text: str, position: int) -> int:
        """What ends a call before its object does; nothing, unless a format has such a mark."""
        return position

    def _note_call(self, call: JsonCall) -> None:
        """A call's object is over."""
        self._leave_call(call, "")

    # ------------------------------------------------------------------ for formats to use

    def _take_text(self, text: str, position: int) -> int:
        """Content, up to and with the mark."""
        start = text.find(self.mark, position)
        if start >= 0:
            self._show(text[position:start])
            self._note_mark()
            return start + len(self.mark)
        end = len(text) - _num_begun(self.mark, text, position)
        self._show(text[position:end])
        self._held = text[end:]
        return end

    def _open_call(self) -> None:
        """What comes next is a call's object."""
        self._call = JsonCall(self._names, "".join(self._opening))
        self._opening = []

    def _leave_call(self, call: JsonCall, held: str) -> None:
        """Back to text; a block that never became a call is text itself."""
        self._call = None
        if call.has_begun:
            self._space = []
        else:
            self._show(call.raw + held)

    def _note_end(self, position: int) -> None:
        self.call_ends.append(self._num_taken + position)

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._space is not None:
            shown = text.lstrip(SPACE)
            self._space.append(text[: len(text) - len(shown)])
            if not shown:
                return
            text = "".join(self._space) + shown
            self._space = None
        self._add(_CONTENT, text)

    # ------------------------------------------------------------------ within a call

    def _take_in_call(self, call: JsonCall, text: str, position: int) -> int:
        end = call.run_end(text, position)
        if end > position:
            self._give(call.push_run(text[position:end]))
            return end
        if not call.is_in_string:
            end = self._take_end_mark(call, text, position)
            if end > position or self._held:
                return end
        was_over = call.is_over
        if was_over:  # the format waits for an end mark, which is missing
            self._leave_call(call, "")
            return position
        had_begun = call.has_begun
        arguments = call.push(text[position])
        end = position if call.has_refused else position + 1
        if call.is_broken:
            self._leave_call(call, "")
            return end
        if call.has_begun and not had_begun:
            self._begun[self.num_calls] = call.name
            self.num_calls += 1
            self._add(self.num_calls - 1, "")
        self._give(arguments)
        if call.is_over:
            self._note_end(end)
            self._note_call(call)
        return end

    def _give(self, arguments: str) -> None:
        if arguments:
            self._add(self.num_calls - 1, arguments)

    def _add(self, index: int, text: str) -> None:
        if not self._pieces or self._pieces[-1][0] != index:
            self._pieces.append((index, []))
        self._pieces[-1][1].append(text)

    def _drain(self) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        for index, parts in self._pieces:
            text = "".join(parts)
            if index == _CONTENT:
                deltas.append(ContentDelta(text))
                continue
            name = self._begun.pop(index, None)
            if name is not None:
                deltas.append(CallBegun(index, name))
            if text:
                deltas.append(ArgumentsDelta(index, text))
        self._pieces = []
        return deltas


def _num_begun(mark: str, text: str, start: int) -> int:
    """How much of `mark` the end of `text` is; not all of it."""
    for length in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
