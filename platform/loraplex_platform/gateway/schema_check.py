"""JSON schemas from clients: bounded, and only with keywords that the grammar engine follows.

The engine would find the same, but later and in its own words; a client is told before its request is on
the books, with the path of what is in the way. Left to the engine is what only it can tell: patterns,
formats, lengths and constants that contradict each other, names that two `patternProperties` match, and
what takes too much time or memory. What is merely ignored by JSON schema itself (titles,
descriptions, examples) is ignored here too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Final

from loraplex_platform.gateway.errors import InvalidValueError, UnsupportedParameterError
from loraplex_platform.gateway.schema_alternatives import Alternatives
from loraplex_platform.gateway.schema_values import find_wrong_value

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 8192
MAX_SCHEMA_BYTES = 128 * 1024
_MAX_PATH_CHARS = 300
_NOT_EXCLUSIVE: Final = (
    "its schemas must exclude each other by type, by constants or by a required property; where a value"
    " may match several of them, use 'anyOf'"
)
_NO_LOOKING: Final = "look-around, word boundaries and back-references are not supported"

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
# In patterns: an escaped character or a class, to be passed over as one, and what opens a look-around.
_PATTERN_PART: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
_NOT_REGULAR: Final = re.compile(r"\(\?|\\[bBk1-9]")
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
            name = f"{path[-_MAX_PATH_CHARS:]}.{wrong[0]}"
            raise InvalidValueError(f"Invalid value for '{name}': {wrong[1]}.", param=name)
        _check_values(place, path)
    _check_sense(schema, param)


def _check_sense(schema: object, param: str) -> None:
    """What depends on several keywords, all of which have been checked."""
    alternatives = Alternatives(schema)
    for path, place in _schemas(schema, param):
        if not isinstance(place, dict):
            continue
        if "oneOf" in place and not alternatives.exclude_each_other(place["oneOf"]):
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
        "/oneOf" in str(place.get("$ref", "")) for place in places if isinstance(place, dict)
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
    pattern = place.get("pattern")
    if pattern is not None and not _is_regular(pattern):
        raise _unsupported(path, "pattern", _NO_LOOKING)
    if not all(map(_is_regular, place.get("patternProperties", ()))):
        raise _unsupported(path, "patternProperties", _NO_LOOKING)


def _is_regular(pattern: str) -> bool:
    """No look-around, word boundary or back-reference."""
    parts = (match[0] for match in _PATTERN_PART.finditer(pattern))
    return not any(_NOT_REGULAR.match(part) for part in parts)


def _unsupported(path: str, keyword: str, reason: str) -> UnsupportedParameterError:
    name = f"{path[-_MAX_PATH_CHARS:]}.{keyword}"
    return UnsupportedParameterError(f"'{name}': {reason}.", param=name)


def _check_bounds(schema: object, param: str) -> None:
    num_nodes = 0
    left: list[tuple[object, int]] = [(schema, 1)]
    while left:
        place, depth = left.pop()
        num_nodes += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidValueError(
                f"'{param}' is nested more than {MAX_SCHEMA_DEPTH} levels deep.", param=param
            )
        if num_nodes > MAX_SCHEMA_NODES:
            raise InvalidValueError(
                f"'{param}' has more than {MAX_SCHEMA_NODES} values.", param=param
            )
        if isinstance(place, dict):
            left += [(value, depth + 1) for value in place.values()]
        elif isinstance(place, list):
            left += [(value, depth + 1) for value in place]


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
