"""A turn of a conversation, as templates see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loraplex_platform.gateway.errors import InvalidValueError

# More than any template or `json.dumps` can take; the text of deeper arguments would be harmless.
MAX_ARGUMENTS_DEPTH = 64


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A call in an assistant's turn. `arguments`: JSON, as it was written."""

    id: str
    name: str
    arguments: str

    def plain(self) -> dict[str, Any]:
        """As templates take it: arguments as an object, or as text where they are no JSON object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.arguments
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn."""

    role: str
    content: str
    calls: tuple[CalledFunction, ...] = ()  # of an assistant; empty is the same as none
    call_id: str | None = None  # of a result
    name: str | None = None  # of whoever speaks

    @property
    def texts(self) -> Iterator[str]:
        """Everything in it that a template may write."""
        yield self.content
        for call in self.calls:
            yield from (call.id, call.name, call.arguments)
        yield from (text for text in (self.call_id, self.name) if text is not None)


def check_arguments(arguments: str, param: str) -> None:
    """Refuse arguments of a call that templates cannot write.

    What is no JSON at all is fine: it is shown as it stands, as the model once wrote it.

    Raises:
        InvalidValueError: nested too deeply, or text in it is no Unicode.
    """
    try:
        left = [(json.loads(arguments or "{}"), 1)]
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError:
        return
    while left:
        value, depth = left.pop()
        if depth > MAX_ARGUMENTS_DEPTH:
            raise _too_deep(param)
        if isinstance(value, dict):
            left += [(one, depth + 1) for pair in value.items() for one in pair]
        elif isinstance(value, list):
            left += [(one, depth + 1) for one in value]
        elif isinstance(value, str) and not value.isascii() and _has_surrogate(value):
            raise InvalidValueError(
                f"Invalid value for '{param}': half of a surrogate pair (\\ud800 to \\udfff) is no"
                " character.",
                param=param,
            )


def _too_deep(param: str) -> InvalidValueError:
    return InvalidValueError(
        f"Invalid value for '{param}': nested more than {MAX_ARGUMENTS_DEPTH} levels deep.",
        param=param,
    )


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
