"""JSON schemas from clients: bounded, and only with keywords that the grammar engine follows.

The engine would find the same, but later and in its own words; a client is told before its request is on
the books, with the path of what is in the way. What is merely ignored by JSON schema itself (titles,
descriptions, examples) is ignored here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from loraplex_platform.gateway.errors import InvalidValueError, UnsupportedParameterError

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 8192
MAX_SCHEMA_BYTES = 128 * 1024
_MAX_PATH_CHARS = 300

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
        "$recursiveRef",
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
    for path, place in _schemas(schema, param):
        if not isinstance(place, dict):
            if isinstance(place, bool):
                continue
            name = path[-_MAX_PATH_CHARS:]
            raise InvalidValueError(
                f"Invalid value for '{name}': a schema is an object or a boolean.", param=name
            )
        for keyword in place:
            # `false` asks for nothing.
            if keyword in UNSUPPORTED and place[keyword] is not False:
                name = f"{path[-_MAX_PATH_CHARS:]}.{keyword}"
                raise UnsupportedParameterError(
                    f"'{name}': the JSON schema keyword '{keyword}' is not supported.", param=name
                )
        reference = place.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            name = f"{path[-_MAX_PATH_CHARS:]}.$ref"
            raise UnsupportedParameterError(
                f"'{name}': only references within the schema ('#...') are supported.", param=name
            )


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
