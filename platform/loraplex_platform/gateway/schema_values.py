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
_DRAFTS: Final = re.compile(
    r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?"
)
_Check = Callable[[Any], bool]
# Beyond this the engine has no numbers for bounds.
_MAX_BOUND: Final = 2.0**53
_NOT_CLOSED: Final = (
    "missing ), unterminated subpattern",
    "unbalanced parenthesis",
    "unterminated character set",
    "nothing to repeat",
)


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


def find_wrong_value(place: dict[str, Any], root: Any) -> tuple[str, str] | None:  # noqa: ANN401
    """A keyword of `place` with what is wrong with it; None: its values are fine."""
    for keyword, value in place.items():
        expected = _EXPECTED.get(keyword)
        if expected is not None and not expected[0](value):
            return keyword, f"expected {expected[1]}"
    return _wrong_reference(place, root) or _wrong_pattern(place) or _unmatchable(place)


def _wrong_reference(place: dict[str, Any], root: Any) -> tuple[str, str] | None:  # noqa: ANN401
    reference = place.get("$ref")
    # Within a schema that has an `$id` of its own, pointers start there; that is the engine's to follow.
    if not isinstance(reference, str) or not reference.startswith("#/") or "$id" in str(root):
        return None
    if resolve(root, reference) is None:
        return "$ref", "it points at nothing in this schema"
    return None


def _wrong_pattern(place: dict[str, Any]) -> tuple[str, str] | None:
    patterns = [("patternProperties", one) for one in place.get("patternProperties", {})]
    if "pattern" in place:
        patterns.append(("pattern", place["pattern"]))
    for keyword, pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            # Another dialect than the engine's: only what is wrong in both counts.
            if error.msg in _NOT_CLOSED:
                return keyword, f"no regular expression: {error.msg}"
        except (OverflowError, RecursionError):
            continue
    return None


def _unmatchable(place: dict[str, Any]) -> tuple[str, str] | None:
    kind = place.get("type")
    for kinds, low, high in _RANGES:
        if kind in kinds and low in place and high in place and place[low] > place[high]:
            return low, f"greater than '{high}': nothing can match"
    is_range = kind == "integer" and "minimum" in place and "maximum" in place
    if is_range and math.ceil(place["minimum"]) > math.floor(place["maximum"]):
        return "minimum", "no integer lies between it and 'maximum'"
    return None
