"""The JSON object of one call, read only as closely as a call needs; shared by all formats.

Nothing is repaired or reformatted: arguments are the characters that the model wrote.

| the object says | the call gets |
|---|---|
| `"arguments": {...}`, or another value | its characters |
| `"arguments": "..."`: JSON in a string | the string's content |
| no arguments | `{}` |
| arguments before the name | the same; they are held until the name is there |
| a key twice | the first |
| `"parameters"` | as `"arguments"`: models write one for the other |
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

SPACE: Final = " \t\r\n"
SPACES: Final = re.compile(r"[ \t\r\n]*")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")

# Characters that change nothing about where an object stands. `<` may begin an end mark.
_IN_STRING: Final = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_IN_BRACKETS: Final = re.compile(r'[^"{}\[\]<]*')
_IN_SCALAR: Final = re.compile(r'[^"{}\[\],< \t\r\n]*')


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


class JsonCall:
    """One such object, character by character.

    Args:
        names: of the tools offered.
        opening: what stood before it and is text, with it, if it is no call.
    """

    def __init__(self, names: Collection[str], opening: str) -> None:
        self.name = ""  # once it has begun
        self.has_begun = False  # it is a call
        self.has_refused = False  # the last character was not taken: it belongs to no such object
        self._names = names
        self._state = _State.OBJECT
        self._raw: list[str] = [opening]
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
    def is_broken(self) -> bool:
        """It is no call, and never will be one."""
        return self.is_over and not self.has_begun

    @property
    def raw(self) -> str:
        """The opening and everything taken, as long as it has not begun."""
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
            pattern = SPACES
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
        if not (self.has_begun or self.has_refused):
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
            case _ if character in SPACE:
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
        if self._is_scalar and character in ",}]" + SPACE:
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
        if self.has_begun or self._found_name is None:
            return ""
        self._begin_call(self._found_name)
        return "{}"

    def _break(self) -> None:
        """No JSON, or of no tool. A call that has begun keeps what it got."""
        self._state = _State.OVER
        self.has_refused = True

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
