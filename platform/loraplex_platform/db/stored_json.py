"""JSON as Postgres can store it."""

from __future__ import annotations

import json
import re
from typing import Any, Final

# Characters that jsonb refuses: NUL, and halves of pairs (a whole one is a single character in Python). What a
# model says, and so a report of it, may hold a NUL.
_REFUSED: Final = re.compile("[\0\ud800-\udfff]")
# As json.dumps writes them; halves that make a pair are looked at too.
_SUSPECT: Final = re.compile(r"\\u(?:0000|d[89a-f])")
_REPLACEMENT: Final = "\ufffd"


def to_stored_json(value: Any) -> str:  # noqa: ANN401 -- whatever JSON can say
    """`value` as ASCII JSON; characters that jsonb cannot hold become U+FFFD, in keys too."""
    text = json.dumps(value)
    if _SUSPECT.search(text):
        text = json.dumps(_storable(value))
    return text


def _storable(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return _REFUSED.sub(_REPLACEMENT, value)
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value
