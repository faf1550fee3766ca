"""Stop strings, found right across token boundaries, without ever showing a part of one.

The match is the one that *ends* first, character by character; of several that end at the same
character, the longest. So the outcome does not depend on how the text was cut into tokens, and the
token that completes it is known the moment it arrives: nothing is generated to see whether a longer
stop string would have matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` may be shown; `is_stopped`: a stop string completed and nothing after it counts."""

    text: str
    is_stopped: bool


class StopMatcher:
    """Holds back exactly the characters that may still become a stop string.

    Args:
        shows_stop: the text includes the stop string that ends it.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._shows_stop = shows_stop
        self._stops = [stop for stop in dict.fromkeys(stops) if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def push(self, text: str, *, can_stop: bool = True) -> StopMatch:
        """Take new text; return what may be shown now. After `is_stopped`, push nothing more.

        Args:
            can_stop: False: no stop string ends in this text, though one may begin in it.
        """
        if not self._stops:
            return StopMatch(text, is_stopped=False)
        whole = self._held + text
        for end in range(len(self._held) + 1, len(whole) + 1) if can_stop else ():
            start = self._match_ending_at(whole, end)
            if start is not None:
                self._held = ""
                return StopMatch(whole[: end if self._shows_stop else start], is_stopped=True)
        keep = self._num_possible(whole)
        self._held = whole[len(whole) - keep :]
        return StopMatch(whole[: len(whole) - keep], is_stopped=False)

    def flush(self) -> str:
        """The held characters, when generation ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _match_ending_at(self, whole: str, end: int) -> int | None:
        lengths = [len(stop) for stop in self._stops if whole.endswith(stop, 0, end)]
        return end - max(lengths) if lengths else None

    def _num_possible(self, whole: str) -> int:
        """Length of the longest end of `whole` that begins some stop string."""
        for length in range(min(self._longest - 1, len(whole)), 0, -1):
            tail = whole[len(whole) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
