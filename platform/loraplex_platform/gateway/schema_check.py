"""JSON schemas from clients: bounded, and only with keywords that the grammar engine follows.

The engine would find the same, but later and in its own words; a client is told before its request is on
the books, with the path of what is in the way. Left to the engine is what only it can tell: patterns,
formats, lengths and constants that contradict each other, names that two `patternProperties` match, and
what takes too much time or memory. What is merely ignored by JSON schema itself (titles,
descriptions, examples) is ignored here too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from loraplex_platform.gateway.errors import InvalidValueError, UnsupportedParameterError
from loraplex_platform.gateway.schema_alternatives import Alternatives, TooManyStepsError
from loraplex_platform.gateway.schema_patterns import fault_of
from loraplex_platform.gateway.schema_values import find_wrong_value

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 8192
MAX_SCHEMA_BYTES = 128 * 1024
_TOO_HARD: Final = (
    "it takes too long to tell whether its schemas exclude each other; let all of them require one property"
    " with a constant of its own in each, or use 'anyOf'"
)
_MAX_PATH_CHARS = 300
_MAX_NUMBER: Final = sys.float_info.max
_NOT_EXCLUSIVE: Final = (
    "its schemas must exclude each other by type, by constants or by a required property; where a value"
    " may match several of them, use 'anyOf'"
)

# Keywords that constrain, and that no grammar here can enforce.
UNSUPPORTED: Final = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
        "additionalItems",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    }
)
FORMATS: Final = frozenset(
    {
        "date",
        "date-time",
        "time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    }
)
# Where a schema holds schemas: by name, in a list, or itself.
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties")


def check_schema(schema: object, param: str, *, is_strict: bool = True) -> None:
    """Refuse what is too large, or, if strict, cannot be followed to the letter.

    Raises:
        InvalidValueError, UnsupportedParameterError: names the place by its path below `param`.
    """
    _check_bounds(schema, param)
    if not is_strict:
        return
    has_ids = any("$id" in place for _, place in _schemas(schema, "") if isinstance(place, dict))
    for path, place in _schemas(schema, param):
        if not isinstance(place, dict):
            if isinstance(place, bool):
                continue
            name = path[-_MAX_PATH_CHARS:]
            raise InvalidValueError(
                f"Invalid value for '{name}': a schema is an object or a boolean.", param=name
            )
        for keyword in place:
            if keyword in UNSUPPORTED and not _asks_for_nothing(place, keyword):
                raise _unsupported(
                    path, keyword, f"the JSON schema keyword '{keyword}' is not supported"
                )
        wrong = find_wrong_value(place, schema, has_ids=has_ids)
        if wrong is not None:
            raise _wrong_value(path, *wrong)
        _check_values(place, path)
    _check_sense(schema, param)


def _check_sense(schema: object, param: str) -> None:
    """What depends on several keywords, all of which have been checked."""
    alternatives = Alternatives(schema)
    for path, place in _schemas(schema, param):
        if not isinstance(place, dict):
            continue
        if "oneOf" not in place:
            continue
        try:
            is_exclusive = alternatives.exclude_each_other(place["oneOf"])
        except TooManyStepsError:
            raise _unsupported(path, "oneOf", _TOO_HARD) from None
        if not is_exclusive:
            raise _unsupported(path, "oneOf", _NOT_EXCLUSIVE)
    impossible = alternatives.impossible_place(schema, param)
    if impossible is not None:
        name = impossible[-_MAX_PATH_CHARS:]
        raise InvalidValueError(f"'{name}' allows nothing.", param=name)


def followable(schema: Any, *, is_strict: bool = True) -> Any:  # noqa: ANN401 - JSON
    """A checked schema in the engine's words.

    Without keywords that ask for nothing and that it does not know. If strict, with `anyOf` for `oneOf`:
    its schemas were found to exclude each other, then it is the same; the engine itself sees that of few.
    """

    def is_odd(place: object) -> bool:
        if not isinstance(place, dict):
            return False
        return _asks_for_nothing(place, "uniqueItems") or (is_strict and "oneOf" in place)

    places = [place for _, place in _schemas(schema, "")]
    if not any(map(is_odd, places)):
        return schema
    # A reference to what is in a `oneOf` must find it there.
    is_strict = is_strict and not any(
        "/oneOf" in unquote(str(place.get("$ref", "")))
        for place in places
        if isinstance(place, dict)
    )
    schema = copy.deepcopy(schema)
    for _, place in list(_schemas(schema, "")):
        if not isinstance(place, dict):
            continue
        if _asks_for_nothing(place, "uniqueItems"):
            del place["uniqueItems"]
        if is_strict and "oneOf" in place:
            some = place.pop("oneOf")
            if "anyOf" in place:
                place["allOf"] = [*place.get("allOf", ()), {"anyOf": some}]
            else:
                place["anyOf"] = some
    return schema


def _asks_for_nothing(place: dict[str, Any], keyword: str) -> bool:
    # `false` is a schema that nothing matches wherever a schema may stand: there it asks for much.
    return keyword == "uniqueItems" and place.get(keyword) is False


def _check_values(place: dict[str, Any], path: str) -> None:
    """What depends on a keyword's value."""
    reference = place.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise _unsupported(path, "$ref", "only references within the schema ('#...') are supported")
    kind = place.get("type", "string")
    is_text = "string" in kind
    if is_text and "format" in place and place["format"] not in FORMATS:
        raise _unsupported(path, "format", f"supported are {', '.join(sorted(FORMATS))}")
    patterns = [("pattern", place["pattern"])] if "pattern" in place else []
    patterns += [("patternProperties", name) for name in place.get("patternProperties", ())]
    for keyword, pattern in patterns:
        fault = fault_of(pattern)
        if fault is not None and fault[0] == "unsupported":
            raise _unsupported(path, keyword, fault[1])
        if fault is not None:
            raise _wrong_value(path, keyword, fault[1])


def _unsupported(path: str, keyword: str, reason: str) -> UnsupportedParameterError:
    name = f"{path[-_MAX_PATH_CHARS:]}.{keyword}"
    return UnsupportedParameterError(f"'{name}': {reason}.", param=name)


def _wrong_value(path: str, keyword: str, reason: str) -> InvalidValueError:
    name = f"{path[-_MAX_PATH_CHARS:]}.{keyword}"
    return InvalidValueError(f"Invalid value for '{name}': {reason}.", param=name)


def _check_bounds(schema: object, param: str) -> None:
    """What any schema must keep to, before anything looks closer at it: its depth, size and numbers."""
    num_nodes, num_chars = 0, 0
    left: list[tuple[object, int]] = [(schema, 1)]
    while left:
        place, depth = left.pop()
        num_nodes += 1
        num_chars += len(place) if isinstance(place, str | dict | list) else 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidValueError(
                f"'{param}' is nested more than {MAX_SCHEMA_DEPTH} levels deep.", param=param
            )
        if num_nodes > MAX_SCHEMA_NODES:
            raise InvalidValueError(
                f"'{param}' has more than {MAX_SCHEMA_NODES} values.", param=param
            )
        if isinstance(place, dict):
            num_chars += sum(map(len, place))
            left += [(value, depth + 1) for value in place.values()]
        elif isinstance(place, list):
            left += [(value, depth + 1) for value in place]
        elif isinstance(place, int | float) and not abs(place) <= _MAX_NUMBER:
            raise InvalidValueError(
                f"'{param}' holds a number that is too large: at most 1.79e308 can be followed.",
                param=_number_path(schema, param),
            )
        if num_chars > MAX_SCHEMA_BYTES:  # the exact size is checked once it is written as JSON
            raise InvalidValueError(
                f"'{param}' is larger than {MAX_SCHEMA_BYTES} bytes.", param=param
            )


def _number_path(schema: object, param: str) -> str:
    """Where the first number that is too large stands."""
    left: list[tuple[str, object]] = [(param, schema)]
    while left:
        path, place = left.pop()
        if isinstance(place, int | float) and not abs(place) <= _MAX_NUMBER:
            return path[-_MAX_PATH_CHARS:]
        if isinstance(place, dict):
            left += [(f"{path}.{name[:64]}", value) for name, value in place.items()]
        elif isinstance(place, list):
            left += [(f"{path}[{i}]", value) for i, value in enumerate(place)]
    return param


def _schemas(schema: object, path: str) -> Iterator[tuple[str, Any]]:
    """Every schema within `schema`, itself first; not what `enum`, `const` or `default` hold."""
    left: list[tuple[str, Any]] = [(path, schema)]
    while left:
        place_path, place = left.pop()
        yield place_path, place
        if not isinstance(place, dict):
            continue
        for keyword in _MAPS:
            named = place.get(keyword)
            if isinstance(named, dict):
                left += [
                    (f"{place_path}.{keyword}.{name[:64]}", one) for name, one in named.items()
                ]
        for keyword in _LISTS:
            several = place.get(keyword)
            if isinstance(several, list):
                left += [(f"{place_path}.{keyword}[{i}]", one) for i, one in enumerate(several)]
        for keyword in _SINGLE:
            if keyword in place:
                left.append((f"{place_path}.{keyword}", place[keyword]))
