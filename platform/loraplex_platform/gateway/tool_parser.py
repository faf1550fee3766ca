"""A model's text to tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Works on released text only, never on tokens. What comes out does not depend on how the text was cut: a
streamed answer is the unstreamed one in pieces. Nothing is
repaired or reformatted: a call's arguments are the characters that the model wrote, also where they are
no valid JSON, and stop where the model stopped.

A block becomes a call the moment its arguments begin, or its object ends without any: then its name is
known, and is one of the tools offered. A block that never gets there is text, as it stands.

| the block says | the call gets |
|---|---|
| `"arguments": {...}`, or another value | its characters |
| `"arguments": "..."`: JSON in a string | the string's content |
| no arguments | `{}` |
| arguments before the name | the same; they are held until the name is there |
| a key twice | the first |
| `"parameters"` | as `"arguments"`: some models call them so |

Whitespace between calls, and before or after all of them, is nobody's content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

START: Final = "<tool_call>"
END: Final = "</tool_call>"
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_SPACE: Final = " \t\r\n"
_CONTENT: Final = -1

# Characters that change nothing about where a block stands. `<` may begin the end mark.
_SPACES: Final = re.compile(r"[ \t\r\n]*")
_IN_STRING: Final = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_IN_BRACKETS: Final = re.compile(r'[^"{}\[\]<]*')
_IN_SCALAR: Final = re.compile(r'[^"{}\[\],< \t\r\n]*')


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


class ToolCallParser:
    """One choice's text.

    The time is in proportion to the text, however it is cut. Runs of characters that change nothing are
    taken at once: a model may be made to write whitespace, or one long string, to the end of its context.

    Args:
        names: of the tools offered.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self.is_cut_off = False  # once finished: the last call was not over
        # Where each call was over: characters of the text up to there, the end mark left out where the
        # object ended before it.
        self.call_ends: list[int] = []
        self._names = frozenset(names)
        self._block: _Block | None = None  # None: between blocks
        self._num_taken = 0  # characters of all text that came before `_mark`
        self._mark = ""  # the beginning of a mark, if it is one
        self._begun: dict[int, str] = {}  # names of calls that nobody was told of
        # Whitespace that a segment of text began with, in parts; None: it has text.
        self._space: list[str] | None = []
        self._pieces: list[tuple[int, list[str]]] = []  # (call, or _CONTENT), text in parts

    def push(self, text: str) -> list[ToolDelta]:
        """Take more text; what is certain now."""
        text, self._mark = self._mark + text, ""
        position = 0
        while position < len(text) and not self._mark:
            if self._block is None:
                position = self._take_text(text, position)
            else:
                position = self._take_in_block(self._block, text, position)
        self._num_taken += position
        return self._drain()

    def finish(self) -> list[ToolDelta]:
        """The rest, when generation ended, wherever that was."""
        mark, self._mark = self._mark, ""
        self.is_cut_off = (
            self._block is not None and self._block.has_begun and not self._block.is_over
        )
        if self._block is None:
            self._show(mark)
        else:
            self._leave_block(self._block, mark)
        if self._space and self.num_calls == 0:
            self._add(_CONTENT, "".join(self._space))
            self._space = []
        return self._drain()

    # ------------------------------------------------------------------ between and in blocks

    # Each takes some of `text` from `position` on and returns where it stopped. What may be the beginning
    # of a mark stays in `_mark`, untaken.

    def _take_text(self, text: str, position: int) -> int:
        start = text.find(START, position)
        if start >= 0:
            self._show(text[position:start])
            self._block = _Block(self._names)
            return start + len(START)
        num_held = _num_begun(START, text, position)
        end = len(text) - num_held
        self._show(text[position:end])
        self._mark = text[end:]
        return end

    def _take_in_block(self, block: _Block, text: str, position: int) -> int:
        end = block.run_end(text, position)
        if end > position:
            self._give(block.push_run(text[position:end]))
            return end
        character = text[position]
        if character == END[0] and not block.is_in_string:
            if text.startswith(END, position):
                if block.has_begun and not block.is_over:
                    self._note_end(position + len(END))
                self._leave_block(block, END)
                return position + len(END)
            if END.startswith(text[position:]):
                self._mark = text[position:]
                return position
        had_begun, was_over = block.has_begun, block.is_over
        if was_over:
            self._leave_block(block, "")  # the end mark is missing
            return position
        arguments = block.push(character)
        if block.is_broken:
            self._leave_block(block, "")
            return position
        if block.has_begun and not had_begun:
            self._begun[self.num_calls] = block.name
            self.num_calls += 1
            self._add(self.num_calls - 1, "")
        self._give(arguments)
        if block.is_over:
            self._note_end(position + 1)
        return position + 1

    def _note_end(self, position: int) -> None:
        self.call_ends.append(self._num_taken + position)

    def _give(self, arguments: str) -> None:
        if arguments:
            self._add(self.num_calls - 1, arguments)

    def _leave_block(self, block: _Block, mark: str) -> None:
        """Back to text; a block that never became a call is text itself."""
        self._block = None
        if block.has_begun:
            self._space = []
        else:
            self._show(START + block.raw + mark)

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._space is not None:
            shown = text.lstrip(_SPACE)
            self._space.append(text[: len(text) - len(shown)])
            if not shown:
                return
            text = "".join(self._space) + shown
            self._space = None
        self._add(_CONTENT, text)

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


class _State(Enum):
    OBJECT = auto()  # before `{`
    KEY = auto()  # before a key, or `}`
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    AFTER = auto()  # after a value
    OVER = auto()


class _Role(Enum):
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class _Block:
    """What stands between the marks: a JSON object, read only as closely as a call needs."""

    def __init__(self, names: Collection[str]) -> None:
        self.name = ""  # once it has begun
        self.has_begun = False  # it is a call
        self.is_broken = False  # it is no call; the last character was not taken
        self._names = names
        self._state = _State.OBJECT
        self._raw: list[str] = []
        self._text: list[str] = []  # of a key or value
        self._key = ""
        self._role = _Role.OTHER
        self._is_scalar = False  # a value without brackets or quotes
        self._depth = 0  # of brackets within a value
        self._is_in_string = False
        self._is_escaped = False
        self._found_name: str | None = None
        self._arguments: str | None = None  # whole ones, which wait for a name
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """Everything taken, as long as it has not begun."""
        return "".join(self._raw)

    @property
    def is_in_string(self) -> bool:
        """A mark would be a string's content here."""
        return self._is_in_string

    @property
    def is_over(self) -> bool:
        """The object has ended, or what there was of it."""
        return self._state is _State.OVER

    def run_end(self, text: str, start: int) -> int:
        """Where the characters from `start` on end that change nothing, for `push_run`."""
        if self._is_escaped:
            return start
        if self._is_in_string:
            pattern = _IN_STRING
        elif self._state is not _State.IN_VALUE:
            pattern = _SPACES
        else:
            pattern = _IN_SCALAR if self._is_scalar else _IN_BRACKETS
        match = pattern.match(text, start)
        return start if match is None else match.end()

    def push_run(self, run: str) -> str:
        """Take a run of such characters; return what it adds to the arguments."""
        if not self.has_begun:
            self._raw.append(run)
        if self._state is _State.IN_KEY:
            self._text.append(run)
        elif self._state is _State.IN_VALUE:
            if self._role is _Role.ARGUMENTS and self.has_begun:
                return run
            if self._role is not _Role.OTHER:
                self._text.append(run)
        return ""

    def push(self, character: str) -> str:
        """Take a character; return what it adds to the arguments."""
        released = self._push(character)
        if not self.has_begun and not self.is_broken:
            self._raw.append(character)
        return released

    def _push(self, character: str) -> str:
        match self._state:
            case _State.IN_VALUE:
                return self._push_value(character)
            case _State.IN_KEY:
                self._text.append(character)
                self._follow(character)
                if not self._is_in_string:
                    self._key = _decoded(self._text)
                    self._state = _State.COLON
                return ""
            case _ if character in _SPACE:
                return ""
            case _State.OBJECT if character == "{":
                self._state = _State.KEY
            case _State.KEY if character == '"':
                self._text = [character]
                self._follow(character)
                self._state = _State.IN_KEY
            case _State.COLON if character == ":":
                self._state = _State.VALUE
            case _State.VALUE if character not in ",:}]":
                self._begin_value(character)
                return self._push_value(character)
            case _State.AFTER if character == ",":
                self._state = _State.KEY
            case _State.KEY | _State.AFTER if character == "}":
                return self._close()
            case _:
                self._break()
        return ""

    def _begin_value(self, character: str) -> None:
        self._state = _State.IN_VALUE
        self._text = []
        self._is_scalar = character not in '"{['
        if self._key == "name" and self._found_name is None:
            self._role = _Role.NAME
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._role = _Role.ARGUMENTS
            self._has_arguments = True
            # JSON in a string can be given out only once it is whole.
            if self._found_name is not None and character != '"':
                self._begin_call(self._found_name)
        else:
            self._role = _Role.OTHER

    def _push_value(self, character: str) -> str:
        if self._is_scalar and character in ",}]" + _SPACE:
            self._state = _State.AFTER
            return self._end_value() + self._push(character)
        self._follow(character)
        released = ""
        if self._role is _Role.ARGUMENTS and self.has_begun:
            released = character
        elif self._role is not _Role.OTHER:
            self._text.append(character)
        if not (self._is_scalar or self._is_in_string or self._depth):
            self._state = _State.AFTER
            released += self._end_value()
        return released

    def _end_value(self) -> str:
        """The value is whole; return arguments that this releases."""
        if self._role is _Role.NAME:
            name = _decoded(self._text)
            if name not in self._names:
                self._break()
                return ""
            self._found_name = name
        elif self._role is _Role.ARGUMENTS and not self.has_begun:
            is_string = self._text[0] == '"'
            self._arguments = _decoded(self._text) if is_string else "".join(self._text)
        if self._found_name is None or self._arguments is None:
            return ""
        self._begin_call(self._found_name)
        arguments, self._arguments = self._arguments, None
        return arguments

    def _close(self) -> str:
        self._state = _State.OVER
        if self.has_begun:
            return ""
        if self._found_name is None:
            self.is_broken = True
            return ""
        self._begin_call(self._found_name)
        return "{}"

    def _break(self) -> None:
        """No JSON, or of no tool. A call that has begun keeps what it got."""
        self._state = _State.OVER
        self.is_broken = not self.has_begun

    def _begin_call(self, name: str) -> None:
        self.has_begun, self.name = True, name
        self._raw.clear()

    def _follow(self, character: str) -> None:
        """Keep track of strings and brackets."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def _decoded(text: list[str]) -> str:
    """A JSON string's content; where it is none, its characters."""
    literal = "".join(text)
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return literal.strip('"')
    if not isinstance(value, str):
        return literal
    return value.encode("utf-8", "replace").decode()  # half a surrogate pair is no text


def _num_begun(mark: str, text: str, start: int) -> int:
    """How much of `mark` the end of `text` is; not all of it."""
    for length in range(min(len(mark) - 1, len(text) - start), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
