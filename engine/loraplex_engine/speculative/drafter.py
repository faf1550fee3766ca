"""Which rows of a step get drafts, and how many.

Drafts change what a step costs, never what it says, so the choice may follow the load. Each draft
costs a token of computing and brings one with the probability that it, and all drafts before it, are what
is sampled: with rate a per draft, k drafts make 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a) tokens of a row.
`auto` takes the drafts, likeliest first, that make the step's tokens per second highest by what steps were
measured to cost, and none where that gains too little; so drafts end by themselves at the batch size where
computing, not reading the weights, is what a step waits for.

A rows that are asked for drafts, K places of a block, N drafts of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from loraplex_engine.request import Request
from loraplex_engine.speculative.acceptance import Acceptance
from loraplex_engine.speculative.base import Ask, Proposer
from loraplex_engine.speculative.costs import Float64Array, Int64Array, StepCosts

# Less is within the error of what was measured.
_LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class DraftWant:
    """A row of the step that has caught up, and how many drafts it may use at most (at least 1)."""

    request: Request
    room: int


@dataclass(slots=True)
class DraftCounts:
    """Since the start."""

    blocks: int = 0  # rows and steps with drafts
    drafts: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by the draft's place in its block


Constrain = Callable[[Request, tuple[int, ...]], tuple[int, ...]]


class Drafter:
    """The scheduler's source of drafts.

    Args:
        costs: measured here and followed; None: always draft (as many as `max_drafts`).
    """

    def __init__(self, proposer: Proposer, max_drafts: int, costs: StepCosts | None = None) -> None:
        assert max_drafts >= 1
        self.counts = DraftCounts(accepted_at=[0] * max_drafts)
        # Cuts drafts at the first that the request's grammar does not allow. Without it, requests with
        # a grammar get none: their later positions would have no masks.
        self.constrain: Constrain | None = None
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._costs = costs
        self._acceptance = Acceptance()

    def draft(
        self, wants: Sequence[DraftWant], num_tokens: int, budget: int
    ) -> list[tuple[int, ...]]:
        """Drafts for each of `wants`, together at most `budget`, in a step of `num_tokens` without them."""
        drafts: list[tuple[int, ...]] = [()] * len(wants)
        asked = [
            index
            for index, want in enumerate(wants)
            if not self._acceptance.is_paused(want.request.seq, want.request.num_output_tokens)
        ]
        rate_A = np.asarray([self._rate(wants[index].request) for index in asked])
        if not asked or not self._may_pay(rate_A, num_tokens, len(wants)):
            return drafts
        proposed = self._proposer.propose(
            [
                Ask(
                    key=wants[index].request.seq,
                    token_ids=wants[index].request.token_ids,
                    max_drafts=min(wants[index].room, self._max_drafts),
                )
                for index in asked
            ]
        )
        usable = [
            self._usable(wants[index].request, tuple(ids))
            for index, ids in zip(asked, proposed, strict=True)
        ]
        size_A = np.asarray([len(ids) for ids in usable])
        lengths = self._lengths(rate_A, size_A, num_tokens, len(wants), budget)
        for index, ids, length in zip(asked, usable, lengths, strict=True):
            drafts[index] = ids[:length]
        return drafts

    def note(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A block was verified; called before its tokens are appended to the request."""
        self.counts.blocks += 1
        self.counts.drafts += num_drafts
        self.counts.accepted += num_accepted
        for place in range(num_accepted):
            self.counts.accepted_at[place] += 1
        num_output = request.num_output_tokens + num_accepted + 1
        self._acceptance.note(request.seq, num_output, num_drafts, num_accepted)

    def note_spoilt(self, request: Request, num_drafts: int) -> None:
        """Beside these drafts nothing finite came out; the request gets none for a while."""
        self.counts.blocks += 1
        self.counts.drafts += num_drafts
        self._acceptance.pause(request.seq, request.num_output_tokens)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step that only decoded, with drafts or without, took so long."""
        if self._costs is not None:
            self._costs.note(num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._proposer.forget(request.seq)
        self._acceptance.forget(request.seq)

    def _usable(self, request: Request, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Without what cannot be wanted: nothing follows a stop token, nor what a grammar forbids."""
        if request.sampling.grammar is not None:
            if self.constrain is None:
                return ()
            ids = self.constrain(request, ids)
        for place, token_id in enumerate(ids):
            if token_id in request.stop_ids:
                # It needs no draft: it is sampled in the place before, where everything ends.
                return ids[:place]
        return ids

    def _may_pay(self, rate_A: Float64Array, num_tokens: int, num_rows: int) -> bool:
        """Whether drafts could gain anything at all; if not, nobody is asked for any."""
        if self._costs is None:
            return True
        if not self._costs.is_known(num_tokens):
            return False  # a plain step first: it is what all else is compared with
        # As if all rows were like the best and had all drafts.
        gain_K = rate_A.max() ** np.arange(1, self._max_drafts + 1)
        return self._best_count(np.repeat(gain_K, len(rate_A)), num_tokens, num_rows) > 0

    def _lengths(
        self,
        rate_A: Float64Array,
        size_A: Int64Array,
        num_tokens: int,
        num_rows: int,
        budget: int,
    ) -> list[int]:
        """How many of its `size_A` drafts each of the rows that were asked computes."""
        place_K = np.arange(1, self._max_drafts + 1)
        # The probability that a draft brings a token. Within a row it falls, and the sort is stable: a
        # row's drafts are taken from the first on.
        gain_AK = rate_A[:, None] ** place_K
        row_N, _ = (place_K <= size_A[:, None]).nonzero()
        gain_N = gain_AK[place_K <= size_A[:, None]]
        order_N = np.argsort(-gain_N, kind="stable")[:budget]
        count = len(order_N)
        if self._costs is not None:
            count = self._best_count(gain_N[order_N], num_tokens, num_rows)
        lengths: list[int] = np.bincount(row_N[order_N[:count]], minlength=len(rate_A)).tolist()
        return lengths

    def _best_count(self, gain_N: Float64Array, num_tokens: int, num_rows: int) -> int:
        """How many of the drafts, best first, make tokens per second highest; 0: plain is as good."""
        assert self._costs is not None
        num_drafts_N = np.arange(len(gain_N) + 1)
        seconds_N = self._costs.seconds_of(num_tokens + num_drafts_N)
        tokens_N = num_rows + np.concatenate(([0.0], np.cumsum(gain_N)))
        speed_N = tokens_N / seconds_N
        best = int(speed_N.argmax())
        return best if speed_N[best] >= _LEAST_GAIN * speed_N[0] else 0

    def _rate(self, request: Request) -> float:
        return self._acceptance.rate(request.seq, request.num_output_tokens)
