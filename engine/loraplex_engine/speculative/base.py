"""What the drafter asks of a source of drafts.

Nothing here decides a token: the runner samples every position with the noise of its own output position,
and a draft counts only where it is what was sampled. So a proposer may be as clever or as wrong as it
likes; a draft model fits behind the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """A row that would like drafts."""

    key: int  # of its request; the same for as long as that lives
    token_ids: Sequence[int]  # all that is known; between two asks with one key it only grows
    max_drafts: int  # at least 1


class Proposer(Protocol):
    """Guesses what comes next. All calls come from the step thread."""

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """For each ask up to `max_drafts` token ids, in order; none where there is nothing to go by."""
        ...

    def forget(self, key: int) -> None:
        """The request is gone; a key never asked with is a no-op."""
        ...
