"""Which regular expressions of strangers are run at all.

A backtracking matcher takes exponential time on a few short patterns, such as (a*)*x, and holds the
interpreter while it does: one adapter could stop an engine. Module name patterns need none of that, so
groups may not be repeated, and the ways in which a pattern can match a module name are counted: what
repeats can take of its characters, times the branches of every group that can match the same text.
`reader` and `shape` bound the time it takes in all.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import comb
from typing import Final

MAX_REPEATS: Final = 6
MAX_WAYS: Final = 16_000_000  # tried in about a second

_NAME_CHARS: Final = 40
_REPEATS: Final = frozenset("*+?{")


class UnsafePatternError(ValueError):
    """The pattern is wrong or not allowed; the message says why."""


def check_pattern(pattern: str) -> int:
    """Refuse a regular expression that is invalid or that could take exponential time.

    Returns:
        A bound on the ways in which it can match a module name, at most `MAX_WAYS`.

    Raises:
        UnsafePatternError: with the reason.
    """
    num_repeats = 0
    num_ways = 1
    # Per open group, the outermost first, its branches; None for one that is more than plain text.
    open_groups: list[list[str | None]] = [[""]]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            if pattern[at : at + 1].isdigit():
                raise UnsafePatternError("it refers back to a group")
            escaped = pattern[at : at + 1]
            _extend(open_groups[-1], None if escaped.isalnum() else escaped)
            at += 1
        elif char == "[":
            _extend(open_groups[-1], None)
            at = _end_of_class(pattern, at)
        elif char == "(":
            if pattern[at : at + 1] == "?":
                if pattern[at : at + 2] != "?:":
                    raise UnsafePatternError("it has a group of the form (?...) other than (?:...)")
                at += 2
            _extend(open_groups[-1], None)
            open_groups.append([""])
        elif char == ")":
            if len(open_groups) == 1:
                raise UnsafePatternError("a ')' closes nothing")
            num_ways *= _num_ways(open_groups.pop())
            if pattern[at : at + 1] in ("*", "+", "{"):
                raise UnsafePatternError("it repeats a group")
        elif char == "|":
            open_groups[-1].append("")
        elif char in _REPEATS:
            _extend(open_groups[-1], None)
            num_repeats += 1
            if char == "{":
                at = max(pattern.find("}", at) + 1, at)
            if pattern[at : at + 1] in ("?", "+"):  # lazy, possessive
                at += 1
        else:
            _extend(open_groups[-1], None if char in ".^$" else char)
    if num_repeats > MAX_REPEATS:
        raise UnsafePatternError(f"it has {num_repeats} repeats; {MAX_REPEATS} are allowed")
    num_ways *= _num_ways(open_groups[0]) * comb(_NAME_CHARS + num_repeats, num_repeats)
    if num_ways > MAX_WAYS:
        raise UnsafePatternError("its alternatives and repeats can match in too many ways")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsafePatternError(f"it is no regular expression ({error})") from error
    return num_ways


def _extend(branches: list[str | None], text: str | None) -> None:
    """Add to a group's last branch."""
    last = branches[-1]
    branches[-1] = None if text is None or last is None else last + text


def _num_ways(branches: list[str | None]) -> int:
    """How many of a group's branches can match at one place: of different plain texts only one."""
    texts = sorted(branch for branch in branches if branch is not None)
    if len(texts) == len(branches) and not any(b.startswith(a) for a, b in pairwise(texts)):
        return 1
    return len(branches)


def _end_of_class(pattern: str, at: int) -> int:
    """The index after the ']' of a character class whose inside begins at `at`."""
    if pattern[at : at + 1] == "^":
        at += 1
    if pattern[at : at + 1] == "]":
        at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
