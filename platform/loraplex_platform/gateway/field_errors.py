"""msgspec's complaints about a request, as errors that name the field and repeat nothing of what was sent.

A complaint ends in the path of the field, and may quote the client's text before it: text that itself looks
like a path proves nothing, so only the last one counts, and only in a path's own alphabet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from loraplex_platform.gateway.errors import (
    InvalidValueError,
    MissingParameterError,
    UnknownParameterError,
)

MAX_NAME_CHARS: Final = 64
_MAX_EXPECTATION_CHARS: Final = 300
_PATH: Final = re.compile(r"\A(?:\.?\w{1,64}|\[(?:\d{1,9}|\.\.\.)\]){0,16}\Z", re.ASCII)
_FIELD: Final = re.compile(r"(missing required|unknown) field `(.*)`\Z", re.DOTALL)


def field_error(
    message: str, kind: type[msgspec.Struct]
) -> InvalidValueError | MissingParameterError | UnknownParameterError:
    """The error for the `msgspec.ValidationError` with this message, of converting to `kind`."""
    expectation, _, path = message.rpartition(" - at `")
    if not expectation:
        expectation, path = message, "$`"
    path = path.removesuffix("`").removeprefix("$").removeprefix(".")
    if not _PATH.match(path):
        path = ""
    field = _FIELD.search(expectation)
    if field is not None:
        name = ".".join(part for part in (path, field[2][:MAX_NAME_CHARS]) if part)
        if field[1] == "unknown":
            return UnknownParameterError(f"Unknown parameter: '{name}'.", param=name)
        return MissingParameterError(f"Missing required parameter: '{name}'.", param=name)
    if expectation.startswith("Invalid enum value"):
        # The one complaint that quotes a value.
        expectation = f"Expected one of {', '.join(_allowed_values(kind, path))}"
    expectation = expectation.replace("`", "")[:_MAX_EXPECTATION_CHARS]
    where = f" for '{path}'" if path else ""
    return InvalidValueError(
        f"Invalid value{where}: {expectation[:1].lower()}{expectation[1:]}.", param=path or None
    )


def _allowed_values(kind: type[msgspec.Struct], path: str) -> list[str]:
    """What the literals at `path` are."""
    places = [inspect.type_info(kind)]
    for name in re.findall(r"\w+|\.\.\.", path):
        places = [inner for place in places for inner in _inner(place, name)]
    return [str(value) for place in places for value in _literals(place)]


def _inner(place: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types one step further down."""
    match place:
        case inspect.Metadata():
            yield from _inner(place.type, name)
        case inspect.UnionType():
            for one in place.types:
                yield from _inner(one, name)
        case inspect.StructType():
            yield from (field.type for field in place.fields if field.encode_name == name)
        case inspect.ListType():
            yield place.item_type
        case inspect.DictType():
            yield place.value_type
        case _:
            pass


def _literals(place: inspect.Type) -> Iterator[Any]:
    match place:
        case inspect.Metadata():
            yield from _literals(place.type)
        case inspect.UnionType():
            for one in place.types:
                yield from _literals(one)
        case inspect.LiteralType():
            yield from place.values
        case _:
            pass
