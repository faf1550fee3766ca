"""Prompt lookup: what followed the last time these tokens were seen will follow again.

The longest suffix of the known tokens, `max_n` to `min_n` tokens, that occurred before; of its occurrences
the latest; drafts are what followed it. Where that reaches the end of what is known it goes on with the
drafts themselves, so that a short cycle fills any number of drafts.

One vectorised comparison over the row's tokens (some microseconds per thousand), no Python per token
but for the new ones.
Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), the idea.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loraplex_engine.speculative.base import Ask

Int32Array = npt.NDArray[np.int32]

_FIRST_CAPACITY = 256


class NgramProposer:
    """`Proposer` by looking back in the row's own tokens; needs no other row and no model."""

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n {min_n} and max_n {max_n}: use 1 <= min_n <= max_n")
        self._min_n = min_n
        self._max_n = max_n
        self._histories: dict[int, _History] = {}

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        return [self._propose(ask) for ask in asks]

    def forget(self, key: int) -> None:
        self._histories.pop(key, None)

    def _propose(self, ask: Ask) -> Sequence[int]:
        history = self._histories.get(ask.key)
        if history is None:
            history = self._histories[ask.key] = _History()
        known = history.catch_up(ask.token_ids)
        start = continuation_start(known, self._min_n, self._max_n)
        if start is None:
            return ()
        drafts: list[int] = known[start : start + ask.max_drafts].tolist()
        cycle = len(drafts)
        while len(drafts) < ask.max_drafts:
            drafts.append(drafts[-cycle])
        return drafts


def continuation_start(known: Int32Array, min_n: int, max_n: int) -> int | None:
    """Where the longest repeated suffix went on the last time; None: no suffix of `min_n` recurs."""
    if len(known) <= min_n:
        return None
    # Is an earlier occurrence of the last `min_n` tokens, by its end.
    is_end = known[min_n - 1 : -1] == known[-1]
    for back in range(1, min_n):
        is_end &= known[min_n - 1 - back : -1 - back] == known[-1 - back]
    ends = is_end.nonzero()[0] + (min_n - 1)
    length = min_n
    while ends.size > 1 and length < max_n:
        longer = ends[ends >= length]
        longer = longer[known[longer - length] == known[-1 - length]]
        if not longer.size:
            break
        ends = longer
        length += 1
    return int(ends[-1]) + 1 if ends.size else None


class _History:
    """A row's tokens as an array that grows by doubling."""

    __slots__ = ("_count", "_token_ids")

    def __init__(self) -> None:
        self._token_ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._count = 0

    def catch_up(self, token_ids: Sequence[int]) -> Int32Array:
        """Take over what is new; a view of all."""
        count = len(token_ids)
        if count > len(self._token_ids):
            grown = np.empty(max(count, 2 * len(self._token_ids)), np.int32)
            grown[: self._count] = self._token_ids[: self._count]
            self._token_ids = grown
        self._token_ids[self._count : count] = token_ids[self._count :]
        self._count = count
        return self._token_ids[:count]
