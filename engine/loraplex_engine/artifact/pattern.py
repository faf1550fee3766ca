"""Which regular expressions of strangers are run at all.

A backtracking matcher takes exponential time on a few short patterns, such as (a*)*x, and holds the
interpreter while it does: one adapter could stop an engine. Module name patterns need none of that, so
groups may not be repeated, and repeats and alternatives are few; what is left is polynomial in the
forty characters of a module name, and `reader` bounds the time it takes in all.
"""

from __future__ import annotations

import re
from typing import Final

MAX_REPEATS: Final = 6
MAX_ALTERNATIVES: Final = 8  # groups with a "|"

_REPEATS: Final = frozenset("*+?{")


class UnsafePatternError(ValueError):
    """The pattern is wrong or not allowed; the message says why."""


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression that is invalid or that could take exponential time.

    Raises:
        UnsafePatternError: with the reason.
    """
    num_repeats = 0
    with_alternatives: set[int] = set()  # numbers of the groups
    open_groups, num_groups = [0], 1
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            if pattern[at : at + 1].isdigit():
                raise UnsafePatternError("it refers back to a group")
            at += 1
        elif char == "[":
            at = _end_of_class(pattern, at)
        elif char == "(":
            if pattern[at : at + 1] == "?":
                if pattern[at : at + 2] != "?:":
                    raise UnsafePatternError("it has a group of the form (?...) other than (?:...)")
                at += 2
            open_groups.append(num_groups)
            num_groups += 1
        elif char == ")":
            if len(open_groups) == 1:
                raise UnsafePatternError("a ')' closes nothing")
            open_groups.pop()
            if pattern[at : at + 1] in ("*", "+", "{"):
                raise UnsafePatternError("it repeats a group")
        elif char == "|":
            with_alternatives.add(open_groups[-1])
        elif char in _REPEATS:
            num_repeats += 1
            if char == "{":
                at = max(pattern.find("}", at) + 1, at)
            if pattern[at : at + 1] in ("?", "+"):  # lazy, possessive
                at += 1
    if num_repeats > MAX_REPEATS:
        raise UnsafePatternError(f"it has {num_repeats} repeats; {MAX_REPEATS} are allowed")
    if len(with_alternatives) > MAX_ALTERNATIVES:
        raise UnsafePatternError(
            f"it has {len(with_alternatives)} groups of alternatives; {MAX_ALTERNATIVES} are allowed"
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsafePatternError(f"it is no regular expression ({error})") from error


def _end_of_class(pattern: str, at: int) -> int:
    """The index after the ']' of a character class whose inside begins at `at`."""
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
