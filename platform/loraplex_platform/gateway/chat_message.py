"""A turn of a conversation, as templates see it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


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
