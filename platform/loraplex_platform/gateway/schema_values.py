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
# Counts: of a text's characters, where the engine counts in a regular expression, and of anything else.
_MAX_LENGTH: Final = 2**32 - 1
_MAX_COUNT: Final = 2**64 - 1


def _is_number(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, most: int) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_bound(value: Any) -> bool:  # noqa: ANN401 - JSON
    # Compared, not converted: an integer of any length is compared exactly, NaN with nothing.
    return _is_number(value) and abs(value) <= _MAX_BOUND


def _is_type(value: Any) -> bool:  # noqa: ANN401 - JSON
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_some(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, list) and bool(value)


def _is_draft(value: Any) -> bool:  # noqa: ANN401 - JSON
    return isinstance(value, str) and _DRAFTS.fullmatch(value) is not None


_LENGTH: Final[tuple[_Check, str]] = (
    lambda value: _is_count(value, _MAX_LENGTH),
    "a number from 0 to 2^32-1, without a fraction",
)
_COUNT: Final[tuple[_Check, str]] = (
    lambda value: _is_count(value, _MAX_COUNT),
    "a number from 0 to 2^64-1, without a fraction",
)
_TEXT: Final[tuple[_Check, str]] = (lambda value: isinstance(value, str), "a text")
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
    **dict.fromkeys(("pattern", "format", "$ref"), _TEXT),
    "minimum": _BOUND,
    "maximum": _BOUND,
    "exclusiveMinimum": _EXCLUSIVE,
    "exclusiveMaximum": _EXCLUSIVE,
    "multipleOf": (lambda value: _is_bound(value) and value != 0, "a number other than 0"),
    **dict.fromkeys(("minLength", "maxLength"), _LENGTH),
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
}
# Of a type that is the only one: the lower count and the upper.
_RANGES: Final = (
    ("string", "minLength", "maxLength"),
    ("array", "minItems", "maxItems"),
    ("object", "minProperties", "maxProperties"),
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
    return _unmatchable(place)


def _unmatchable(place: dict[str, Any]) -> tuple[str, str] | None:
    kind = place.get("type")
    kinds = set(kind) if isinstance(kind, list) else {kind}
    for only, low, high in _RANGES:
        if kinds == {only} and low in place and high in place and place[low] > place[high]:
            return low, f"greater than '{high}': nothing can match"
    if kinds <= {"integer", "number"}:
        return _empty_interval(place, is_whole="number" not in kinds)
    return None


def _empty_interval(place: dict[str, Any], *, is_whole: bool) -> tuple[str, str] | None:
    lows, highs = (
        _ends(place, "minimum", "exclusiveMinimum"),
        _ends(place, "maximum", "exclusiveMaximum"),
    )
    if not lows or not highs:
        return None
    low, is_low_out, low_name = max(lows)
    high, is_high_out, high_name = min(highs, key=lambda end: (end[0], not end[1]))
    if low > high or (low == high and (is_low_out or is_high_out)):
        return low_name, f"nothing lies between it and '{high_name}'"
    if is_whole:
        first = math.floor(low) + 1 if is_low_out else math.ceil(low)
        last = math.ceil(high) - 1 if is_high_out else math.floor(high)
        if first > last:
            return low_name, f"no integer lies between it and '{high_name}'"
    return None


def _ends(place: dict[str, Any], name: str, exclusive: str) -> list[tuple[float, bool, str]]:
    """Bounds on one side: the number, whether it lies outside, and the keyword."""
    # Draft 4 says with a boolean whether the bound itself is out; later ones have two bounds.
    is_out = place.get(exclusive, False)
    if isinstance(is_out, bool):
        return [(place[name], is_out, name)] if name in place else []
    ends = [(is_out, True, exclusive)]
    return [*ends, (place[name], False, name)] if name in place else ends
