"""The values of a schema's keywords: of the right type, and not such that nothing can match.

The grammar engine refuses the same, but later and without the path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

from loraplex_platform.gateway.schema_alternatives import resolve

_TYPES: Final = frozenset(
    {"null", "boolean", "integer", "number", "string", "array", "object"},
)
_UNBALANCED: Final = "no regular expression: a bracket is not closed, or was not opened"
_DRAFTS: Final = re.compile(
    r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?"
)
_Check = Callable[[Any], bool]
# Beyond this the engine has no numbers for bounds.
_MAX_BOUND: Final = 2.0**53
# In a pattern: what is passed over as one, a class without classes in it, or a bracket.
_PART: Final = re.compile(r"\\.|\[\^?+\]?+(?:\\.|[^\]\\\[])*+\]|[\[()]", re.DOTALL)


def _is_number(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_bound(value: Any) -> bool:  # noqa: ANN401 - JSON
    return _is_number(value) and math.isfinite(value) and abs(value) <= _MAX_BOUND


def _is_type(value: Any) -> bool:  # noqa: ANN401 - JSON
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_some(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, list) and bool(value)


def _is_draft(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, str) and _DRAFTS.fullmatch(value) is not None


_COUNT: Final = (_is_count, "a number from 0 on, without a fraction")
_BOUND: Final = (_is_bound, "a number of at most 2^53")
_SOME: Final = (_is_some, "a list that is not empty")
_LIST: Final[tuple[_Check, str]] = (lambda value: isinstance(value, list), "a list")
_OBJECT: Final[tuple[_Check, str]] = (lambda value: isinstance(value, dict), "an object")
_EXCLUSIVE: Final[tuple[_Check, str]] = (
    lambda value: isinstance(value, bool) or _is_bound(value),
    _BOUND[1],
)
_EXPECTED: Final[dict[str, tuple[_Check, str]]] = {
    "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of some"),
    "enum": _SOME,
    "anyOf": _SOME,
    "oneOf": _SOME,
    "allOf": _LIST,
    "prefixItems": _LIST,
    "properties": _OBJECT,
    "patternProperties": _OBJECT,
    "$schema": (_is_draft, "a draft of json-schema.org from 04 on"),
    "required": (_is_names, "a list of names"),
    "pattern": (lambda value: isinstance(value, str), "a text"),
    "$ref": (lambda value: isinstance(value, str), "a text"),
    "minimum": _BOUND,
    "maximum": _BOUND,
    "exclusiveMinimum": _EXCLUSIVE,
    "exclusiveMaximum": _EXCLUSIVE,
    "multipleOf": (lambda value: _is_bound(value) and value != 0, "a number other than 0"),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _COUNT,
    ),
}
# Of a type that is the only one: the lower bound and the upper.
_RANGES: Final = (
    (("string",), "minLength", "maxLength"),
    (("array",), "minItems", "maxItems"),
    (("object",), "minProperties", "maxProperties"),
    (("integer", "number"), "minimum", "maximum"),
)


def find_wrong_value(
    place: dict[str, Any],
    root: Any,  # noqa: ANN401 - JSON
    *,
    has_ids: bool,
) -> tuple[str, str] | None:
    """A keyword of `place` with what is wrong with it; None: its values are fine.

    Args:
        has_ids: some schema in `root` has an `$id`: there references may start elsewhere, which only the
            engine follows.
    """
    for keyword, value in place.items():
        expected = _EXPECTED.get(keyword)
        if expected is not None and not expected[0](value):
            return keyword, f"expected {expected[1]}"
    reference = place.get("$ref", "#")
    if reference.startswith("#/") and not has_ids and resolve(root, reference) is None:
        return "$ref", "it points at nothing in this schema"
    return _wrong_pattern(place) or _unmatchable(place)


def _wrong_pattern(place: dict[str, Any]) -> tuple[str, str] | None:
    # Not Python's own compiler: its dialect is another, and its warnings quote the pattern.
    if "pattern" in place and _is_unbalanced(place["pattern"]):
        return "pattern", _UNBALANCED
    if any(map(_is_unbalanced, place.get("patternProperties", ()))):
        return "patternProperties", _UNBALANCED
    return None


def _is_unbalanced(pattern: str) -> bool:
    """A bracket is not closed, or was not opened. False also where that is hard to tell."""
    depth = 0
    for match in _PART.finditer(pattern):
        part = match[0]
        if part == "[":
            return "[" not in pattern[match.end() :] and "]" not in pattern[match.end() + 2 :]
        depth += (part == "(") - (part == ")")
        if depth < 0:
            return True
    return depth > 0


def _unmatchable(place: dict[str, Any]) -> tuple[str, str] | None:
    kind = place.get("type")
    for kinds, low, high in _RANGES:
        if kind in kinds and low in place and high in place and place[low] > place[high]:
            return low, f"greater than '{high}': nothing can match"
    is_range = kind == "integer" and "minimum" in place and "maximum" in place
    if is_range and math.ceil(place["minimum"]) > math.floor(place["maximum"]):
        return "minimum", "no integer lies between it and 'maximum'"
    return None
