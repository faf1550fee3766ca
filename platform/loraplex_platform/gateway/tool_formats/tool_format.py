"""What a format of tool calls must say: how it is known, read, forced and written."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

from loraplex_platform.gateway.chat_message import CalledFunction, ChatMessage
from loraplex_platform.gateway.tool_formats.call_parser import CallParser

# What the text of an answer may be, by its grammar: calls alone, calls or what a rule named `otherwise`
# says, or any text with calls in it.
Holding = Literal["calls", "calls_or_other", "text"]


class ToolFormat(ABC):
    """One format, for one model.

    Args:
        special_ids: of the model's special tokens, by their text. A mark among them is one token, which
            has no text elsewhere; here it is shown to the parser, and grammars ask for the token.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    several: ClassVar[str]  # how to write several calls, told to the model

    def __init__(self, special_ids: Mapping[str, int] | None = None) -> None:
        known = special_ids or {}
        self._mark_ids = {mark: known[mark] for mark in self.marks if mark in known}

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens whose text the parser must see."""
        return frozenset(self._mark_ids.values())

    @classmethod
    @abstractmethod
    def is_used_by(cls, template: str) -> bool:
        """Whether a chat template that takes tools has its model write this format."""

    @abstractmethod
    def parser(self, names: Collection[str], *, is_marked: bool = False) -> CallParser:
        """For one choice's text. `is_marked`: an object is a call only where a mark says so."""

    @abstractmethod
    def rules(self, holding: Holding, *, is_single: bool) -> list[str]:
        """The grammar's rules down to `body`, one call's object: `head`, arguments, `}`."""

    @abstractmethod
    def head(self, name: str) -> str:
        """A call's object up to its arguments."""

    @abstractmethod
    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, (name, arguments) each, as the model is to write them."""

    def arrange(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """A conversation as templates of this format take it."""
        return list(messages)

    def literal(self, mark: str) -> str:
        """A mark in a grammar."""
        token_id = self._mark_ids.get(mark)
        return quoted(mark) if token_id is None else f"<[{token_id}]>"

    def head_rules(self, mark: str, text: str = "TEXT") -> list[str]:
        """The rule `head`: free text, up to and with the first mark."""
        if mark in self._mark_ids:
            return [f"head: {text}? {self.literal(mark)}"]
        # Lazy: it ends at the first mark, so that no text goes past one.
        return [f"head[lazy]: {text}? {self.literal(mark)}"]


def written(call: CalledFunction) -> tuple[str, str]:
    """A call for `ToolFormat.write`."""
    return call.name, call.arguments or "{}"


def quoted(text: str) -> str:
    """A text as JSON, which is also how a grammar writes literals."""
    return json.dumps(text, ensure_ascii=False)
