"""Regular expressions in schemas: what the grammar engine would refuse of them, in time linear in them.

A pattern is never compiled here: Python's dialect is another, and its warnings quote the pattern. It is
cut into parts once, from left to right. Every repetition below is possessive, and no character is scanned
more than twice, so that hostile patterns take no longer than others.

Where something is hard to read (classes in classes in classes, verbose mode), nothing is said: the engine
will tell.
"""

from __future__ import annotations

import re
from typing import Final, Literal

MAX_REGEX_CHARS: Final = 16 * 1024
_MAX_REPEATS: Final = 2**32 - 1

# What is passed over as one (an escape; a class, with classes in it that have none in them), or matters.
_PART: Final = re.compile(
    r"\\[pPxuU]\{[^{}]*+\}"
    r"|\\."
    r"|\[\^?+\]?+(?:\\.|[^\]\\\[]|\[\^?+\]?+(?:\\.|[^\]\\\[])*+\])*+\]"
    r"|\(\?<?[=!]"
    r"|\{[^{}]*+\}?+"
    r"|[\[()|]",
    re.DOTALL,
)
_NOT_REGULAR: Final = re.compile(r"\(\?<?[=!]|\\[bBkK0-9<>]")
_ODD_ESCAPE: Final = re.compile(r"\\[CEFGHIJLMNOQRTVXYZceghijlmoqy]")
_REPEAT: Final = re.compile(r"\{\s*+0*+([0-9]++)\s*+(,\s*+(?:0*+([0-9]++)\s*+)?+)?+\}")
_VERBOSE: Final = re.compile(r"\(\?[a-wyzA-Z-]*+x")

Fault = tuple[Literal["unsupported", "wrong"], str]


def fault_of(pattern: str) -> Fault | None:
    """Why the engine would refuse it; None: it would not, or that is hard to tell."""
    if len(pattern) > MAX_REGEX_CHARS:
        return "wrong", f"it is longer than {MAX_REGEX_CHARS} characters"
    if any(_NOT_REGULAR.match(match[0]) for match in _PART.finditer(pattern)):
        return "unsupported", "look-around, word boundaries and back-references are not supported"
    if _VERBOSE.search(pattern):
        return None  # what looks like a bracket may stand in a comment
    wrong = _wrong_part(pattern)
    return None if wrong is None else ("wrong", f"no regular expression: {wrong}")


def _wrong_part(pattern: str) -> str | None:
    depth, start = 0, 0  # `start`: where an alternative begins, so that there is nothing to repeat
    if pattern[:1] in ("*", "+", "?"):
        return "nothing stands before a repetition"
    for match in _PART.finditer(pattern):
        part, end = match[0], match.end()
        if part == "[":
            # A class that is not closed, or one with too much in it to be read here.
            return None if "]" in pattern[end + 2 :] else "a bracket is not closed"
        if part[0] == "{":
            wrong = _wrong_repeat(part, is_first=match.start() == start)
            if wrong is not None:
                return wrong
        elif part in ("(", "|"):
            start = end
            if pattern[end : end + 1] in ("*", "+", "?" if part == "|" else "*"):
                return "nothing stands before a repetition"
        elif _ODD_ESCAPE.match(part):
            return "an escape that is not known"
        depth += (part == "(") - (part == ")")
        if depth < 0:
            return "a bracket was not opened"
    return "a bracket is not closed" if depth else None


def _wrong_repeat(part: str, *, is_first: bool) -> str | None:
    if is_first:
        return "nothing stands before a repetition"
    count = _REPEAT.fullmatch(part)
    if count is None:
        return "braces hold no count, as in 'a{1,3}'; write '\\\\{' for a brace"
    # Not `int` at once: Python refuses to read thousands of digits.
    bounds = [digits for digits in (count[1], count[3]) if digits is not None]
    if any(len(digits) > 10 or int(digits) > _MAX_REPEATS for digits in bounds):
        return f"a count is greater than {_MAX_REPEATS}"
    return (
        "a count's end is below its start"
        if len(bounds) == 2 and int(bounds[0]) > int(bounds[1])
        else None
    )
